"""rules: vector clocks over byte ranges: every read ordered after its write, every write after the reads before it.

Order comes from queue order, recorded events waited for, and events the host saw done; from nothing else, so that a
missing wait is found whatever the schedule happened to be. Knows neither torch nor what the bytes mean: memory is
(start, end) pairs of addresses. ``virtual_device`` feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Clock = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]
"""Disjoint, ascending (first address, address past the last)."""
PRUNE_EVERY = 256


@dataclass(slots=True, eq=False)
class Access:
    """One operation's touch of one tensor: which lane, its tick there, which bytes. ``keep`` holds the memory alive, so
    that its address cannot come back as other memory while the access still counts."""

    lane: int
    tick: int
    ranges: Ranges
    write: bool
    label: str
    keep: object


def overlap(one: Ranges, other: Ranges) -> tuple[int, int] | None:
    """The first common byte range of two, or None."""
    if not one or not other or one[0][0] >= other[-1][1] or other[0][0] >= one[-1][1]:
        return None
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            return start, end
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return None


def covers(outer: Ranges, inner: Ranges) -> bool:
    """Whether ``outer`` surely holds all of ``inner`` (cheap: one range around it, or the same ranges)."""
    return outer == inner or (len(outer) == 1 and outer[0][0] <= inner[0][0] and inner[-1][1] <= outer[0][1])


class ClockCheck:
    """Clocks of some lanes (the queues) and of the host, and the accesses that a later operation may still race with.

    ``report`` makes the error for a race from its words. One thread.
    """

    def __init__(self, lanes: Sequence[str], report: Callable[[str], Exception]) -> None:
        self._names = [*lanes, "host"]
        self._host = len(lanes)
        self._clocks = [[0] * len(self._names) for _ in self._names]
        self._accesses: dict[int, list[Access]] = {}
        self._report = report
        self._since_prune = 0

    @property
    def live(self) -> int:
        """Accesses still remembered."""
        return sum(len(accesses) for accesses in self._accesses.values())

    def operate(self, lane: int, touches: Iterable[tuple[int, Ranges, bool, object]], label: str) -> None:
        """One operation is put on ``lane``. Each touch: a key of its memory (equal keys may overlap, others cannot),
        its ranges, whether it writes, and what to keep alive. Raises what ``report`` makes of the first race."""
        clock = self._clocks[lane]
        self._merge(clock, self._clocks[self._host])
        clock[lane] += 1
        tick = clock[lane]
        for key, ranges, write, keep in touches:
            if ranges:
                self._touch(key, Access(lane, tick, ranges, write, label, keep), clock)
        self._since_prune += 1
        if self._since_prune >= PRUNE_EVERY:
            self._prune()

    def host(self, touches: Iterable[tuple[int, Ranges, bool, object]], label: str) -> None:
        """The host itself reads or writes."""
        self.operate(self._host, touches, label)

    def mark(self, lane: int) -> Clock:
        """What an event recorded on ``lane`` now stands for."""
        clock = self._clocks[lane]
        self._merge(clock, self._clocks[self._host])
        return tuple(clock)

    def wait(self, lane: int, mark: Clock) -> None:
        """``lane`` waits for the mark."""
        self._merge(self._clocks[lane], mark)

    def observe(self, mark: Clock) -> None:
        """The host saw the mark done."""
        self._merge(self._clocks[self._host], mark)

    @staticmethod
    def _merge(clock: list[int], other: Sequence[int]) -> None:
        for lane, tick in enumerate(other):
            if tick > clock[lane]:
                clock[lane] = tick

    def _touch(self, key: int, new: Access, clock: list[int]) -> None:
        kept = []
        for old in self._accesses.get(key, ()):
            ordered = old.tick <= clock[old.lane]
            if not ordered and (old.write or new.write):
                common = overlap(old.ranges, new.ranges)
                if common is not None:
                    raise self._report(self._words(old, new, common))
            superseded = ordered and (new.write or (not old.write and old.lane == new.lane))
            if not (superseded and old.tick != new.tick and covers(new.ranges, old.ranges)):
                kept.append(old)
        if new.lane != self._host:  # whatever is submitted later comes after what the host did itself
            kept.append(new)
        self._accesses[key] = kept

    def _words(self, old: Access, new: Access, common: tuple[int, int]) -> str:
        verbs = {True: "writes", False: "reads"}
        return (
            f"{self._names[new.lane]} {verbs[new.write]} {common[1] - common[0]} bytes at {common[0]:#x} in "
            f"'{new.label}' with no recorded order after '{old.label}', which {verbs[old.write]} them on "
            f"{self._names[old.lane]}"
        )

    def _prune(self) -> None:
        """Forget what the host has seen over: all it submits later comes after."""
        self._since_prune = 0
        seen = self._clocks[self._host]
        for key, accesses in list(self._accesses.items()):
            left = [access for access in accesses if access.tick > seen[access.lane]]
            if left:
                self._accesses[key] = left
            else:
                del self._accesses[key]
