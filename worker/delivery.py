"""rules: which durable results travel in which DONE (D1): short ones together, a long one in confirmed parts.

At most ``RESULTS_UNCONFIRMED_MAX_BYTES`` are on their way, so that a beat never waits behind more. What is on its way
and loses its link is forgotten here and told again by the session after the next login. Knows no body, only sizes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common import limits
from common.errors import InvariantError
from common.messages import LineRef


@dataclass(frozen=True, slots=True)
class Whole:
    """Results of one DONE."""

    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one long result."""

    ref: LineRef
    offset: int
    length: int


@dataclass(slots=True)
class _Long:
    """The long result on its way: bytes sent and bytes the broker says it holds."""

    ref: LineRef
    total: int
    sent: int = 0
    taken: int = 0


class Delivery:
    """The way of results to one broker in one session. Sizes are bytes of bodies."""

    def __init__(self) -> None:
        self._short: deque[tuple[LineRef, int]] = deque()
        self._queued_long: deque[tuple[LineRef, int]] = deque()
        self._on_way: dict[LineRef, int] = {}
        self._on_way_bytes = 0
        self._long: _Long | None = None
        self._known: set[LineRef] = set()

    @property
    def pending(self) -> int:
        """Results told here and not acknowledged."""
        return len(self._known)

    def add(self, ref: LineRef, size: int) -> None:
        """A durable result of ``size`` bytes wants to go; told twice it goes once."""
        if ref in self._known:
            return
        self._known.add(ref)
        if size > limits.PART_MAX_BYTES:
            self._queued_long.append((ref, size))
        else:
            self._short.append((ref, size))

    def settle(self, ref: LineRef) -> bool:
        """The broker answered for ``ref``: whether it was told here. Its bytes are no longer on their way."""
        if ref not in self._known:
            return False
        self._known.discard(ref)
        size = self._on_way.pop(ref, None)
        if size is not None:
            self._on_way_bytes -= size
        if self._long is not None and self._long.ref == ref:
            self._long = None
        return True

    def part_taken(self, ref: LineRef, offset: int) -> bool:
        """The broker holds ``ref`` up to ``offset``: whether that can be. Nothing is stored by it yet."""
        long = self._long
        if long is None or long.ref != ref or not long.taken <= offset <= long.sent:
            return False
        long.taken = offset
        return True

    def reset(self) -> None:
        """The link is gone: nothing is on its way, and what wants to go is told again after the next login."""
        self._short.clear()
        self._queued_long.clear()
        self._on_way.clear()
        self._known.clear()
        self._on_way_bytes = 0
        self._long = None

    def next(self) -> list[Whole | Part]:
        """What may be sent now."""
        out: list[Whole | Part] = []
        out.extend(self._next_parts())
        while (whole := self._next_whole()) is not None:
            out.append(whole)
        return out

    def _next_parts(self) -> list[Part]:
        if self._long is None:
            while self._queued_long:
                ref, total = self._queued_long.popleft()
                if ref in self._known:
                    self._long = _Long(ref, total)
                    break
        long = self._long
        if long is None:
            return []
        parts = []
        # short results beside a long one keep half of the way, so that neither starves the other
        most = limits.PARTS_UNCONFIRMED_MAX_COUNT - (1 if self._short or self._on_way else 0)
        while long.sent < long.total and long.sent - long.taken < most * limits.PART_MAX_BYTES:
            length = min(limits.PART_MAX_BYTES, long.total - long.sent)
            if self._on_way_bytes + long.sent - long.taken + length > limits.RESULTS_UNCONFIRMED_MAX_BYTES:
                break
            parts.append(Part(long.ref, long.sent, length))
            long.sent += length
        return parts

    def _next_whole(self) -> Whole | None:
        refs: list[LineRef] = []
        total = 0
        long = self._long
        room = limits.RESULTS_UNCONFIRMED_MAX_BYTES
        if long is not None:
            ahead = min(limits.PART_MAX_BYTES, long.total - long.sent)
            room -= max(long.sent - long.taken, ahead)
        while self._short and len(refs) < limits.BATCH_MAX_LINES:
            ref, size = self._short[0]
            if ref not in self._known:
                self._short.popleft()
                continue
            if self._on_way_bytes + size > room or total + size > limits.BATCH_MAX_BYTES:
                break
            if len(self._on_way) >= limits.RESULTS_UNCONFIRMED_MAX_LINES:
                break
            self._short.popleft()
            refs.append(ref)
            total += size
            self._on_way[ref] = size
            self._on_way_bytes += size
        return Whole(tuple(refs)) if refs else None

    def check(self) -> None:
        """Raise ``InvariantError`` unless the books agree and no bound is passed."""
        long = 0 if self._long is None else self._long.sent - self._long.taken
        if sum(self._on_way.values()) != self._on_way_bytes or not set(self._on_way) <= self._known:
            raise InvariantError(f"delivery books disagree: {self._on_way_bytes} bytes, {len(self._on_way)} on the way")
        if self._on_way_bytes + long > limits.RESULTS_UNCONFIRMED_MAX_BYTES:
            raise InvariantError(f"{self._on_way_bytes + long} bytes of results are on their way: too many")
