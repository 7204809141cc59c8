"""The worker's process from inside: its threads end together (S2), and its turn writes before it speaks (D1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, limits, wire
from common import messages as said
from common.config import EngineSettings, KeySettings, WorkerSettings
from common.errors import RefusedError
from common.messages import BatchLine, Fence, LineRef
from worker import machinery
from worker.outbox import Outbox, OutboxBlocked
from worker.process import Worker
from worker.structures import EngineFigures, Finished

BODY = b'{"model":"echo","messages":[{"role":"user","content":"hello"}]}'
INSECURE = KeySettings(insecure=True)


class Scripted:
    """The least a broker can be: a ROUTER that welcomes whoever says HELLO, on the test's own thread."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = wire.router(self.context, "tcp://127.0.0.1:*", INSECURE)
        self.endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
        self.fence = Fence("store-a", 1, 1, 1)
        self.peer = b""
        self.heard: list[Any] = []

    def say(self, message: Any) -> None:
        self.router.send_multipart([self.peer, codec.encode(message)])

    def listen(self) -> None:
        while self.router.poll(0):
            self.peer, frame = self.router.recv_multipart()
            message = codec.decode(frame)
            self.heard.append(message)
            if isinstance(message, said.Hello):
                self.fence = Fence("store-a", 1, message.incarnation, message.login)
                verdicts = tuple(said.Verdict(one.ref, "send") for one in message.held)
                self.say(said.Welcome(self.fence, limits.BEAT_S, limits.LIVENESS_S, verdicts, False))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        self.router.close(0)
        self.context.term()


@pytest.fixture
def broker() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


@pytest.fixture
def make(tmp_path: Path, broker: Scripted) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def worker(**how: Any) -> Worker:
        settings = WorkerSettings(
            (broker.endpoint,), tmp_path / "state", INSECURE, EngineSettings("echo"), ring_mib=1, echo=True, **how
        )
        made.append(Worker(settings))
        return made[-1]

    yield worker
    for one in made:
        one._end_threads()


def begin(worker: Worker) -> None:
    for thread in worker._threads:
        thread.start()


def turns(worker: Worker, broker: Scripted, until: Callable[[], bool], most: int = 2000) -> None:
    """Both sides' turns until something is so. One thread plays both, so neither may sleep for long."""
    sleep = worker._poller.poll
    worker._poller.poll = lambda milliseconds: sleep(min(milliseconds, 20))  # type: ignore[method-assign]
    try:
        for _ in range(most):
            if until():
                return
            broker.listen()
            worker.turn()
    finally:
        worker._poller.poll = sleep  # type: ignore[method-assign]
    raise AssertionError("it did not come about")


def test_a_line_goes_through_the_whole_process(make: Any, broker: Scripted, tmp_path: Path) -> None:
    """Socket, tokenizer, ring, engine, outbox, socket; acknowledged, it leaves nothing behind."""
    worker = make(witness=tmp_path / "witness")
    begin(worker)
    turns(worker, broker, lambda: any(beat.credit_lines for beat in broker.of(said.WorkerBeat)))
    ref = LineRef("11111111-1111-4111-8111-111111111111", 0, 1)
    broker.say(said.Batch(broker.fence, 1, (BatchLine(ref, "/v1/chat/completions", len(BODY), BODY),)))
    turns(worker, broker, lambda: bool(broker.of(said.Done)))
    result = broker.of(said.Done)[0].results[0]
    assert (result.ref, result.status) == (ref, "ok")
    assert b'"content":"hello"' in result.body
    assert len(worker.outbox.rows()) == 1
    broker.say(said.Ack(broker.fence, (said.Verdict(ref, "stored"),)))
    turns(worker, broker, lambda: not worker.outbox.rows())
    assert (tmp_path / "witness").read_text().startswith(f"{ref.job} 0 1 ")
    built = worker._machinery
    assert built is not None
    built.producer.poll()
    assert (built.producer.figures().items_unresolved, built.producer.figures().live) == (0, 0)


def test_nothing_is_said_of_a_result_the_disk_did_not_take(
    make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: the disk is full for a while: no DONE, no credit, one line in the log; then everything goes its way."""
    monkeypatch.setattr(limits, "OUTBOX_RETRY_S", 0.01)
    worker = make()
    begin(worker)
    turns(worker, broker, lambda: any(beat.credit_lines for beat in broker.of(said.WorkerBeat)))
    real = Outbox.write
    full = threading.Event()
    full.set()

    def write(self: Outbox, effects: Any, incarnation: int) -> None:
        if full.is_set():
            raise OutboxBlocked("disk full")
        real(self, effects, incarnation)

    monkeypatch.setattr(Outbox, "write", write)
    ref = LineRef("11111111-1111-4111-8111-111111111111", 0, 1)
    broker.say(said.Batch(broker.fence, 1, (BatchLine(ref, "/v1/chat/completions", len(BODY), BODY),)))
    turns(worker, broker, lambda: bool(worker.session.blocked))
    for _ in range(20):
        broker.listen()
        worker.turn()
    assert not broker.of(said.Done)
    full.clear()
    turns(worker, broker, lambda: bool(broker.of(said.Done)))
    assert worker.outbox.rows()


def test_a_disk_that_takes_again_ends_the_blockade_without_a_result(
    make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: the commit that failed held no result, only rows to delete; credit comes back with the next commit."""
    monkeypatch.setattr(limits, "OUTBOX_RETRY_S", 0.01)
    worker = make()
    begin(worker)
    turns(worker, broker, lambda: any(beat.credit_lines for beat in broker.of(said.WorkerBeat)))
    ref = LineRef("11111111-1111-4111-8111-111111111111", 0, 1)
    broker.say(said.Batch(broker.fence, 1, (BatchLine(ref, "/v1/chat/completions", len(BODY), BODY),)))
    turns(worker, broker, lambda: bool(broker.of(said.Done)))
    real = Outbox.write
    full = threading.Event()
    full.set()

    def write(self: Outbox, effects: Any, incarnation: int) -> Any:
        if full.is_set():
            raise OutboxBlocked("disk full")
        return real(self, effects, incarnation)

    monkeypatch.setattr(Outbox, "write", write)
    broker.say(said.Ack(broker.fence, (said.Verdict(ref, "stored"),)))
    turns(worker, broker, lambda: bool(worker.session.blocked))
    full.clear()
    turns(worker, broker, lambda: not worker.session.blocked)
    assert not worker.outbox.rows()


def test_an_engine_that_ends_ends_the_process(make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: no session without an engine: the broker must not see a worker that only beats."""

    class Dying:
        steps = layers = tokens = 0
        step_seconds = ()

        def figures(self) -> EngineFigures:
            return EngineFigures()

        def run(self, stop: Any) -> None:
            raise RuntimeError("illegal address")

    real = machinery.build

    def build(settings: Any, finish: Callable[[Finished], None], admit: Any, tell: Any) -> Any:
        built = real(settings, finish, admit, tell)
        return machinery.Machinery(
            built.model, built.concurrency, built.ring_bytes, built.producer, Dying(), built.preparer
        )

    monkeypatch.setattr(machinery, "build", build)
    worker = make()
    assert worker.run() == 70
    assert "engine" in worker.exit.reason
    assert not worker.still_running()


def test_an_engine_that_returns_unasked_ends_the_process(
    make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: its end without a failure is an end all the same."""
    monkeypatch.setattr("worker.echo_engine.EchoEngine.run", lambda self, stop: None)
    assert make().run() == 70


def test_a_tokenizer_that_ends_ends_the_process(make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the third thread."""

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("worker.tokenizer.serve", fail)
    assert make().run() == 70


@pytest.mark.parametrize(("failure", "code"), [(RefusedError("the disk is damaged"), 4), (ValueError("a bug"), 70)])
def test_a_session_that_fails_ends_the_process_in_order(
    make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: int
) -> None:
    """S2, L7: the main thread's own failure waits for the engine like any other, and no destructor runs before."""
    worker = make()
    monkeypatch.setattr(worker, "_tick", lambda: (_ for _ in ()).throw(failure))
    assert worker.run() == code
    assert worker.failed
    assert not worker.still_running()


def test_a_model_that_does_not_fit_is_one_line_and_exit_4(
    make: Any, broker: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A6: refused at start, naming the setting; not a traceback."""

    def refuse(*_: Any) -> None:
        raise RefusedError("--host-pool-gib 1 is too small: set it to 2")

    monkeypatch.setattr(machinery, "build", refuse)
    worker = make()
    assert worker.run() == 4
    assert worker.exit.reason == "--host-pool-gib 1 is too small: set it to 2"


def test_a_context_the_ring_cannot_hold_is_refused_at_start(tmp_path: Path) -> None:
    """R5's other side: a prompt that no ring of this size could ever take must not be accepted and then hang."""
    engine = EngineSettings("echo", context_tokens=1_000_000)
    settings = WorkerSettings(("tcp://127.0.0.1:1",), tmp_path, INSECURE, engine, ring_mib=1, echo=True)
    with pytest.raises(RefusedError, match="--ring-mib to 4"):
        machinery.build(settings, lambda _: None, lambda _: None, lambda _: None)


def test_told_to_end_it_drains_and_says_goodbye(make: Any, broker: Scripted) -> None:
    """SIGTERM with nothing to do."""
    worker = make()
    begin(worker)
    turns(worker, broker, lambda: bool(broker.of(said.WorkerBeat)))
    worker.terminate("told to", at_once=False)
    turns(worker, broker, lambda: worker.exit is not None)
    worker._end_threads()
    broker.router.poll(2000)
    broker.listen()
    assert broker.of(said.Bye)
    assert worker.exit.code == 0


def test_a_connection_that_does_not_end_is_left_behind(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: ZeroMQ waits for ever: the worker's end does not, and says what it left."""
    over = threading.Event()
    monkeypatch.setattr("worker.process.JOIN_S", 0.5)
    worker = make()
    begin(worker)
    real, worker._context = worker._context, Stuck(over)
    worker._end_threads()
    assert worker.still_running()[-1] == "connections"
    over.set()
    worker._context = real


class Stuck:
    """A context that ends when it is told to."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def destroy(self) -> None:
        self._over.wait()


def test_an_idle_worker_sleeps(make: Any, broker: Scripted) -> None:
    """No busy polling: an idle second is a handful of turns."""
    worker = make()
    begin(worker)
    turns(worker, broker, lambda: any(beat.credit_lines for beat in broker.of(said.WorkerBeat)))
    began = worker.clock.monotonic()
    count = 0
    while worker.clock.monotonic() - began < 1.0:
        worker.turn()
        count += 1
    assert count < 30
