"""shell: the broker and workers that ``haulier run`` starts, watches and stops. Which one starts again: ``run_rules``.

Children run in sessions of their own, so that Ctrl-C reaches the run alone and it can end them in order; a pipe ends
them with it (``common.parent``). Their output goes to log files of the state folder. Knows no job and no message.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from broker import run_rules
from broker.client_rules import error_for
from broker.state_folder import StateFolder, tail
from common import parent
from common.clock import Clock, SystemClock

STOP_S = 15.0
"""A child that has nothing left to do stops well within this; a worker that runs lines finishes what it can in it."""
LEAVE_S = 5.0
"""Told a second time, a child leaves at once; after this it is killed."""
TAIL_LINES_COUNT = 10


@dataclass
class Child:
    """One child, through all its starts."""

    name: str
    room: str
    arguments: Sequence[str]
    process: subprocess.Popen[bytes]
    log_from: int
    ready: bool = False
    restarts: int = 0


class Children:
    """All children of one run. Main thread alone. Leaving the ``with`` block stops them."""

    def __init__(
        self, folder: StateFolder, say: Callable[[str], None], command: Sequence[str] = (sys.executable, "-m")
    ) -> None:
        self._folder = folder
        self._say = say
        self._command = tuple(command)
        self._children: list[Child] = []
        self._read_end, self._write_end = os.pipe()
        self._clock: Clock = SystemClock()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(child.name for child in self._children)

    def start(self, name: str, room: str, arguments: Sequence[str]) -> None:
        """Start ``python -m ROOM ARGUMENTS``, known as ``name`` to people."""
        process, log_from = self._spawn(name, room, arguments)
        self._children.append(Child(name, room, arguments, process, log_from))
        self._note()

    def _spawn(self, name: str, room: str, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
        environment = run_rules.environment(os.environ)
        environment[parent.VARIABLE] = str(self._read_end)
        with self._folder.log(name).open("ab") as log:
            process = subprocess.Popen(
                [*self._command, room, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(self._read_end, self._folder.children_lock),
            )
            return process, log.tell()

    def _note(self) -> None:
        self._folder.note_children([child.process.pid for child in self._children])

    def check(self) -> None:
        """Start again what was killed or crashed at work. Raises, with the child's exit code and words, what stays."""
        for child in self._children:
            code = child.process.poll()
            if code is None:
                continue
            log = self._folder.log(child.name)
            ended = run_rules.Ended(
                child.name, code, child.restarts, child.ready, tail(log, TAIL_LINES_COUNT), str(log)
            )
            if not run_rules.goes_on(ended):
                if not run_rules.spoken(ended.tail):
                    for line in ended.tail:
                        self._say(f"{child.name}: {line}")
                raise error_for(run_rules.end_code(ended), run_rules.end_words(ended))
            self._say(f"the {child.name} ended ({code}); starting it again")
            child.process, child.log_from = self._spawn(child.name, child.room, child.arguments)
            child.ready = False
            child.restarts += 1
            self._note()

    def mark_ready(self, room: str) -> None:
        """The children of this room do their work: from now on the end of one is a crash, not a refusal."""
        for child in self._children:
            child.ready = child.ready or child.room == room

    def progressed(self) -> None:
        """A line was finished: whatever died before, it was not for good."""
        for child in self._children:
            child.restarts = 0

    def stop(self, room: str = "") -> None:
        """End the children (of one ``room``), workers first, then brokers: SIGTERM, once more, and at last SIGKILL."""
        for name in ("worker", "broker"):
            chosen = [child for child in self._children if child.room == name and room in ("", name)]
            try:
                for patience in (STOP_S, LEAVE_S):
                    self._tell_to_stop(chosen, patience)
            finally:  # a second Ctrl-C included: nothing stays behind
                for child in chosen:
                    if child.process.poll() is None:
                        _signal(child.process, signal.SIGKILL)
                        child.process.wait()
                    self._children.remove(child)
        if not self._children and self._write_end >= 0:
            os.close(self._write_end)
            os.close(self._read_end)
            self._read_end = self._write_end = -1

    def _tell_to_stop(self, chosen: Sequence[Child], patience_s: float) -> None:
        left = [child for child in chosen if child.process.poll() is None]
        for child in left:
            _signal(child.process, signal.SIGTERM)
        until = self._clock.monotonic() + patience_s
        for child in left:
            _wait(child.process, until - self._clock.monotonic())


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, seconds))


def free_endpoint() -> tuple[socket.socket, str]:
    """A loopback endpoint nobody uses, and a socket that keeps it from others while it is open.

    The kept socket does not listen, so on Linux a broker can bind the same port beside it (both reuse the address);
    elsewhere it is closed at once.
    """
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    if sys.platform != "linux":
        kept.close()
    return kept, f"tcp://127.0.0.1:{port}"
