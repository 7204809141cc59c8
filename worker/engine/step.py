"""values: the packed step: one row a new token, and where each context's rows lie on the device and on the host.

``pack`` is a pure function of the plan; the tables carry its arrays to the device. Knows no queue and no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from common.errors import InvariantError
from common.limits import WRITE_BACK_COPY_MIN_TOKENS
from worker.engine.contexts import Share, StepPlan
from worker.engine.fit import Fit, rounded_up
from worker.engine.page_leases import ContextSet
from worker.engine.parts import Parts, parts_of
from worker.engine.retention import Placement, streamed
from worker.engine.sampling import uniform

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class HistoryRun:
    """One context's own history of a layer, or one that several share: ``rows`` rows from row ``first`` of the slot, or
    of the layer's pages, on; from ``host_first`` of the layer in the host pool."""

    host_first: int
    first: int
    rows: int
    added: int
    """New rows of this step, right behind them."""
    placement: Placement

    @property
    def copied_back(self) -> bool:
        """Whether its new rows go to the host as one copy; else they are scattered with those of others."""
        return self.added >= WRITE_BACK_COPY_MIN_TOKENS

    @property
    def in_place(self) -> bool:
        """Whether it lies in the layer's pages."""
        return self.placement.home is not None


@dataclass(frozen=True, eq=False)
class PackedStep:
    """A step as arrays, T new rows of B contexts of which S sample.

    Rows count from the start of a slot, or of a layer's pages where ``in_place`` is 1, or of the arena where it is 2
    (``padding.NOWHERE``); host rows from the start of a layer in the host pool. A padded step has ``padding`` rows
    more behind the others, each of a context of its own: they count in T and B, and nowhere else.
    """

    plan: StepPlan
    contexts: ContextSet
    runs: tuple[HistoryRun, ...]
    """One a share, in order; then the shared histories; then what is only brought in, without a row in this step."""
    longs: dict[str, Longs]
    """``positions``, ``rows``, ``rows_in_place`` (T,); ``host_rows`` (T - padding,), without those of runs that are
    ``copied_back``: ``scattered`` has which these are, if not all; ``prompt_to`` and ``prompt_from`` (prompt rows,);
    ``last_to`` (decode rows,); ``sample_rows`` (S + padding,); ``top_k`` (S,) unless all are greedy.
    With drafts ``ids`` (decode rows,); without, ``last_from`` (decode rows,) and ``sample_segments`` (S,)."""
    ints: dict[str, Ints]
    """``query_starts``, ``history_starts``, ``in_place`` (B + 1,), ``lengths`` (B,): each context's own rows.
    With G shared histories (H5) the same of them, ``shared_query_starts`` counted from ``first_shared_row``:
    ``shared_query_starts``, ``shared_history_starts``, ``shared_in_place`` (G + 1,), ``shared_lengths`` (G,).
    A step in ``parts`` has the same of its prompts' call: ``prompt_query_starts`` and so on."""
    floats: dict[str, Floats]
    """``temperature``, ``top_p``, ``chance`` (S,), and ``min_p`` (S,) where a row asks for it; empty when every row is
    greedy."""
    longest_query: int
    longest_history: int
    """Of its own rows; of those that decode, where it is in ``parts``."""
    tail: tuple[tuple[int, int], ...]
    """How far each context's rows reach after this step, (context, rows): what its leases are sealed with (L3)."""

    parts: Parts | None = None
    """How its attention is cut; None for one call."""
    retained: bool = False
    """Whether any context has pages, of the device or of headroom, to be materialised."""
    captures: bool = False
    """Whether any context's pages are kept, or moved within headroom, after attention."""
    padding: int = 0
    """Rows that only bring the step to a shape that others have too."""
    whole: bool = False
    """Whether it can be replayed as a whole (``padding.whole``)."""
    first_shared_row: int = 0
    """From this row on queries are of contexts that share a history."""
    longest_shared_query: int = 0
    longest_shared_history: int = 0

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def tokens(self) -> int:
        """T: the rows that go through the model in this step."""
        return int(self.longs["positions"].size)

    @property
    def new_rows(self) -> int:
        """Rows that histories grow by."""
        return self.tokens - self.padding

    @property
    def sampling(self) -> list[Share]:
        """The shares that sample, in the order of the sampled rows."""
        return [share for share in self.plan.shares if share.samples]

    @property
    def sampled_rows(self) -> int:
        """S: rows that sample a token."""
        return int(self.longs["sample_rows"].size) - self.padding

    @property
    def decodes_only(self) -> bool:
        """Whether no row is a prompt's."""
        return not any(share.prompt for share in self.plan.shares)

    @cached_property
    def staged(self) -> tuple[tuple[HistoryRun, Hashable], ...]:
        """The runs of which rows come over the link, each with its host owner."""
        return tuple((run, owner) for run, owner in self._owned() if run.placement.copies)

    @cached_property
    def copied_back(self) -> tuple[tuple[HistoryRun, Hashable], ...]:
        """The runs whose new rows go to the host as copies, each with its host owner."""
        return tuple((run, owner) for run, owner in self._owned() if run.copied_back)

    def _owned(self) -> Iterator[tuple[HistoryRun, Hashable]]:
        return zip(self.runs, self.contexts.owners, strict=True)

    @cached_property
    def staged_rows(self) -> int:
        """Rows of history a layer needs from the host."""
        return sum(run.placement.link_rows for run, _ in self.staged)

    @cached_property
    def hit_rows(self) -> int:
        """Rows of history a layer finds in the device pages (H1, H3)."""
        return sum(run.placement.hit_rows for run in self.runs)

    @property
    def device_rows(self) -> int:
        """Rows of history a layer needs no link for."""
        return self.hit_rows + self.headroom_rows

    @cached_property
    def headroom_rows(self) -> int:
        """Rows of history a layer finds in headroom (H2, H3)."""
        return sum(run.placement.borrowed_rows for run in self.runs if run.placement.borrowed)

    @property
    def spared_rows(self) -> int:
        """Rows of history that a layer would need once more for each further context if none were shared (H5)."""
        return sum(one.history.rows * (one.count - 1) for one in self.plan.joined)


@dataclass(frozen=True, slots=True, eq=False)
class _Histories:
    """Where the histories of a plan lie: each share's own, then the shared ones."""

    placements: tuple[Placement, ...]
    starts: Longs
    """Each one's first row."""
    end: int
    """Where the rows end."""


def _histories(plan: StepPlan, fit: Fit) -> _Histories:
    """In a slot each region is its length rounded up to pages, back to back."""
    rows = [(share.own_start, share.rows) for share in plan.shares] + [(one.history.rows, 0) for one in plan.joined]
    if not fit.slot_rows:
        indices = [share.page.index for share in plan.shares] + [one.page.index for one in plan.joined]
        homes = [fit.segment_first(index) for index in indices]
        placements = tuple(Placement(home, (), hit_rows=known) for home, (known, _) in zip(homes, rows, strict=True))
        last = indices[len(plan.shares) - 1]
        return _Histories(placements, np.array(homes, np.int64), fit.segment_first(last + 1))
    own = plan.placements or tuple(streamed(share.own_start) for share in plan.shares)
    placements = own + tuple(one.placement or streamed(one.history.rows) for one in plan.joined)
    starts, at = [], 0
    for placement, (known, added) in zip(placements, rows, strict=True):
        if placement.home is None:
            starts.append(at)
            at += rounded_up(known + added, fit.page_rows)
        else:
            starts.append(placement.home)
    if at > fit.slot_rows:
        raise InvariantError(f"step {plan.step} needs {at} rows of slots of {fit.slot_rows}")
    return _Histories(placements, np.array(starts, np.int64), at)


def _shared_arrays(plan: StepPlan, query_starts: Longs, found: _Histories) -> dict[str, Longs]:
    """The shared histories' part of ``PackedStep.ints``; empty where none is shared."""
    if not plan.joined:
        return {}
    first, own = query_starts[plan.joined[0].first], len(plan.shares)
    ends = [query_starts[one.first + one.count] - first for one in plan.joined]
    in_place = [placement.home is not None for placement in found.placements[own:]]
    return {
        "shared_query_starts": np.array([0, *ends], np.int64),
        "shared_history_starts": np.append(found.starts[own:], found.end),
        "shared_lengths": np.array([one.history.rows for one in plan.joined], np.int64),
        "shared_in_place": np.append(in_place, False).astype(np.int64),
    }


def _runs(plan: StepPlan, fit: Fit, found: _Histories) -> tuple[HistoryRun, ...]:
    rows = [(share.page, share.own_start, share.rows) for share in plan.shares]
    rows += [(one.page, one.history.rows, 0) for one in plan.joined]
    runs = tuple(
        HistoryRun(fit.segment_first(page.index), int(found.starts[index]), known, added, found.placements[index])
        for index, (page, known, added) in enumerate(rows)
    )
    return runs + tuple(
        HistoryRun(fit.segment_first(one.page.index), one.placement.home or 0, 0, 0, one.placement)
        for one in plan.prefetches
    )


def _contexts(plan: StepPlan) -> ContextSet:
    """Whose rows the step's leases hold: a shared history is one owner, however many read it."""
    shared = [(one.history.number, one.page) for one in plan.joined]
    arriving = [(one.number, one.page) for one in plan.prefetches]
    held = [*((share.context.number, share.page) for share in plan.shares), *shared, *arriving]
    return ContextSet(tuple(number for number, _ in held), tuple(page for _, page in held))


def pack(plan: StepPlan, fit: Fit, *, blocks: bool = False) -> PackedStep:
    """The arrays of a plan. Positions are absolute; a context that shares a history has own rows from its end on.
    ``blocks``: long prompts are attended in blocks (``parts``)."""
    shares, found = plan.shares, _histories(plan, fit)
    runs = _runs(plan, fit, found)
    segments = np.array([share.page.index for share in shares], np.int64)
    starts = np.array([share.start for share in shares], np.int64)
    bases = np.array([share.context.base for share in shares], np.int64)
    added = np.array([share.rows for share in shares], np.int64)
    query_starts = np.concatenate(([0], np.cumsum(added)))
    lengths = starts - bases + added
    placements, history_starts = found.placements, found.starts[: len(shares)]
    in_place = np.array([placement.home is not None for placement in placements[: len(shares)]])
    positions = np.repeat(starts - query_starts[:-1], added) + np.arange(query_starts[-1])
    host_firsts = np.array([fit.segment_first(share.page.index) for share in shares], np.int64)
    offsets = np.array([share.context.offset for share in shares], np.int64)
    prompt = np.repeat([share.prompt for share in shares], added)
    prompt_to = np.flatnonzero(prompt)
    longs = {
        "positions": positions,
        "rows": np.repeat(history_starts - bases, added) + positions,
        "rows_in_place": np.repeat(in_place, added),
        "prompt_to": prompt_to,
        "prompt_from": (np.repeat(offsets, added) + positions)[prompt_to],
        "last_to": np.flatnonzero(~prompt),
        "sample_rows": _sample_rows(shares, query_starts),
    } | _scattered(runs, np.repeat(host_firsts - bases, added) + positions)
    if any(share.ids for share in shares):
        longs["ids"] = np.array([token for share in shares for token in share.ids], np.int64)
    else:
        longs["last_from"] = segments[[not share.prompt for share in shares]]
        longs["sample_segments"] = segments[[share.samples for share in shares]]
    parts, cut = parts_of(plan, blocks)
    ints = {
        "query_starts": query_starts,
        "history_starts": np.append(history_starts, found.end),
        "lengths": lengths,
        "in_place": np.append(in_place, False),
    } | _shared_arrays(plan, query_starts, found)
    if parts is not None:
        where = cut.pop("prompt_share")
        ints |= cut
        ints["prompt_history_starts"] = np.append(history_starts[where], found.end)
        ints["prompt_in_place"] = np.append(in_place[where], False)
    head = len(shares) if parts is None else parts.decodes
    floats = chances([share for share in shares if share.samples], longs)
    return PackedStep(
        plan=plan,
        contexts=_contexts(plan),
        runs=runs,
        longs={name: array.astype(np.int64, copy=False) for name, array in longs.items()},
        ints={name: array.astype(np.int32) for name, array in ints.items()},
        floats=floats,
        longest_query=int(added[:head].max(initial=0)),
        longest_history=int(lengths[:head].max(initial=0)),
        tail=tuple((share.context.number, share.start + share.rows) for share in shares),
        retained=any(placement.retained or placement.borrowed for placement in placements),
        parts=parts,
        captures=bool(plan.shifts) or any(placement.captures or placement.lent for placement in placements),
        first_shared_row=int(query_starts[plan.joined[0].first]) if plan.joined else 0,
        longest_shared_query=int(np.diff(ints["shared_query_starts"]).max()) if plan.joined else 0,
        longest_shared_history=max((one.history.rows for one in plan.joined), default=0),
    )


def _scattered(runs: Sequence[HistoryRun], host_rows: Longs) -> dict[str, Longs]:
    """``host_rows``, and ``scattered`` unless it is all of them."""
    if not any(run.copied_back for run in runs):
        return {"host_rows": host_rows}
    scattered = np.flatnonzero(np.repeat([not run.copied_back for run in runs], [run.added for run in runs]))
    return {"host_rows": host_rows[scattered], "scattered": scattered}


def _sample_rows(shares: Sequence[Share], query_starts: Longs) -> Longs:
    """The rows that sample: the last of a share, or all of one with drafts."""
    counts = np.array([share.sampled_rows for share in shares], np.int64)
    firsts = query_starts[1:] - counts
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def chances(sampling: list[Share], longs: dict[str, Longs]) -> dict[str, Floats]:
    """``PackedStep.floats``; ``top_k`` joins the longs."""
    settings = [share.context.request.sampling for share in sampling for _ in range(share.sampled_rows)]
    if all(setting.temperature <= 0 for setting in settings):
        return {}
    longs["top_k"] = np.array([setting.top_k for setting in settings], np.int64)
    chance = [
        uniform(share.context.request.sampling.seed, share.number + row)
        for share in sampling
        for row in range(share.sampled_rows)
    ]
    floats = {
        "temperature": np.array([setting.temperature for setting in settings], np.float32),
        "top_p": np.array([setting.top_p for setting in settings], np.float32),
        "chance": np.array(chance, np.float32),
    }
    if any(setting.min_p > 0 for setting in settings):
        floats["min_p"] = np.array([setting.min_p for setting in settings], np.float32)
    return floats
