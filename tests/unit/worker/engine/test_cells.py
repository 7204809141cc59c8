"""The table of cells: its churn is one, its figures are those of the runs, and each fault turns it red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.worker.engine import faults
from tests.unit.worker.engine.test_retention import BASE, PAGE, model, reference
from worker.engine.cells import LENGTHS, ROUTES, Cell, scenario, table, tokens_of
from worker.engine.local import LocalEngine
from worker.engine.retention import Placement
from worker.engine.routes import StagedRoute

CHURN = "8 mixed with churn"
SHARING = "8 on shared histories"


@pytest.mark.parametrize("length", LENGTHS)
def test_the_churn_joins_finishes_and_is_cancelled(length: str) -> None:
    """In every cell: unequal answers, one context cancelled while it decodes, one before it has a token."""
    outcome = reference(CHURN, length)
    ends = {(one.reason, len(one.token_ids)) for one in outcome.finished.values()}
    cancelled = {tokens for reason, tokens in ends if reason == "cancelled"}
    assert len({tokens for reason, tokens in ends if reason == "length"}) == 6
    assert (min(cancelled), max(cancelled) > 0) == (0, True)
    assert len({len(plan) for plan, _ in outcome.steps}) > 1, "contexts join and leave"


def test_lengths_scale_with_the_page() -> None:
    """In life: pages of 256 on a GPU, of 4 here: the same cells."""
    assert [tokens_of(length, 4) for length in LENGTHS] == [3, 8, 9, 40]
    assert [tokens_of(length, 256) for length in LENGTHS] == [255, 512, 513, 2560]
    assert scenario(CHURN, "long", 4).arrive == scenario(CHURN, "long", 256).arrive


def _swapped_homes(route: StagedRoute, local: LocalEngine) -> None:
    """In place: two contexts' runs of pages change places for a step."""
    retention = local.engine.scheduler.kept.retention
    if retention is None:
        return
    original = retention.place

    def place(number: int, start: int, rows: int, step: int) -> Placement:
        found, other = original(number, start, rows, step), retention.pool.account(1)
        if number or step != 4 or found.home is None or other is None or other.home is None:
            return found
        return replace(found, home=other.home * PAGE)

    retention.place = place  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "red"),
    [
        (None, set()),
        (lambda route, local: faults.stale_row(route), {"streamed"}),
        (lambda route, local: faults.swapped_rows(route), {"streamed"}),
        (lambda route, local: faults.wrong_layer(route), {"streamed"}),
        (_swapped_homes, {"retained"}),
    ],
    ids=["none", "stale row", "swapped rows", "wrong layer", "swapped homes"],
)
def test_the_table_turns_red(fault: Callable[[StagedRoute, LocalEngine], None] | None, red: set[str]) -> None:
    """One stale row, two contexts' rows or pages swapped, the wrong layer's slot: the route it touches differs, and the
    reference, which the fault does not see, repeats itself. Without a fault all is equal."""

    def prepare(local: LocalEngine) -> None:
        if fault is not None:
            assert isinstance(local.engine.route, StagedRoute)
            fault(local.engine.route, local)

    (row,) = table(model, BASE, prepare, ("4 equal",), ("one past a page",))
    assert row.repeats
    assert tuple(cell.route for cell in row.cells) == ROUTES
    differs = {cell.route for cell in row.cells if not cell.passed}
    assert red <= differs
    assert bool(differs) == (fault is not None)


def test_a_route_that_was_not_taken_is_not_passed() -> None:
    """A retained route that staged everything is equal and proves nothing; so is a cell without a step."""
    good = Cell("retained", "4 equal", "long", 40, 25, 25, 1000, 0)
    assert good.passed
    assert not replace(good, equal=24).passed
    assert not replace(good, steps=0, equal=0).passed
    assert not replace(good, hit_bytes=0, staged_bytes=1000).passed
    assert not replace(good, route="streamed").passed
    assert replace(good, route="streamed", hit_bytes=0, staged_bytes=1000).passed
    assert not replace(good, route="retained in part").passed
    assert replace(good, route="retained in part", staged_bytes=10).passed
    assert not replace(good, headroom_bytes=10).passed
    assert not replace(good, route="headroom", headroom_bytes=10, staged_bytes=10).passed
    assert replace(good, route="headroom", hit_bytes=0, headroom_bytes=10, staged_bytes=10).passed
    assert not replace(good, route="H1+H2", staged_bytes=10).passed
    assert replace(good, route="H1+H2", headroom_bytes=10, staged_bytes=10).passed


@pytest.mark.parametrize("length", LENGTHS)
def test_the_documents_are_shared_joined_and_left(length: str) -> None:
    """In every cell of the last company: two contexts or more on one document in a step, and one beside them alone;
    its first is cancelled while it decodes, another before it has a token."""
    outcome = reference(SHARING, length)
    ends = {number: (one.reason, len(one.token_ids)) for number, one in outcome.finished.items()}
    assert (ends[0][0], ends[0][1] > 0) == ("cancelled", True)
    assert ends[6] == ("cancelled", 0)
    assert [reason for reason, _ in ends.values()].count("length") == 6
    assert outcome.local.engine.spared_bytes > 0


@pytest.mark.parametrize("fault", [None, faults.wrong_shared_rows, faults.shared_rows_of_another])
def test_the_table_turns_red_on_shared_rows(fault: Callable[[StagedRoute], None] | None) -> None:
    """The control of the cells with sharing: one row too far of a document, or another context's rows."""

    def prepare(local: LocalEngine) -> None:
        if fault is not None:
            assert isinstance(local.engine.route, StagedRoute)
            fault(local.engine.route)

    (row,) = table(model, BASE, prepare, (SHARING,), ("one past a page",))
    assert row.repeats
    assert {cell.route for cell in row.cells if not cell.passed} == (set() if fault is None else {"streamed"})
