"""A step made from the one before is the step made from its plan, array for array."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_graphs import WIDE
from worker.engine import packing
from worker.engine.padded_step import padded
from worker.engine.step import PackedStep, pack
from worker.structures import Sampling

MIXED = rigs.Scenario(
    prompts=tuple((3 + 2 * n, Sampling(20 - n % 5, temperature=0.7 * (n % 3 == 0), seed=n)) for n in range(11)),
    arrive={0: tuple(range(9)), 4: (9, 10)},
    cancel={14: (1,)},
)


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype != other.dtype or not np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(_differs(one[name], other[name]) for name in one)
    return bool(one != other)


def _told(packed: PackedStep) -> dict[str, Any]:
    """Everything that a step says, its parts by value."""
    found = {one.name: getattr(packed, one.name) for one in fields(packed)}
    found["contexts"] = packed.contexts.ids, packed.contexts.owners
    found["runs"] = [(run.host_first, run.first, run.rows, run.added, run.placement) for run in packed.runs]
    return found


def _compared(monkeypatch: pytest.MonkeyPatch, spoil: str = "") -> list[str]:
    """What differs in any step that was made from the one before; a comma for each that is equal."""
    wrong: list[str] = []
    advanced = packing.advanced

    def both(before: PackedStep, plan: Any) -> PackedStep | None:
        found = advanced(before, plan)
        if found is not None:
            if spoil:
                found = replace(found, longs=found.longs | {spoil: before.longs[spoil]})
            wanted = _told(padded(pack(plan, fit[0]), fit[0]))
            wrong.extend([name for name, value in _told(found).items() if _differs(value, wanted[name])] or [","])
        return found

    fit: list[Any] = []

    def prepare(local: Any) -> None:
        fit.append(local.engine.fit)

    monkeypatch.setattr(packing, "advanced", both)
    rigs.run(rigs.model(), MIXED, prepare, retain="on", graphs="on", **WIDE)
    return wrong


def test_a_step_that_goes_on_is_the_step_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: most steps of a batch; contexts come, end and are cancelled between them."""
    found = _compared(monkeypatch)
    assert set(found) == {","}
    assert len(found) > 10


def test_who_lies_elsewhere_is_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life, at each step that goes on: no array of places is taken over when one context moved."""
    advanced = packing.advanced
    seen: list[PackedStep | None] = []

    def both(before: PackedStep, plan: Any) -> PackedStep | None:
        found = advanced(before, plan)
        if found is not None:
            first, *others = plan.placements
            moved = replace(first, home=first.home + 1)
            seen.append(advanced(before, replace(plan, placements=(moved, *others))))
        return found

    monkeypatch.setattr(packing, "advanced", both)
    rigs.run(rigs.model(), MIXED, retain="on", graphs="on", **WIDE)
    assert len(seen) > 10
    assert set(seen) == {None}


def test_control_one_array_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    assert set(_compared(monkeypatch, "positions")) == {"longs"}


def test_the_reference_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: --residency full plans no placements."""
    seen: list[bool] = []
    advanced = packing.advanced
    monkeypatch.setattr(
        packing, "advanced", lambda *given: seen.append((found := advanced(*given)) is not None) or found
    )
    rigs.run(rigs.model(), MIXED, residency="full", graphs="on", **WIDE)
    assert sum(seen) > 10
