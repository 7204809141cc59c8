"""rules: which shapes decode steps take, so that few graphs serve them all, and which steps are replayed as a whole.

The rows of a step that only decodes are padded to one of few counts, its longest history is rounded up: both say how
the kernels split their work, and so which bits come out. So every such step is padded, on the staged route and on the
reference route alike, whether it is replayed or not (H4). Padded rows write one row that nobody owns and attend to
nothing else. Knows no tensor.
"""

from __future__ import annotations

from common.limits import GRAPH_HISTORY_MIN_TOKENS
from worker.engine.contexts import StepPlan
from worker.engine.retention import Placement

NOWHERE = 2
"""Where a padded row lies, beside 0 for a slot and 1 for the layer's pages: at the same arena row in every layer."""


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to one of eight counts between two powers of two at most: up to 8 rows stay as they are."""
    return _rounded(rows, 8)


def shapes(most: int) -> list[int]:
    """Every count of rows that steps of at most ``most`` rows are padded to, the largest first."""
    return sorted({padded_rows(rows) for rows in range(1, most + 1)}, reverse=True)


def padded_history(rows: int) -> int:
    """``rows`` of history rounded up, by an eighth at most unless there are few."""
    return _rounded(max(rows, GRAPH_HISTORY_MIN_TOKENS), 16)


def pads(plan: StepPlan) -> bool:
    """Whether a step's shape is padded: it only decodes, one row each, of histories that nobody shares."""
    return not plan.joined and not any(share.prompt or share.ids for share in plan.shares)


def whole(plan: StepPlan, placements: tuple[Placement, ...]) -> bool:
    """Whether a padded step can be replayed as a whole: all its histories are in place already, and nothing is copied
    or kept beside it."""
    if plan.prefetches or plan.shifts:
        return False
    return all(one.home is not None and not (one.copies or one.captures or one.lent) for one in placements)


def _rounded(rows: int, parts: int) -> int:
    """``rows`` rounded up to a whole number of ``parts`` of the next power of two."""
    step = max(1, (1 << (rows - 1).bit_length()) // parts)
    return -(-rows // step) * step
