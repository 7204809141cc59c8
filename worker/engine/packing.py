"""values: the packed steps of one engine, each made from its plan, or from the step before where that one goes on.

Most steps of a batch decode the same contexts at the same places as the step before, each one row further: such a
step's arrays are the last one's with one added. What comes out is the same either way. Knows no queue and no tensor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from worker.engine.contexts import StepPlan
from worker.engine.fit import Fit
from worker.engine.padded_step import padded
from worker.engine.padding import padded_history, whole
from worker.engine.step import HistoryRun, Longs, PackedStep, chances, pack

_MOVING = ("positions", "rows")
_FIXED = ("rows_in_place", "prompt_to", "prompt_from", "last_to", "last_from", "sample_rows", "sample_segments")


class Packer:
    """``pad``: steps that only decode take one of few shapes; ``blocks``: long prompts are attended in blocks. One
    thread, the engine's."""

    def __init__(self, fit: Fit, *, pad: bool, blocks: bool) -> None:
        self._fit, self._pad, self._blocks = fit, pad, blocks
        self._before: PackedStep | None = None

    def pack(self, plan: StepPlan) -> PackedStep:
        """The arrays of the next step."""
        packed = None if self._before is None else advanced(self._before, plan)
        if packed is None:
            packed = pack(plan, self._fit, blocks=self._blocks)
            packed = padded(packed, self._fit) if self._pad else packed
        self._before = packed if packed.whole else None
        return packed


def advanced(before: PackedStep, plan: StepPlan) -> PackedStep | None:
    """The step behind a whole one, if it decodes the same contexts, one row further and in the same places; else
    None."""
    if not _goes_on(before, plan):
        return None
    count, placements = len(plan.shares), plan.placements or tuple(run.placement for run in before.runs)
    further = _further(count, before.padding)
    longs: dict[str, Longs] = {name: before.longs[name] for name in _FIXED}
    longs |= {name: before.longs[name] + further for name in _MOVING}
    longs["host_rows"] = before.longs["host_rows"] + 1
    lengths = (before.ints["lengths"] + further).astype(np.int32)
    floats = chances([share for share in plan.shares if share.samples], longs)
    return replace(
        before,
        plan=plan,
        runs=tuple(
            HistoryRun(run.host_first, run.first, run.rows + 1, 1, placement)
            for run, placement in zip(before.runs, placements, strict=True)
        ),
        longs=longs,
        ints=before.ints | {"lengths": lengths},
        floats=floats,
        longest_history=padded_history(int(lengths[:count].max())),
        tail=tuple((share.context.number, share.start + share.rows) for share in plan.shares),
    )


def _goes_on(before: PackedStep, plan: StepPlan) -> bool:
    """Whether each share is the one of the step before, which decoded (``padding.pads``), one row further, and lies
    where it lay."""
    old = before.plan
    if len(plan.shares) != len(old.shares) or not whole(plan, plan.placements):
        return False
    pairs = zip(plan.shares, old.shares, strict=True)
    if len(plan.placements) != len(old.placements):
        return False
    if not all(now.context is was.context and now.start == was.start + 1 for now, was in pairs):
        return False
    return all(now.home == was.home for now, was in zip(plan.placements, old.placements, strict=True))


def _further(count: int, padding: int) -> Longs:
    found = np.zeros(count + padding, np.int64)
    found[:count] = 1
    return found
