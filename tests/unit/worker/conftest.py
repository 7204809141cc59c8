"""A session's machine on a table: its disk is a dict, its link a list, its engine answers when told to.

The rig does what the process does with effects, in the process's order (writes, commit, then sends), and raises where
something is said that is not durable. Every rig's books are checked on teardown.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import messages as wire
from common.messages import BatchLine, Fence, LineRef, ModelInfo
from worker import effects as do
from worker import inputs as on
from worker.session import Session
from worker.states import Identity, State
from worker.structures import Outcome, Prepared, Request, Sampling

MODEL = ModelInfo("echo", "fp", 4096)
STORE = "store-a"
RING_BYTES = 1 << 20


class Rig:
    """One worker's machine. ``said`` holds (endpoint, message) of everything that left."""

    def __init__(
        self,
        brokers: tuple[str, ...] = ("tcp://a:1",),
        rows: dict[LineRef, tuple[Outcome, str]] | None = None,
        incarnation: int = 1,
        chance: float = 1.0,
    ) -> None:
        self.now = 100.0
        self.disk: dict[LineRef, tuple[Outcome, str]] = dict(rows or {})
        self.aside: dict[LineRef, str] = {}
        listed = [(ref, store, outcome.size) for ref, (outcome, store) in self.disk.items()]
        last = listed[-1][1] if listed else ""
        self.session = Session(Identity("w", incarnation, brokers, last), listed, lambda: chance, self.now)
        self.link: str | None = None
        self.said: list[tuple[str, Any]] = []
        self.unsaved: list[Any] = []
        self.jobs: list[Any] = []
        self.stopped: list[Request] = []
        self.resolved = 0
        self.notes: list[do.Note] = []
        self.ran: list[LineRef] = []
        self.exit: do.Exit | None = None
        self.auto_commit = True
        self.snapshot = on.Snapshot(free_entries=1000, free_bytes=RING_BYTES)

    # -- what the process does --------------------------------------------------------------------------------

    def tell(self, item: on.Input) -> None:
        """One input, then the rest of a turn."""
        sends = self._apply(self.session.handle(item, self.now))
        if self.auto_commit and self.unsaved and self.exit is None:
            sends += self.commit()
        for effect in sends:
            self._say(effect)
        self.session.check()

    def commit(self) -> list[Any]:
        """The disk takes what waits for it, and only then the session hears of it."""
        saved = []
        for effect in self.unsaved:
            if isinstance(effect, do.Save):
                self.disk[effect.outcome.ref] = (effect.outcome, effect.store_id)
                saved.append(effect.outcome.ref)
            elif isinstance(effect, do.Discard):
                for ref in effect.refs:
                    del self.disk[ref]
            elif isinstance(effect, do.SetAside):
                self.aside[effect.ref] = effect.reason
                del self.disk[effect.ref]
        self.unsaved = []
        return self._apply(self.session.handle(on.Stored(tuple(saved)), self.now)) if saved else []

    def _apply(self, effects: list[do.Effect]) -> list[Any]:
        sends = []
        for effect in effects:
            if isinstance(effect, do.NoteRunning):
                self.ran += effect.refs
            elif isinstance(effect, do.WRITES):
                self.unsaved.append(effect)
            elif isinstance(effect, do.SENDS):
                sends.append(effect)
            elif isinstance(effect, do.Tokenize):
                self.jobs.append(effect.job)
            elif isinstance(effect, do.StopRequests):
                self.stopped += effect.requests
            elif isinstance(effect, do.Resolve):
                self.resolved += effect.items
            elif isinstance(effect, do.Note):
                self.notes.append(effect)
            elif isinstance(effect, do.Exit):
                self.exit = effect
        return sends

    def _say(self, effect: Any) -> None:
        if isinstance(effect, do.Connect):
            assert self.link is None, "two sockets at once"
            self.link = effect.endpoint
        elif isinstance(effect, do.Disconnect):
            self.link = None
        elif self.link is not None:
            self.said.append((self.link, self._message(effect)))

    def _message(self, effect: Any) -> Any:
        if isinstance(effect, do.Send):
            return effect.message
        if isinstance(effect, do.SendResults):
            return wire.Done(effect.fence, tuple(self._result(ref) for ref in effect.refs))
        outcome = self._durable(effect.ref)
        data = outcome.body[effect.offset : effect.offset + effect.length]
        if effect.offset == 0:
            return wire.Done(effect.fence, (self._result(effect.ref, data),))
        return wire.ResultPart(effect.fence, effect.ref, effect.offset, data)

    def _durable(self, ref: LineRef) -> Outcome:
        assert ref in self.disk, f"{ref.line} was told before it was durable (D1)"
        return self.disk[ref][0]

    def _result(self, ref: LineRef, body: bytes | None = None) -> wire.Result:
        out = self._durable(ref)
        return wire.Result(ref, out.status, out.status_code, out.prompt_tokens, out.completion_tokens, len(out.body),
                           out.body if body is None else body, out.notes)  # fmt: skip

    # -- what happens in life -----------------------------------------------------------------------------------

    def tick(self, seconds: float = 0.0, steps: int | None = None) -> None:
        self.now += seconds
        if steps is not None:
            self.snapshot = on.Snapshot(free_entries=1000, free_bytes=RING_BYTES, steps=steps)
        self.tell(on.Tick(self.snapshot))

    def greet(self) -> None:
        """Log in as far as the HELLO."""
        for _ in range(20):
            if self.session.state != State.OUT:
                break
            self.tick(0.5)
        self.tell(on.LinkReady())

    def welcome(self, store: str = STORE, epoch: int = 1, verdicts: tuple[wire.Verdict, ...] = (), broker: int = 1,
                more: bool = False) -> None:  # fmt: skip
        fence = Fence(store, broker, self.session.identity.incarnation, epoch)
        self.hear(wire.Welcome(fence, 1.0, 5.0, verdicts, more))

    def up(self, loaded: bool = True, concurrency: int = 4, **welcome: Any) -> None:
        """A session that stands, with its model loaded."""
        if loaded and not self.session.models:
            self.load(concurrency)
        self.tick()
        self.greet()
        self.welcome(**welcome)
        self.tick()

    def load(self, concurrency: int = 4) -> None:
        self.tell(on.Loaded((MODEL,), concurrency, RING_BYTES))

    def hear(self, message: Any) -> None:
        self.tell(on.Received(message))

    @property
    def fence(self) -> Fence:
        assert self.session.fence is not None
        return self.session.fence

    def batch(self, *refs: LineRef, assignment: int = 1, body: bytes = b"{}") -> None:
        lines = tuple(BatchLine(ref, "/v1/chat/completions", len(body), body) for ref in refs)
        self.hear(wire.Batch(self.fence, assignment, lines))

    def prepared(self, ref: LineRef, tokens: int = 8) -> Prepared:
        return Prepared(Request(ref, "/v1/chat/completions", "echo", tokens, Sampling(4)), array("i", range(tokens)))

    def tokenize(self, *refs: LineRef) -> None:
        for ref in refs:
            self.tell(on.Tokenized(self.prepared(ref)))

    def publish(self) -> None:
        while batches := self.session.work.lines.next_batches(RING_BYTES):
            self.tell(on.Published(tuple(one.request.ref for batch in batches for one in batch)))

    def run(self, *refs: LineRef) -> None:
        """As far as the engine."""
        self.tokenize(*refs)
        self.publish()
        self.tell(on.Admitted(refs))

    def finish(self, ref: LineRef, body: bytes = b'{"a":1}', status: str = "ok") -> None:
        self.tell(on.Ended(Outcome(ref, status, 200, 8, 2, body if status != "cancelled" else b"")))

    def ack(self, *refs: LineRef, verdict: str = "stored", fence: Fence | None = None) -> None:
        verdicts = tuple(wire.Verdict(ref, verdict, "why") for ref in refs)
        self.hear(wire.Ack(fence or self.fence, verdicts))

    def of(self, kind: type) -> list[Any]:
        """What was said of one kind."""
        return [message for _, message in self.said if isinstance(message, kind)]

    def done(self) -> list[wire.Result]:
        return [result for done in self.of(wire.Done) for result in done.results]

    def held(self, ref: LineRef) -> Any:
        return self.session.work.lines.get(ref)


def _line(index: int, attempt: int = 1) -> LineRef:
    return LineRef("11111111-1111-4111-8111-111111111111", index, attempt)


@pytest.fixture
def line() -> Callable[..., LineRef]:
    """The ref of line ``index`` of the tests' one job."""
    return _line


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; their books are checked at the end."""
    made: list[Rig] = []

    def make(**how: Any) -> Rig:
        made.append(Rig(**how))
        return made[-1]

    yield make
    for rig in made:
        if rig.exit is None:
            rig.session.check()


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    """One worker that has not logged in yet."""
    return rigs()
