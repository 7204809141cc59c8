"""values: packed steps brought to one of few shapes, as ``padding`` rules. Knows no queue and no tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from worker.engine.contexts import StepPlan
from worker.engine.fit import Fit
from worker.engine.padding import NOWHERE, padded_history, padded_rows, pads, whole
from worker.engine.page_leases import ContextSet
from worker.engine.step import PackedStep


def padded(packed: PackedStep, fit: Fit) -> PackedStep:
    """The same step in the shape of ``padding``, if that concerns it: with further contexts of one row, which is all
    that they attend to."""
    if not pads(packed.plan):
        return packed
    rows = packed.tokens
    padding = padded_rows(rows) - rows
    longs, ints = dict(packed.longs), dict(packed.ints)
    for name, value in (("positions", 0), ("rows", fit.sink_row), ("rows_in_place", NOWHERE), ("last_from", 0)):
        longs[name] = np.pad(longs[name], (0, padding), constant_values=value)
    longs["sample_rows"] = longs["last_to"] = np.arange(rows + padding)
    ints["query_starts"] = np.arange(rows + padding + 1, dtype=np.int32)
    ints["lengths"] = np.pad(ints["lengths"], (0, padding), constant_values=1)
    for name, value in (("history_starts", fit.sink_row), ("in_place", NOWHERE)):
        ints[name] = np.pad(ints[name][:-1], (0, padding + 1), constant_values=value)
    return replace(
        packed,
        longs=longs,
        ints=ints,
        padding=padding,
        longest_history=padded_history(packed.longest_history),
        whole=whole(packed.plan, tuple(run.placement for run in packed.runs)),
    )


def blank(rows: int, longest_history: int, fit: Fit) -> PackedStep:
    """A step of that shape that is all padding."""
    count = {"positions": 0, "rows": fit.sink_row, "rows_in_place": NOWHERE}
    history = {"history_starts": fit.sink_row, "in_place": NOWHERE}
    return PackedStep(
        plan=StepPlan(-1, ()),
        contexts=ContextSet((), ()),
        runs=(),
        longs={name: np.full(rows, value) for name, value in count.items()} | {"sample_rows": np.arange(rows)},
        ints={name: np.full(rows + 1, value, np.int32) for name, value in history.items()}
        | {"query_starts": np.arange(rows + 1, dtype=np.int32), "lengths": np.ones(rows, np.int32)},
        floats={},
        longest_query=1,
        longest_history=longest_history,
        tail=(),
        padding=rows,
        whole=True,
    )
