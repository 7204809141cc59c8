"""A broker or worker that ends itself at a named point: ``python -m tests.integration.hooked ROOM ARGUMENTS``.

The product knows nothing of this. HAULIER_CRASH_AT=POINT[:N] sends SIGKILL to the own process the Nth time the point is
passed; HAULIER_HOLD_LOCK_S holds the interpreter lock that long once a line runs; HAULIER_CLOCK names a file with two
numbers, seconds added to wall and monotonic clock; HAULIER_LONG_BYTES makes the answer to line 0 that long. A point
that names nothing any more fails at the start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINT, _, COUNT = os.environ.pop("HAULIER_CRASH_AT", "").partition(":")
HOLD_S = float(os.environ.pop("HAULIER_HOLD_LOCK_S", "0"))
LONG_BYTES = int(os.environ.pop("HAULIER_LONG_BYTES", "0"))
CLOCK = os.environ.pop("HAULIER_CLOCK", "")
BROKER_POINTS = (
    "broker.started", "broker.receiving", "broker.checking", "broker.before_assign_commit",
    "broker.after_assign_commit", "broker.batch_sent", "broker.before_result_commit", "broker.after_result_commit",
    "broker.ack_sent", "broker.before_welcome",
)  # fmt: skip
WORKER_POINTS = (
    "worker.started", "worker.hello_sent", "worker.first_beat", "worker.tokenized", "worker.running",
    "worker.before_result_commit", "worker.after_result_commit", "worker.done_sent", "worker.before_discard",
    "worker.after_discard",
)  # fmt: skip
_left = int(COUNT or 1)


def passed(point: str, holds: bool = True) -> None:
    """This process is at ``point``."""
    global _left
    if holds and point == POINT:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
    """Look at the arguments of a method before or after it runs."""
    real = getattr(owner, name)

    def seen(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        found = real(*arguments, **named)
        if after is not None:
            after(*arguments, **named)
        return found

    setattr(owner, name, seen)


def hook_broker() -> None:
    from broker.effects import AssignLine, SendBatch, StoreResult
    from broker.intake import Intake
    from broker.link import Link
    from broker.server import Server
    from broker.spool import Spool
    from broker.store import Store
    from common import messages

    turn: set[type] = set()

    def speaking(server: Any) -> None:
        sends = server._sends
        passed("broker.after_assign_commit", any(isinstance(one, SendBatch) for one in sends))
        passed("broker.after_result_commit", any(isinstance(getattr(one, "message", 0), messages.Ack) for one in sends))

    def committing(_: Any) -> None:
        passed("broker.before_assign_commit", AssignLine in turn)
        passed("broker.before_result_commit", StoreResult in turn)
        turn.clear()

    around(Server, "run", lambda *_: passed("broker.started"), None)
    around(Spool, "append", None, lambda *_: passed("broker.receiving"))
    around(Intake, "step", None, lambda *_: passed("broker.checking"))
    around(Store, "apply", None, lambda _, writes: turn.update(type(one) for one in writes))
    around(Store, "check_incarnation", committing, None)
    around(Server, "_speak", speaking, None)
    around(Link, "send_batch", None, lambda *_: passed("broker.batch_sent"))
    around(
        Link, "send", lambda _, peer, message: passed("broker.before_welcome", isinstance(message, messages.Welcome)),
        lambda _, peer, message: passed("broker.ack_sent", isinstance(message, messages.Ack)),
    )  # fmt: skip


def hook_worker() -> None:
    from common import messages
    from worker import effects as do
    from worker.link import Link
    from worker.outbox import Outbox
    from worker.process import Worker
    from worker.witness import Witness

    def said(_: Any, message: Any) -> None:
        passed("worker.hello_sent", isinstance(message, messages.Hello))
        passed("worker.first_beat", isinstance(message, messages.WorkerBeat))
        passed("worker.done_sent", isinstance(message, messages.Done))

    def writing(when: str) -> Callable[..., None]:
        def look(_: Any, effects: Any, incarnation: int) -> None:
            passed(f"worker.{when}_result_commit", any(isinstance(one, do.Save) for one in effects))
            passed(f"worker.{when}_discard", any(isinstance(one, do.Discard) for one in effects))

        return look

    around(Outbox, "begin", None, lambda *_: passed("worker.started"))
    around(Outbox, "write", writing("before"), writing("after"))
    around(Link, "send", None, said)
    around(Worker, "_post_results", lambda *_: passed("worker.tokenized"), None)
    around(Witness, "saw", None, lambda *_: passed("worker.running"))
    if LONG_BYTES:
        lengthen()
    if HOLD_S:
        once = threading.Event()

        def begin(*_: Any) -> None:
            if not once.is_set():
                once.set()
                threading.Thread(target=hold, daemon=True).start()

        around(Witness, "saw", None, begin)


def lengthen() -> None:
    """As if the model had said very much to line 0."""
    from worker.process import Worker
    from worker.structures import Outcome

    real = Worker._post_results
    head, tail = b'{"choices": [{"message": {"role": "assistant", "content": "', b'"}}]}'
    body = head + b"x" * (LONG_BYTES - len(head) - len(tail)) + tail

    def post(self: Any, results: Any) -> None:
        real(self, [one._replace(body=body) if isinstance(one, Outcome) and one.ref.index == 0 else one
                    for one in results])  # fmt: skip

    Worker._post_results = post  # type: ignore[method-assign]


def hold() -> None:
    """Hold the interpreter lock, as a helper in C that does not let go of it would."""
    ctypes.PyDLL(None).usleep(int(HOLD_S * 1e6))


def hook_clock() -> None:
    from common.clock import SystemClock

    file = Path(CLOCK)

    def shift(index: int) -> float:
        try:
            return float(file.read_text().split()[index])
        except (OSError, IndexError):
            return 0.0

    SystemClock.wall = lambda self: time.time() + shift(0)  # type: ignore[method-assign]
    SystemClock.monotonic = lambda self: time.monotonic() + shift(1)  # type: ignore[method-assign]


def main() -> None:
    room = sys.argv[1]
    if POINT and POINT not in BROKER_POINTS + WORKER_POINTS:
        raise SystemExit(f"no such point: {POINT}")
    if CLOCK:
        hook_clock()
    hook_broker() if room == "broker" else hook_worker()
    del sys.argv[1]
    runpy.run_module(room, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
