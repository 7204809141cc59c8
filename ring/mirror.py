"""shell: a ring's twin for a further rank of the same worker: the same pages, filled with what rank 0 passes on (R1).

An entry lies here where it lies in rank 0's ring, so that a step's tables mean the same on both. Nothing is booked:
rank 0 gives an entry's bytes back only once this rank has read it (``worker.engine.lockstep``), and so never passes on
an entry whose place here is still read. Every method belongs to one thread, the engine's.
"""

from __future__ import annotations

from array import array
from collections import deque

from common.errors import InvariantError
from ring.accounting import reached, word_of
from ring.consumer import Consumer
from ring.descriptor import Entry
from ring.handover import Handover
from ring.memory import CONSUMED, DOORBELL, RingMemory


class Mirror:
    """``memory`` has the size of rank 0's; ``first_sequence`` is that of its ring's first entry."""

    def __init__(self, memory: RingMemory, first_sequence: int = 1) -> None:
        self.memory = memory
        self._next = first_sequence
        self.handover = Handover(first_sequence)
        words = memory.words
        words[DOORBELL] = words[CONSUMED] = word_of(first_sequence - 1)

    def put(self, entry: Entry, ids: array[int]) -> None:
        """Publish an entry as rank 0 has it: ``ids`` are the int32 token ids of its requests, in order; none for an
        entry that is not to be run. Raises ``InvariantError`` for one out of order, or with other ids than it says."""
        if entry.sequence != self._next:
            raise InvariantError(f"entry {entry.sequence} came where {self._next} was next")
        self._next += 1
        if not entry.is_cancel and not entry.is_skip:
            self._write(entry, ids)
        self.memory.fence()
        self.memory.words[DOORBELL] = word_of(entry.sequence)
        with self.handover.lock:
            self.handover.published.append(entry)

    def _write(self, entry: Entry, ids: array[int]) -> None:
        at, values = 0, memoryview(ids)
        for _, offset, count in entry.requests:
            self.memory.payload[offset : offset + count] = values[at : at + count]
            at += count
        if at != len(ids):
            raise InvariantError(f"entry {entry.sequence} came with {len(ids)} token ids, its requests have {at}")


class MirrorConsumer(Consumer):
    """Takes what ``mirror`` has, and knows how far the device has read."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(mirror)
        self._pending: deque[int] = deque()
        self._through = -1

    def _give_back(self, through: int) -> None:
        super()._give_back(through)
        self._pending.append(through)

    @property
    def read_through(self) -> int:
        """All entries up to this sequence are read for good by the device; -1 for none."""
        word = self._words[CONSUMED]
        while self._pending and reached(word, word_of(self._pending[0])):
            self._through = self._pending.popleft()
        return self._through
