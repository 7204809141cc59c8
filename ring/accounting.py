"""rules: what the producer takes, the consumer returns, exactly (R3, R4, R5), and a ring full of nothing (R6).

Bytes are counted by two numbers that only grow, taken and returned; an entry takes ``length + padding`` and gives back
the same. The identity ``taken - returned = sum of live (length + padding)`` is checked on every change, by code that
raises. Knows no memory, thread or clock: one owner (the session's thread) calls everything here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import InvariantError, RefusedError

WORD_MASK = 0xFFFF_FFFF
_HALF = 0x8000_0000
_new = tuple.__new__  # a named tuple's own constructor costs twice as much, and this is the publish path
_CANCEL_SHARE = 8
"""One eighth of the table is kept for cancellations: the work that fills a ring must not shut out what stops it."""


class OversizeError(RefusedError):
    """A batch that no ring of this size can ever hold."""


def word_of(sequence: int) -> int:
    """The 32-bit word that stands for a sequence in the control page."""
    return sequence & WORD_MASK


def reached(word: int, value: int) -> bool:
    """Whether ``word`` has come to ``value`` or past it: the 32-bit cyclic compare of ``cuStreamWaitValue32`` (GEQ)."""
    return (word - value) & WORD_MASK < _HALF


class Placement(NamedTuple):
    """Where a payload would lie: it starts at ``position`` (bytes, only grows), after ``padding`` bytes left unused.

    ``skipped`` bytes were passed over by an empty ring (R5): taken and returned at once, part of no descriptor.
    """

    position: int
    padding: int
    skipped: int = 0


class Taken(NamedTuple):
    """What was taken: the entry's sequence, and where its payload lies after how much padding."""

    sequence: int
    position: int
    padding: int


class Live(NamedTuple):
    """An entry that was taken and not given back."""

    sequence: int
    length: int
    padding: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RingFigures:
    """The books at one moment (R4). Bytes, unless the name says tokens, items, entries or a count of happenings."""

    capacity: int
    taken: int
    returned: int
    live: int
    padding_live: int
    tokens_pending: int
    items_unresolved: int
    entries: int
    entries_live: int
    entries_taken: int
    entries_returned: int
    wraps: int
    padding_taken: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a live descriptor: ``by`` in words."""

    sequence: int
    length: int
    padding: int
    tokens: int
    by: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Full with nothing in it (R6): items wait for an answer, no token is pending, and the engine is idle."""

    items_unresolved: int
    bytes_held: int
    bytes_free: int
    entries_free: int
    holders: tuple[Holder, ...]

    def line(self) -> str:
        """The finding in one line for the log."""
        held = "; ".join(f"#{h.sequence} {h.length}+{h.padding} B by {h.by}" for h in self.holders) or "nobody"
        return (
            f"ring stalled: {self.items_unresolved} items unresolved, 0 tokens pending, engine idle; "
            f"{self.bytes_held} bytes held, {self.bytes_free} free, {self.entries_free} entries free; held by {held}"
        )


class Accounting:
    """The books of one ring of ``capacity_bytes`` payload and ``entries`` descriptors.

    ``first_sequence`` and ``first_position`` let a test begin anywhere, at the 32-bit turn for example.
    """

    def __init__(self, capacity_bytes: int, entries: int, *, first_sequence: int = 1, first_position: int = 0) -> None:
        if capacity_bytes < 1 or not 2 <= entries < _HALF:
            raise InvariantError(f"a ring needs bytes and 2 to 2^31 entries, not {capacity_bytes} and {entries}")
        self.capacity_bytes = capacity_bytes
        self.entries = entries
        self.batch_entries = entries - entries // _CANCEL_SHARE
        self._first_sequence = first_sequence
        self._next = first_sequence
        self._taken = first_position
        self._returned = first_position
        self._held = 0
        self._padding_live = 0
        self._tokens_pending = 0
        self._items_unresolved = 0
        self._wraps = 0
        self._padding_taken = 0
        self._skipped = 0
        self._live: deque[tuple[int, int, int, int]] = deque()  # the fields of Live; making one costs

    # -- taking -------------------------------------------------------------------------------------------------

    def fit(self, length: int, *, urgent: bool = False) -> Placement | None:
        """Where ``length`` bytes would go now; None while they do not fit (backpressure); changes nothing.

        Raises ``OversizeError`` for more than the capacity. ``urgent`` may use the entries kept for cancellations.
        """
        capacity = self.capacity_bytes
        if length > capacity:
            raise OversizeError(
                f"a batch of {length} bytes of token ids is larger than the ring of {capacity}: "
                f"set --ring-mib to {-(-length // (1 << 20))} or more, or send fewer tokens in one batch"
            )
        if len(self._live) >= (self.entries if urgent else self.batch_entries):
            return None
        taken = self._taken
        free = capacity - (taken - self._returned)
        room = capacity - taken % capacity
        if length <= room:
            return _new(Placement, (taken, 0, 0)) if length <= free else None
        if room + length <= free:
            return _new(Placement, (taken + room, room, 0))
        if free == capacity:
            # R5: nothing is live, so the rest of this lap holds nothing for anyone. It is passed over, not padded:
            # length + padding would be more than the whole ring, and the batch would wait for ever.
            return Placement(taken + room, 0, room)
        return None

    def take(self, length: int, tokens: int = 0, items: int = 0, *, urgent: bool = False) -> Taken | None:
        """Take ``length`` bytes and one descriptor where ``fit`` says; None, and nothing taken, while it does not fit.

        ``tokens`` are pending and ``items`` unresolved from here on.
        """
        live = self._live
        position, padding, skipped = self._taken, 0, 0
        room = self.capacity_bytes - position % self.capacity_bytes
        if length > room or length > self.capacity_bytes - position + self._returned or len(live) >= self.batch_entries:
            placement = self.fit(length, urgent=urgent)  # all but the common case, which is decided as there
            if placement is None:
                return None
            position, padding, skipped = placement
        sequence = self._next
        self._next = sequence + 1
        live.append((sequence, length, padding, tokens))
        self._taken = position + length
        self._held += length + padding
        self._tokens_pending += tokens
        self._items_unresolved += items
        if padding:
            self._padding_live += padding
            self._padding_taken += padding
            self._wraps += 1
        elif skipped:
            self._returned += skipped
            self._skipped += skipped
            self._wraps += 1
        self._check()
        return _new(Taken, (sequence, position, padding))

    def take_all(self, wants: Sequence[tuple[int, int, int]]) -> list[Taken]:
        """``take`` for each (length, tokens, items) in turn, up to the first that does not fit: what was taken. Only
        the first raises ``OversizeError``. One change of the books, and one check, for all that lie behind one another.
        """
        found: list[Taken] = []
        while len(found) < len(wants):
            if not self._take_run(wants, found):
                want = wants[len(found)]
                one = None if found and want[0] > self.capacity_bytes else self.take(*want)
                if one is None:
                    break
                found.append(one)
        return found

    def _take_run(self, wants: Sequence[tuple[int, int, int]], found: list[Taken]) -> int:
        """Of ``wants`` from ``len(found)`` on, those that fit before the arena's end: appended; how many."""
        live, sequence, position, before = self._live, self._next, self._taken, len(found)
        capacity = self.capacity_bytes
        left = min(capacity - position % capacity, capacity - position + self._returned)
        entries = self.batch_entries - len(live)
        all_tokens = all_items = 0
        for length, tokens, items in wants[before : before + max(0, entries)]:
            if length > left:
                break
            left -= length
            live.append((sequence, length, 0, tokens))
            found.append(_new(Taken, (sequence, position, 0)))
            sequence += 1
            position += length
            all_tokens += tokens
            all_items += items
        self._held += position - self._taken
        self._next, self._taken = sequence, position
        self._tokens_pending += all_tokens
        self._items_unresolved += all_items
        self._check()
        return len(found) - before

    # -- giving back --------------------------------------------------------------------------------------------

    def give_back(self, sequence: int) -> int:
        """The consumer has read entry ``sequence`` for good: its length + padding are free. In order only.

        Returns the bytes freed; raises ``InvariantError`` for any other sequence than the oldest live one.
        """
        live = self._live
        if not live or live[0][0] != sequence:
            oldest = live[0][0] if live else "none"
            raise InvariantError(f"entry {sequence} was given back while the oldest live one is {oldest}")
        freed = self._free(*live.popleft()[1:])
        self._check()
        return freed

    def give_back_to(self, word: int) -> int:
        """Give back every entry up to the 32-bit consumed ``word``; returns how many.

        Raises ``InvariantError`` if the word names an entry that was never taken.
        """
        live = self._live
        oldest = live[0][0] if live else self._next
        count = (word - oldest + 1) & WORD_MASK
        if count > len(live):
            raise InvariantError(f"the consumed word {word} is outside of the {len(live)} live entries from {oldest}")
        lengths = paddings = all_tokens = 0
        for _ in range(count):
            _, length, padding, tokens = live.popleft()
            lengths += length
            paddings += padding
            all_tokens += tokens
        self._free(lengths, paddings, all_tokens)
        self._check()
        return count

    def _free(self, length: int, padding: int, tokens: int) -> int:
        freed = self._freed_by(length, padding)
        self._returned += freed
        self._held -= length + padding
        self._padding_live -= padding
        self._tokens_pending -= tokens
        return freed

    def _freed_by(self, length: int, padding: int) -> int:
        """What giving so much back frees: the one line whose second half the published failure lacked."""
        return length + padding

    def skip(self, sequence: int) -> None:
        """Entry ``sequence`` will not run (cancelled before the engine took it): its tokens are no longer pending."""
        for index, (live, length, padding, tokens) in enumerate(self._live):
            if live == sequence:
                self._tokens_pending -= tokens
                self._live[index] = (live, length, padding, 0)
                return
        raise InvariantError(f"entry {sequence} is not live and cannot be skipped")

    def resolve(self, items: int) -> None:
        """``items`` requests are done, failed or handed back."""
        if not 0 <= items <= self._items_unresolved:
            raise InvariantError(f"{items} items resolved of {self._items_unresolved} unresolved")
        self._items_unresolved -= items

    # -- what the books say -------------------------------------------------------------------------------------

    def credit(self) -> tuple[int, int]:
        """Backpressure as credit: entries that batches may still take, and the largest batch (bytes) accepted now."""
        entries = max(0, self.batch_entries - len(self._live))
        capacity = self.capacity_bytes
        free = capacity - (self._taken - self._returned)
        if free == capacity:
            return entries, capacity
        room = capacity - self._taken % capacity
        return entries, max(min(free, room), free - room)

    def live(self) -> tuple[Live, ...]:
        """The entries taken and not given back, oldest first."""
        return tuple(Live(*entry) for entry in self._live)

    @property
    def next_sequence(self) -> int:
        """The sequence that the next entry will get."""
        return self._next

    @property
    def entries_live(self) -> int:
        """Descriptors taken and not given back."""
        return len(self._live)

    @property
    def bytes_free(self) -> int:
        """Payload bytes not taken; not all of them may be of use to one batch (see ``credit``)."""
        return self.capacity_bytes - (self._taken - self._returned)

    @property
    def wraps(self) -> int:
        """Times that the next payload went back to the arena's start before its end was reached."""
        return self._wraps

    def figures(self) -> RingFigures:
        """The books as they are, after a full audit."""
        self.audit()
        return RingFigures(
            capacity=self.capacity_bytes,
            taken=self._taken,
            returned=self._returned,
            live=self._taken - self._returned,
            padding_live=self._padding_live,
            tokens_pending=self._tokens_pending,
            items_unresolved=self._items_unresolved,
            entries=self.entries,
            entries_live=len(self._live),
            entries_taken=self._next - self._first_sequence,
            entries_returned=self._next - self._first_sequence - len(self._live),
            wraps=self._wraps,
            padding_taken=self._padding_taken,
            skipped=self._skipped,
        )

    def finding(
        self, *, engine_idle: bool, waiting_items: int = 0, holder_of: Callable[[int], str] = lambda _: "unknown"
    ) -> Finding | None:
        """R6: items unresolved, no tokens pending, engine idle; None while that is not so.

        ``waiting_items`` were dispatched to this worker and are not in the ring yet. A result on its way looks the
        same for a moment: the caller reports a finding that lasts.
        """
        unresolved = self._items_unresolved + waiting_items
        if not engine_idle or not unresolved or self._tokens_pending:
            return None
        held = self._taken - self._returned
        return Finding(
            items_unresolved=unresolved,
            bytes_held=held,
            bytes_free=self.capacity_bytes - held,
            entries_free=self.entries - len(self._live),
            holders=tuple(Holder(*entry, by=holder_of(entry.sequence)) for entry in self.live()),
        )

    def _check(self) -> None:
        """The identity of R4 against the running books: a few integer compares on every change."""
        held = self._taken - self._returned
        if held != self._held or not 0 <= held <= self.capacity_bytes or not 0 <= self._padding_live <= held:
            raise InvariantError(
                f"ring books disagree: taken {self._taken} - returned {self._returned} = {held}, "
                f"live {self._held} of {self.capacity_bytes}, padding live {self._padding_live}"
            )

    def audit(self) -> None:
        """The identity of R4 against the live entries themselves: every book is summed again, or ``InvariantError``."""
        self._check()
        live = self.live()
        wrong = {
            "bytes": (sum(e.length + e.padding for e in live), self._held),
            "padding": (sum(e.padding for e in live), self._padding_live),
            "tokens": (sum(e.tokens for e in live), self._tokens_pending),
            "sequences": ([e.sequence for e in live], list(range(self._next - len(live), self._next))),
            "entries": (max(len(live), self.entries), self.entries),
        }
        broken = [
            f"{name}: {found} by entry, {booked} booked" for name, (found, booked) in wrong.items() if found != booked
        ]
        if broken or self._items_unresolved < 0:
            raise InvariantError("ring books disagree: " + "; ".join(broken))
