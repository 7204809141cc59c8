"""shell: between the ring and the scheduler: which prompts lie in which entry, and when an entry may be given back.

An entry is released when the device has read all of its prompts, or none of the rest will be read (R3); cancels travel
on the same ring. Token ids stay where they are: the device gathers them from the ring's pages (R1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from common.errors import InvariantError
from common.messages import LineRef
from ring.consumer import Consumer
from ring.descriptor import Entry
from worker.engine.contexts import Context
from worker.structures import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came, its prompt from index ``offset`` of the ring's int32 view on."""

    request: Request
    entry: int
    offset: int


@dataclass(slots=True)
class News:
    """What one look at the ring brought, in order of arrival within each list."""

    arrivals: list[Arrival] = field(default_factory=list)
    cancels: list[LineRef] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Open:
    entry: Entry
    unread: int
    awaited: bool = False


class Intake:
    """``stream`` is the compute queue's handle on CUDA, None on the CPU. One thread, the engine's."""

    def __init__(self, consumer: Consumer, stream: int | None) -> None:
        self._consumer = consumer
        self._stream = stream
        self._open: dict[int, _Open] = {}
        self.payload: torch.Tensor = consumer.memory.payload_device_view()

    @property
    def entries(self) -> int:
        """Entries taken and not yet given back."""
        return len(self._open)

    def look(self) -> News:
        """Take what is published. Cancels and skips are given back at once: they hold no prompt."""
        news = News()
        for entry in self._consumer.take():
            if entry.is_cancel:
                news.cancels.extend(_ref(request.item) for request in entry.requests)
            if entry.is_cancel or entry.is_skip or not entry.requests:
                if entry.is_skip:
                    news.arrivals.extend(self._arrivals(entry, entry=-1))
                    news.cancels.extend(_ref(request.item) for request in entry.requests)
                self._consumer.release(entry, self._stream)
                continue
            self._open[entry.sequence] = _Open(entry, len(entry.requests))
            news.arrivals.extend(self._arrivals(entry, entry=entry.sequence))
        return news

    @staticmethod
    def _arrivals(taken: Entry, entry: int) -> list[Arrival]:
        found = []
        for request in taken.requests:
            if not isinstance(request.item, Request):
                raise InvariantError(f"entry {taken.sequence} carries {type(request.item).__name__}, not a Request")
            if request.item.prompt_tokens != request.token_count:
                raise InvariantError(f"{request.item.ref}: {request.token_count} ids in the ring, not as it says")
            found.append(Arrival(request.item, entry, request.offset_tokens))
        return found

    def before_reading(self, sequence: int) -> None:
        """Put before the first read of an entry's payload on the compute queue: it waits for the doorbell (R2)."""
        one = self._known(sequence)
        if not one.awaited:
            self._consumer.await_doorbell(self._stream, one.entry)
            one.awaited = True

    def read(self, sequence: int) -> None:
        """One prompt of the entry is read for good, or never will be."""
        if sequence < 0:
            return
        one = self._known(sequence)
        one.unread -= 1
        if one.unread == 0:
            del self._open[sequence]
            self._consumer.release(one.entry, self._stream)

    def share(self, sequence: int) -> None:
        """One prompt of the entry has one reader more: ``read`` is to be called for it too."""
        if sequence >= 0:
            self._known(sequence).unread += 1

    def hold(self, sequence: int, reason: str) -> None:
        """Why the entry is kept, for whoever asks what holds the ring (R6)."""
        if sequence >= 0:
            self._consumer.hold(self._known(sequence).entry, reason)

    def _known(self, sequence: int) -> _Open:
        one = self._open.get(sequence)
        if one is None:
            raise InvariantError(f"entry {sequence} is not in the engine's hands")
        return one


class Prompts:
    """Who still reads which prompt: each context its own, and each shared history the one it was brought by, whether or
    not that request still runs (H5)."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._unread: set[int] = set()
        self._shared: dict[int, Context] = {}
        self._newest = -1

    def came(self, context: Context, *, again: bool = False) -> None:
        """It will read its prompt; ``again`` if others that its request brought will too."""
        if again:
            self._intake.share(context.entry)
        self._unread.add(context.number)

    def read(self, context: Context) -> None:
        """It has, or never will; asked again nothing happens."""
        if context.number in self._unread:
            self._unread.remove(context.number)
            self._intake.read(context.entry)

    def look(self, histories: Iterable[Context]) -> None:
        """At each plan and landing: ``histories`` are held, in ascending order of their numbers. A new one becomes a
        reader; one that is whole, or was let go, and has no step in flight, is none any more."""
        for history in histories:
            if history.number > self._newest:
                self._newest = history.number
                self._shared[history.number] = history
                self._intake.share(history.entry)
        for number, history in list(self._shared.items()):
            if not history.in_flight and (history.ended or history.prefilled == history.prompt_tokens):
                del self._shared[number]
                self._intake.read(history.entry)


def _ref(item: object) -> LineRef:
    ref = getattr(item, "ref", item)
    if not isinstance(ref, LineRef):
        raise InvariantError(f"a cancel names {item!r}, which is no line")
    return ref
