"""rules: H6: which contexts decode in the next quantum and for how many steps, so that predicted tokens/s are highest.

``plan`` is a pure function of the rates, the pool and the contexts. It weighs ways to cut the contexts into groups that
take turns: all at once (streamed as far as the pool does not hold them), or smaller groups, each retained as far as the
pool allows, the others parked. Parking is free, since the host is authoritative; bringing in costs the bytes once, and
is hidden behind decoding where the pool has room for both. Nobody is parked for longer than ``FAIR_WAIT_S`` at the
rates believed.
Knows no clock: ``Rates.learned`` is told what a step took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from common.limits import FAIR_WAIT_S, QUANTUM_MIN_STEPS_COUNT

_ANY_TURNS_COUNT = 5
"""So few units are grouped in every way and every order of turns: 150 ways."""
_CUT_ANYHOW_COUNT = 8
"""So few are cut in every way that keeps their order of size: 128 ways."""
_WEIGHT = 0.2
"""Of the newest measurement in a rate: about the last ten steps count."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine is believed to do. ``step_s``: a step's cost that no history adds to (weights, launches)."""

    link_bytes_s: float
    memory_bytes_s: float
    step_s: float

    def seconds(self, staged: float, hit: float) -> float:
        """A step that stages so many bytes over the link and finds ``hit`` on the device: link and compute overlap."""
        return max(staged / self.link_bytes_s, self.step_s + (staged + hit) / self.memory_bytes_s)

    def learned(self, staged: float, hit: float, measured_s: float) -> Rates:
        """After a step took ``measured_s``: the rate that ruled it moves towards what was seen."""
        attention = (staged + hit) / self.memory_bytes_s
        if staged and staged / self.link_bytes_s >= self.step_s + attention:
            seen = staged / measured_s
            return replace(self, link_bytes_s=self.link_bytes_s + _WEIGHT * (seen - self.link_bytes_s))
        seen = max(0.0, measured_s - attention)
        return replace(self, step_s=self.step_s + _WEIGHT * (seen - self.step_s))


def believed(kind: str) -> Rates:
    """What a device of that kind is taken for until steps show it: of the order that one card and one CPU showed."""
    if kind == "cuda":
        return Rates(link_bytes_s=50e9, memory_bytes_s=4e12, step_s=0.005)
    return Rates(link_bytes_s=5e9, memory_bytes_s=10e9, step_s=0.01)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A context that could decode. ``nbytes`` of its own history, ``shared_bytes`` of the one numbered ``shared`` that
    it reads with others (H5; -1 for none); ``waited_steps`` since it last ran."""

    number: int
    nbytes: int
    remaining: int
    """Tokens it still expects to give."""
    waited_steps: int = 0
    shared: int = -1
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quantum:
    """Who decodes for ``steps`` steps, what that is predicted to give, and the best other way (H6)."""

    runs: tuple[int, ...]
    steps: int
    way: str
    step_s: float
    tokens_s: float
    other_way: str = ""
    other_tokens_s: float = 0.0
    following: tuple[int, ...] = ()
    """Who is to decode after it: brought in meanwhile, as far as the pool has room."""


Groups = tuple[tuple[Candidate, ...], ...]
Units = tuple[tuple[Candidate, ...], ...]
"""Contexts that are never parted: alone, or with those that share their history."""


def held_bytes(group: Sequence[Candidate]) -> int:
    """Bytes of a group's histories, a shared one once."""
    return sum([one.nbytes for one in group]) + sum(_shared(group).values())


def _shared(group: Sequence[Candidate]) -> dict[int, int]:
    return {one.shared: one.shared_bytes for one in group if one.shared >= 0}


def step_seconds(rates: Rates, pool_bytes: int, group: Sequence[Candidate]) -> float:
    """One step of a group, the pool holding as much of it as fits."""
    return _seconds(rates, pool_bytes, held_bytes(group))


def _seconds(rates: Rates, pool_bytes: int, total: int) -> float:
    hit = min(total, pool_bytes)
    return rates.seconds(total - hit, hit)


def turn_steps(seconds: Sequence[float], groups: Groups) -> list[int]:
    """Steps of each group's turn, whose steps take ``seconds``: as long as fairness allows, since each turn costs its
    bringing in; to its end where nobody else waits."""
    most = [max([one.remaining for one in group]) for group in groups]
    if len(groups) == 1:
        return most
    share = FAIR_WAIT_S / (len(groups) - 1)
    return [
        max(QUANTUM_MIN_STEPS_COUNT, min(int(share / step_s), remaining))
        for step_s, remaining in zip(seconds, most, strict=True)
    ]


def tokens_s(rates: Rates, pool_bytes: int, groups: Groups) -> float:
    """Tokens a second over one cycle in which each group has its turn."""
    tokens = seconds = 0.0
    shared = [_shared(group) for group in groups]
    held = [sum([one.nbytes for one in group]) + sum(once.values()) for group, once in zip(groups, shared, strict=True)]
    each = [_seconds(rates, pool_bytes, total) for total in held]
    steps = turn_steps(each, groups)
    for index, group in enumerate(groups):
        decode, most = steps[index] * each[index], steps[index]
        tokens += sum([one.remaining if one.remaining < most else most for one in group])
        seconds += decode
        if len(groups) > 1:
            mine, before = shared[index], shared[index - 1]
            there = sum([nbytes for _, nbytes in mine.items() & before.items()]) if mine and before else 0
            arriving = min(pool_bytes, held[index] - there)
            room = max(0, pool_bytes - held[index - 1])
            ahead = min(arriving, room)
            hidden = min(ahead / rates.link_bytes_s, steps[index - 1] * each[index - 1])
            seconds += arriving / rates.link_bytes_s - hidden
    return tokens / seconds


def ways(contexts: Sequence[Candidate], pool_bytes: int) -> list[tuple[str, Groups]]:
    """The ways weighed: one after another as they came, groups of 1, 2, 3, 4, 6, ... in order of size, groups that
    just fill the pool, any for few. The order counts: what of a turn is brought in during another one depends on its
    neighbour. Where histories are shared, also the same with everyone who shares one in one turn."""
    units = _units(contexts)
    ordered = [(one,) for unit in units for one in unit]
    found: list[tuple[str, Groups]] = []
    if len(units) < len(ordered):
        found += [(f"{name}, by shared history", groups) for name, groups in _cut(units, pool_bytes)]
        if len(ordered) <= _CUT_ANYHOW_COUNT:
            by_size = sorted(contexts, key=lambda one: (one.nbytes + one.shared_bytes, one.number))
            found += _cut([(one,) for one in by_size], pool_bytes)
    found += _cut(ordered, pool_bytes)
    if len(ordered) > 1:
        found.append(("turns of 1 as they came", tuple((one,) for one in contexts)))
    return found


def _units(contexts: Sequence[Candidate]) -> Groups:
    """Contexts that share a history together, the others alone; in order of size, of each unit as well."""
    units: dict[int, list[Candidate]] = {}
    for one in sorted(contexts, key=lambda one: (one.nbytes, one.number)):
        units.setdefault(one.shared if one.shared >= 0 else -1 - one.number, []).append(one)
    return tuple(tuple(unit) for unit in sorted(units.values(), key=lambda unit: (held_bytes(unit), unit[0].number)))


def _cut(units: Sequence[tuple[Candidate, ...]], pool_bytes: int) -> list[tuple[str, Groups]]:
    """Ways to cut units into turns, none of them in two."""

    def flat(cut: Sequence[Sequence[tuple[Candidate, ...]]]) -> Groups:
        return tuple(tuple(one for unit in group for one in unit) for group in cut)

    found: list[tuple[str, Groups]] = [("all at once", flat((units,)))]
    for size in _sizes(len(units)):
        found.append((f"turns of {size}", flat([units[at : at + size] for at in range(0, len(units), size)])))
    if len(units) <= _CUT_ANYHOW_COUNT:
        cuts = _turns(tuple(units)) if len(units) <= _ANY_TURNS_COUNT else _cuts(tuple(units))
        found += [("turns cut anyhow", flat(cut)) for cut in cuts if len(cut) > 1]
    filled = _filled(units, pool_bytes)
    if len(filled) > 1:
        found.append(("turns that fill the pool", flat(filled)))
    return found


def _sizes(count: int) -> list[int]:
    """Sizes of groups of ``count``: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..., and those that make as many turns of it, about
    equal. Not all: a plan of many is made within a step's time."""
    series = [size for at in range(count.bit_length()) for size in (1 << at, 3 << at)]
    return sorted({size for one in series for size in (one, -(-count // one)) if size < count})


def _filled(units: Sequence[tuple[Candidate, ...]], pool_bytes: int) -> list[list[tuple[Candidate, ...]]]:
    """Units in turn, as many as the pool holds, or one, in each group; a shared history once."""
    filled: list[list[tuple[Candidate, ...]]] = []
    own, shared = 0, dict[int, int]()
    for unit in units:
        own += sum(one.nbytes for one in unit)
        shared |= _shared(unit)
        if not filled or own + sum(shared.values()) > pool_bytes:
            own, shared = sum(one.nbytes for one in unit), _shared(unit)
            filled.append([])
        filled[-1].append(unit)
    return filled


def _cuts(ordered: Units) -> Iterator[tuple[Units, ...]]:
    """Every way to cut them into groups of neighbours."""
    yield (ordered,)
    for at in range(1, len(ordered)):
        for rest in _cuts(ordered[at:]):
            yield (ordered[:at], *rest)


def _turns(units: Units, *, begins: bool = True) -> Iterator[tuple[Units, ...]]:
    """Every way to group them, in every order of turns; a cycle of turns begins with the first one's (``begins``)."""
    if not units:
        yield ()
    for chosen in range(1, 1 << len(units)):
        if begins and not chosen & 1:
            continue
        group = tuple(one for at, one in enumerate(units) if chosen >> at & 1)
        rest = tuple(one for at, one in enumerate(units) if not chosen >> at & 1)
        for others in _turns(rest, begins=False):
            yield (group, *others)


def plan(rates: Rates, pool_bytes: int, contexts: Sequence[Candidate]) -> Quantum:
    """The next quantum of these contexts (one or more): the best way, and of it the group that waited longest."""
    weighed = sorted(
        ((tokens_s(rates, pool_bytes, groups), -index, name, groups) for index, (name, groups) in
         enumerate(ways(contexts, pool_bytes))),
        key=lambda one: (one[0], one[1]),
        reverse=True,
    )  # fmt: skip
    best, _, name, groups = weighed[0]
    steps = turn_steps([step_seconds(rates, pool_bytes, group) for group in groups], groups)
    order = sorted(range(len(groups)), key=lambda at: (-max(one.waited_steps for one in groups[at]), at))
    chosen, group = order[0], groups[order[0]]
    following = groups[order[1]] if len(order) > 1 else ()
    same = set(groups)
    others = ((speed, other) for speed, _, other, cut in weighed[1:] if len(cut) != len(groups) or set(cut) != same)
    other_speed, other = next(others, (0.0, ""))
    return Quantum(
        tuple(sorted(one.number for one in group)),
        steps[chosen],
        name,
        step_seconds(rates, pool_bytes, group),
        best,
        other,
        other_speed,
        tuple(sorted(one.number for one in following)),
    )
