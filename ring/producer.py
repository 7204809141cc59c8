"""shell: the session's side of the ring: writes payload and descriptor, fences, rings the doorbell (R1, R2).

What a batch takes and gives back is ``accounting``'s to decide (R3-R6); this file only stores. Every method belongs to
one thread, the session's. After warm-up each token id is written once, into the pages the device reads, and memory
does not grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common.errors import InvariantError
from common.limits import DESCRIPTOR_BYTES, PAYLOAD_ALIGN_BYTES
from ring.accounting import WORD_MASK, Accounting, Finding, RingFigures, Taken, word_of
from ring.descriptor import FLAG_CANCEL, FLAG_SKIP, LAYOUT, Entry, RingRequest
from ring.handover import Handover, RingAborted
from ring.memory import ABORT, CONSUMED, DOORBELL, RingMemory
from ring.watch import RingWatch

TokenIds: TypeAlias = "array[int] | npt.NDArray[np.int32]"
Want: TypeAlias = "tuple[int, int, int]"
"""Bytes, tokens and items of a batch."""
Requests: TypeAlias = "Sequence[tuple[Any, TokenIds]]"
_ALIGN = PAYLOAD_ALIGN_BYTES - 1
_pack_into = LAYOUT.pack_into
_new = tuple.__new__  # a named tuple's own constructor costs twice as much, and this is the publish path


_NOT_INT32 = (ValueError, TypeError, NotImplementedError)
"""What writing ids of another kind into the int32 payload raises."""
_ABORTED = "the ring was aborted: the engine or the session has ended"


def _want_of(requests: Requests) -> Want:
    total = 0
    for request in requests:
        total += len(request[1])
    return (total * 4 + _ALIGN) & ~_ALIGN, total, len(requests)


def _not_int32(batch_id: str) -> InvariantError:
    return InvariantError(f"token ids of batch {batch_id} are not int32 of one dimension")


def _itself(item: Any) -> Hashable:
    return item  # type: ignore[no-any-return] # items are the caller's; unhashable ones fail where they are hashed


class Producer:
    """Publishes batches into ``memory`` under the books of ``accounting``. One thread, the session's.

    ``identity`` tells by what an item is recognised when it is cancelled; by default by itself (it must be hashable).
    """

    def __init__(
        self, memory: RingMemory, accounting: Accounting, *, identity: Callable[[Any], Hashable] = _itself
    ) -> None:
        if memory.capacity_bytes != accounting.capacity_bytes or memory.entries != accounting.entries:
            raise InvariantError("the ring's books and its pages are of different size")
        self.memory = memory
        self.accounting = accounting
        self.handover = Handover(accounting.next_sequence)
        self._identity = identity
        self._words = memory.words
        self._fence = memory.fence
        self._payload = memory.payload
        self._table = memory.descriptors
        self._slot_mask = memory.entries - 1
        self._capacity = memory.capacity_bytes
        self._cancels: dict[Hashable, Any] = {}
        self._refused_items = 0
        self._watch = RingWatch()
        self._words[DOORBELL] = self._words[CONSUMED] = self._seen = word_of(accounting.next_sequence - 1)

    # -- down ---------------------------------------------------------------------------------------------------

    def publish(self, batch_id: str, requests: Requests) -> Entry | None:
        """Publish one batch: ``requests`` are pairs of an item and its int32 token ids, one dimension each.

        None while it does not fit (backpressure: ``poll``, then try again). Raises ``OversizeError`` for a batch that
        can never fit, ``RingAborted`` after an abort, ``InvariantError`` for ids that are not int32.
        """
        if self.handover.aborted:
            raise RingAborted(_ABORTED)
        want = _want_of(requests)
        taken = self.accounting.take(*want)
        if taken is None:
            self._refused_items = want[2]
            return None
        self._refused_items = 0
        try:
            entry = self._put(taken, want, batch_id, requests)
        except BaseException as error:
            self._void([], (taken,), (want,))
            if isinstance(error, _NOT_INT32):
                raise _not_int32(batch_id) from error
            raise
        self._ring_doorbell((entry,))
        return entry

    def publish_all(self, batches: Sequence[tuple[str, Requests]]) -> list[Entry]:
        """Publish ``batches`` (a name and its requests, as ``publish`` takes them) under one fence and one doorbell.

        In order, up to the first that does not fit: the entries of those that do. One that can never fit raises when it
        comes first, in a later call. Raises as ``publish``, and then none but the batches before the wrong one is
        published.
        """
        if self.handover.aborted:
            raise RingAborted(_ABORTED)
        wants = [_want_of(requests) for _, requests in batches]
        found = self.accounting.take_all(wants)
        self._refused_items = wants[len(found)][2] if len(found) < len(wants) else 0
        entries: list[Entry] = []
        try:
            for taken, want, (batch_id, requests) in zip(found, wants, batches, strict=False):
                entries.append(self._put(taken, want, batch_id, requests))
        except BaseException as error:
            written = len(entries)
            self._void(entries, found[written:], wants[written:])
            if isinstance(error, _NOT_INT32):
                raise _not_int32(batches[written][0]) from error
            raise
        if entries:
            self._ring_doorbell(entries)
        return entries

    def _put(self, taken: Taken, want: Want, batch_id: str, requests: Requests) -> Entry:
        """Token ids and descriptor to their pages, and the entry that tells where."""
        sequence, position, padding = taken
        length, tokens, items = want
        start = position % self._capacity >> 2
        payload = self._payload
        placed = []
        for item, ids in requests:
            count = len(ids)
            payload[start : start + count] = ids  # type: ignore[assignment] # typeshed knows memoryviews of bytes only
            placed.append(_new(RingRequest, (item, start, count)))
            start += count
        at = (sequence & self._slot_mask) * DESCRIPTOR_BYTES
        name = batch_id.encode()  # the layout keeps its first 16 bytes, as batch_key does
        _pack_into(self._table, at, sequence, position, length, padding, items, tokens, name, 0, 0)
        return _new(Entry, (sequence, batch_id, tuple(placed), position, length, padding, tokens, 0))

    def _void(self, written: list[Entry], found: Sequence[Taken], wants: Sequence[Want]) -> None:
        """Publish what is ``written``; what was taken for batches behind it goes down as skips of nothing, and so comes
        back."""
        for taken, (length, _, items) in zip(found, wants, strict=False):
            self.accounting.skip(taken.sequence)
            self.accounting.resolve(items)
            entry = Entry(taken.sequence, "void", (), taken.position, length, taken.padding, 0, FLAG_SKIP)
            self._describe(entry)
            written.append(entry)
        self._ring_doorbell(written)

    def _describe(self, entry: Entry) -> None:
        sequence, batch_id, requests, position, length, padding, tokens, flags = entry
        at = (sequence & self._slot_mask) * DESCRIPTOR_BYTES
        name = batch_id.encode()
        _pack_into(self._table, at, sequence, position, length, padding, len(requests), tokens, name, flags, 0)

    def _ring_doorbell(self, entries: Sequence[Entry]) -> None:
        """Behind payload and descriptors: fence, doorbell, and the host's edge. The one order in which anything is
        published."""
        self._fence()  # payload and descriptors are in memory before anyone can see the doorbell
        handover = self.handover
        with handover.lock:
            self._words[DOORBELL] = entries[-1][0] & WORD_MASK
            handover.published.extend(entries)
            if handover.sleeping:
                handover.ready.notify()

    def cancel(self, items: Iterable[Any]) -> Entry | None:
        """Ask for ``items`` to be stopped: a descriptor without payload that travels in order and wakes the engine.

        An entry the engine has not taken, all of whose items are named here, becomes a skip. None if even the entries
        kept for cancellations are used: then it is published by a later ``poll``, together with what came meanwhile.
        """
        named = {self._identity(item): item for item in items}
        self._cancels.update(named)
        if named:
            self._skip_untaken(named)
        return self._publish_cancels()

    def _skip_untaken(self, named: dict[Hashable, Any]) -> None:
        identity = self._identity
        published = self.handover.published
        with self.handover.lock:
            for index, entry in enumerate(published):
                if entry.flags or not all(identity(r.item) in named for r in entry.requests):
                    continue
                marked = entry._replace(flags=FLAG_SKIP)
                self._describe(marked)
                published[index] = marked
                self.accounting.skip(entry.sequence)

    def _publish_cancels(self) -> Entry | None:
        if not self._cancels or self.handover.aborted:
            return None
        taken = self.accounting.take(0, urgent=True)
        if taken is None:
            return None
        requests = tuple(RingRequest(item, 0, 0) for item in self._cancels.values())
        self._cancels.clear()
        entry = Entry(taken.sequence, "cancel", requests, taken.position, 0, 0, 0, FLAG_CANCEL)
        self._describe(entry)
        self._ring_doorbell((entry,))
        return entry

    # -- back ---------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Read the consumed word and give back, in order, what the device has read for good: how many entries."""
        word = self._words[CONSUMED]
        count = 0
        if word != self._seen:
            count = self.accounting.give_back_to(word)
            self._seen = word
        if self._cancels:
            self._publish_cancels()
        return count

    def resolve(self, items: int = 1) -> None:
        """``items`` published requests are done, failed or handed back."""
        self.accounting.resolve(items)

    def close(self) -> None:
        """Ring the abort word: the engine wakes and sees it; nothing more is published. May be called again."""
        self._words[ABORT] = 1
        self.handover.abort()

    # -- what the books say -------------------------------------------------------------------------------------

    def credit(self) -> tuple[int, int]:
        """Entries that batches may still take, and the largest batch in bytes that would be accepted now."""
        return self.accounting.credit()

    def figures(self) -> RingFigures:
        """The books (R4), audited as they are read."""
        return self.accounting.figures()

    def finding(self, *, engine_idle: bool, waiting_items: int | None = None) -> Finding | None:
        """R6: items unresolved, no tokens pending, engine idle; with the holder of every live descriptor.

        ``waiting_items`` of this worker are not in the ring yet; by default those of the batch refused last.
        """
        waiting = self._refused_items if waiting_items is None else waiting_items
        return self.accounting.finding(engine_idle=engine_idle, waiting_items=waiting, holder_of=self.handover.holder)

    def stuck(self, now: float, *, engine_idle: bool, waiting_items: int | None = None) -> Finding | None:
        """The watchdog of R6: ``finding``, once, when it has lasted with nothing taken, given back or resolved.

        ``now`` in seconds of the caller's clock. Call it at every poll or so; log its ``line()`` and count it.
        """
        found = self.finding(engine_idle=engine_idle, waiting_items=waiting_items)
        books = self.accounting
        return self._watch.see(found, 2 * books.next_sequence - books.entries_live, now)
