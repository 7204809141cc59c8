"""shell: the engine's side of the ring: sleeps until something is published, orders the device behind the doorbell
(R2), and lets the consumed word follow the device's reads in ring order (R3).

Plans from the producer's shadow of the descriptors; never reads the payload on the host. Every method belongs to one
thread, the engine's, except ``abort``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from common.errors import InvariantError
from ring.accounting import word_of
from ring.descriptor import Entry
from ring.handover import Handover
from ring.memory import ABORT, RingMemory


class Source(Protocol):
    """Where entries come from: ``ring.producer.Producer`` or, on a further rank, ``ring.mirror.Mirror``."""

    @property
    def memory(self) -> RingMemory: ...

    @property
    def handover(self) -> Handover: ...


class Consumer:
    """Takes what ``producer`` publishes. One thread, the engine's."""

    def __init__(self, producer: Source) -> None:
        self.memory = producer.memory
        self._handover = producer.handover
        self._words = producer.memory.words
        self._stream: int | None = None
        self._bound = False

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something is published, at most ``timeout_s``: whether something is. An abort wakes it too."""
        return self._handover.wait(timeout_s)

    def take(self) -> list[Entry]:
        """Every entry published and not yet taken, oldest first. Each is released once, cancels and skips included."""
        return self._handover.take()

    def await_doorbell(self, stream: int | None, entry: Entry) -> None:
        """What ``stream`` does from here on sees the payload of the entry and of all before it.

        Never a wait for something that may not come: raises ``InvariantError`` unless the entry was taken, and so
        published.
        """
        if not self._handover.is_taken(entry.sequence):
            raise InvariantError(f"stream would wait for entry {entry.sequence}, which nobody took")
        self.memory.wait_doorbell(stream, word_of(entry.sequence))

    def release(self, entry: Entry, stream: int | None = None) -> None:
        """The entry's payload is read for good by what ``stream`` was given so far. In any order, once an entry.

        The consumed word moves in ring order only, written by the stream when it comes there. All releases come from
        one stream: raw stream memory operations of two streams have no order between them, and a word written by one
        would give back what the other still reads (``InvariantError``).
        """
        self.release_all((entry,), stream)

    def release_all(self, entries: Iterable[Entry], stream: int | None = None) -> None:
        """``release`` for several entries, with one write of the consumed word at most."""
        if not self._bound:
            self._stream, self._bound = stream, True
        elif stream != self._stream:
            raise InvariantError(f"a release on stream {stream}, while earlier ones were on {self._stream}")
        through = self._handover.release([entry[0] for entry in entries])
        if through is not None:
            self._give_back(through)

    def _give_back(self, through: int) -> None:
        """All entries up to ``through`` are released here: the stream says so in its order."""
        self.memory.write_consumed(self._stream, word_of(through))

    def hold(self, entry: Entry, reason: str) -> None:
        """Record why a taken entry is kept, for the finding of R6 and for explaining a wait."""
        self._handover.hold(entry.sequence, reason)

    def abort(self) -> None:
        """Ring the abort word from the engine's side: the next publish raises. Any thread; may be called again."""
        self._words[ABORT] = 1
        self._handover.abort()

    @property
    def aborted(self) -> bool:
        """Whether either side rang the abort word."""
        return self._handover.aborted
