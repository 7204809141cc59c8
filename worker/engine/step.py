"""values: the packed step: one row a new token, and where each context's rows lie on the device and on the host.

``pack`` is a pure function of the plan; the tables carry its arrays to the device. Knows no queue and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.engine.fit import Fit, rounded_up
from worker.engine.page_leases import ContextSet
from worker.engine.retention import Placement, streamed
from worker.engine.sampling import uniform
from worker.engine.scheduler import Share, StepPlan

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class HistoryRun:
    """One context's history of a layer: ``rows`` rows from row ``first`` of the slot, or of the layer's pages, on."""

    segment: int
    first: int
    rows: int
    added: int
    """New rows of this step, right behind them."""
    placement: Placement

    @property
    def in_place(self) -> bool:
        """Whether it lies in the layer's pages."""
        return self.placement.home is not None


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """A step as arrays, T new rows of B contexts of which S sample.

    Rows count from the start of a slot, or of a layer's pages where ``in_place`` is 1; host rows from the start of a
    layer in the host pool.
    """

    plan: StepPlan
    contexts: ContextSet
    runs: tuple[HistoryRun, ...]
    """One a share, in order; then those that are only brought in, without a row in this step."""
    longs: dict[str, Longs]
    """``positions``, ``rows``, ``host_rows``, ``rows_in_place`` (T,); ``prompt_to``, ``prompt_from``
    (prompt rows,); ``last_to``, ``last_from`` (decode rows,); ``sample_rows``, ``sample_segments``, ``top_k`` (S,)."""
    ints: dict[str, Ints]
    """``query_starts``, ``history_starts``, ``in_place`` (B + 1,), ``lengths`` (B,)."""
    floats: dict[str, Floats]
    """``temperature``, ``top_p``, ``chance`` (S,); empty when every row is greedy."""
    longest_query: int
    longest_history: int
    tail: tuple[tuple[int, int], ...]
    """How far each context's rows reach after this step, (context, rows): what its leases are sealed with (L3)."""

    retained: bool = False
    """Whether any context has pages, of the device or of headroom, to be materialised."""
    captures: bool = False
    """Whether any context's pages are kept, or moved within headroom, after attention."""

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def tokens(self) -> int:
        """T: the rows of this step."""
        return int(self.longs["positions"].size)

    @property
    def sampling(self) -> list[Share]:
        """The shares that sample a token, in the order of the sampled rows."""
        return [share for share in self.plan.shares if share.samples]

    @property
    def staged_rows(self) -> int:
        """Rows of history a layer needs from the host."""
        return sum(run.placement.link_rows for run in self.runs)

    @property
    def hit_rows(self) -> int:
        """Rows of history a layer finds in the device pages (H1, H3)."""
        return sum(run.placement.hit_rows for run in self.runs)

    @property
    def device_rows(self) -> int:
        """Rows of history a layer needs no link for."""
        return self.hit_rows + self.headroom_rows

    @property
    def headroom_rows(self) -> int:
        """Rows of history a layer finds in headroom (H2, H3)."""
        return sum(run.placement.borrowed_rows for run in self.runs)


def _starts(plan: StepPlan, fit: Fit) -> tuple[tuple[Placement, ...], Longs]:
    """Where each context's history is, and its first row; behind the last, where the rows end."""
    if not fit.slot_rows:
        homes = [share.page.index * fit.context_rows for share in plan.shares]
        placements = tuple(
            Placement(home, (), hit_rows=share.start) for home, share in zip(homes, plan.shares, strict=True)
        )
        return placements, np.array([*homes, homes[-1] + fit.context_rows], np.int64)
    placements = plan.placements or tuple(streamed(share.start) for share in plan.shares)
    starts, at = [], 0
    for share, placement in zip(plan.shares, placements, strict=True):
        if placement.home is None:
            starts.append(at)
            at += rounded_up(share.start + share.rows, fit.page_rows)
        else:
            starts.append(placement.home)
    return placements, np.array([*starts, at], np.int64)


def pack(plan: StepPlan, fit: Fit) -> PackedStep:
    """The arrays of a plan. In a slot each context's region is its length rounded up to pages, back to back."""
    shares = plan.shares
    segments = np.array([share.page.index for share in shares], np.int64)
    starts = np.array([share.start for share in shares], np.int64)
    added = np.array([share.rows for share in shares], np.int64)
    query_starts = np.concatenate(([0], np.cumsum(added)))
    lengths = starts + added
    placements, history_starts = _starts(plan, fit)
    in_place = np.array([placement.home is not None for placement in placements])
    positions = np.repeat(starts - query_starts[:-1], added) + np.arange(query_starts[-1])
    offsets = np.array([share.context.offset for share in shares], np.int64)
    prompt = np.repeat([share.prompt for share in shares], added)
    samples = np.array([share.samples for share in shares])
    last_rows = query_starts[1:] - 1
    prompt_to = np.flatnonzero(prompt)
    sampling = [share for share in shares if share.samples]
    longs = {
        "positions": positions,
        "rows": np.repeat(history_starts[:-1], added) + positions,
        "host_rows": np.repeat(segments * fit.context_rows, added) + positions,
        "rows_in_place": np.repeat(in_place, added),
        "prompt_to": prompt_to,
        "prompt_from": (np.repeat(offsets, added) + positions)[prompt_to],
        "last_to": np.flatnonzero(~prompt),
        "last_from": segments[[not share.prompt for share in shares]],
        "sample_rows": last_rows[samples],
        "sample_segments": segments[samples],
    }
    ints = {
        "query_starts": query_starts,
        "history_starts": history_starts,
        "lengths": lengths,
        "in_place": np.append(in_place, False),
    }
    settings = [share.context.request.sampling for share in sampling]
    floats: dict[str, Floats] = {}
    if any(setting.temperature > 0 for setting in settings):
        longs["top_k"] = np.array([setting.top_k for setting in settings], np.int64)
        chance = [uniform(share.context.request.sampling.seed, share.number) for share in sampling]
        floats = {
            "temperature": np.array([setting.temperature for setting in settings], np.float32),
            "top_p": np.array([setting.top_p for setting in settings], np.float32),
            "chance": np.array(chance, np.float32),
        }
    runs = tuple(
        HistoryRun(share.page.index, int(history_starts[index]), share.start, share.rows, placements[index])
        for index, share in enumerate(shares)
    ) + tuple(HistoryRun(one.page.index, one.placement.home or 0, 0, 0, one.placement) for one in plan.arrivals)
    owners = (*(share.page for share in shares), *(one.page for one in plan.arrivals))
    numbers = (*(share.context.number for share in shares), *(one.number for one in plan.arrivals))
    return PackedStep(
        plan=plan,
        contexts=ContextSet(numbers, owners),
        runs=runs,
        longs={name: array.astype(np.int64, copy=False) for name, array in longs.items()},
        ints={name: array.astype(np.int32) for name, array in ints.items()},
        floats=floats,
        longest_query=int(added.max()),
        longest_history=int(lengths.max()),
        tail=tuple((share.context.number, share.start + share.rows) for share in shares),
        retained=any(placement.retained or placement.borrowed for placement in placements),
        captures=bool(plan.shifts) or any(placement.captures or placement.lent for placement in placements),
    )
