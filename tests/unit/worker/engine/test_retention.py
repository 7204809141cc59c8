"""Retained history: which rows come from where, the bits of every cell on each route, and controls that turn it red."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from tests.unit.worker.engine import rigs
from worker.engine.admission import PagePool, Reason
from worker.engine.cells import COMPANIES, LENGTHS, ROUTES, cell, play_cell
from worker.engine.device import RaceError
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.retention import Placement, Retention
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge
from worker.engine.virtual_device import VirtualDevice

PAGE = rigs.PAGE


@cache
def made() -> LoadedModel:
    """One set of weights for all cells."""
    return rigs.model()


def model(temperament: Temperament = Temperament.EAGER, seed: int = 1) -> LoadedModel:
    """The same weights on a device of that temperament."""
    return replace(made(), device=VirtualDevice(temperament, seed))


BASE = rigs.settings()


@cache
def reference(company: str, length: str) -> rigs.Outcome:
    """The cell with everything resident."""
    return play_cell(model(), BASE, None, company, length, rested=rigs.at_rest)


@pytest.mark.parametrize(
    ("company", "temperament"),
    [(company, Temperament.RANDOM) for company in COMPANIES]
    + [(COMPANIES[2], one) for one in Temperament if one is not Temperament.RANDOM],
)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("length", LENGTHS)
def test_cells_have_the_bits_of_the_reference(company: str, length: str, route: str, temperament: Temperament) -> None:
    """H4: the table of cells. Each route makes the call of the reference over other rows of one arena."""
    outcome = play_cell(model(temperament), BASE, route, company, length, rested=rigs.at_rest)
    found = cell(route, company, length, PAGE, outcome, reference(company, length))
    assert (found.taken, found.equal) == (True, found.steps), found
    assert outcome.answers == reference(company, length).answers


# -- controls -----------------------------------------------------------------------------------------------------


def _other_page(packed: Any, run: int) -> Any:
    """The step with one context's first retained page taken from where its last one is."""
    runs = list(packed.runs)
    placement = runs[run].placement
    first, place, rows = placement.retained[0]
    moved = ((first, place + PAGE, rows), *placement.retained[1:])
    runs[run] = replace(runs[run], placement=replace(placement, retained=moved))
    return replace(packed, runs=tuple(runs))


def _swapped_pages(route: StagedRoute) -> None:
    """Materialise another page than the one kept."""
    original, done = route._materialise, []

    def materialise(packed: Any, slot: int, pages: int) -> Any:
        with_pages = [index for index, run in enumerate(packed.runs) if run.placement.retained]
        if not done:
            done.append(packed.step)
        return original(_other_page(packed, with_pages[0]) if packed.step == done[0] else packed, slot, pages)

    route._materialise = materialise  # type: ignore[method-assign]


def _wrong_layer(route: StagedRoute) -> None:
    """Materialise the pages of another layer."""
    original = route._materialise
    route._materialise = lambda packed, slot, pages: original(packed, slot, route._fit.layer_first(0))  # type: ignore[method-assign]


def _stale_page(route: StagedRoute) -> None:
    """A page counts as kept and never is."""
    original, work = route._keep, []

    def keep(packed: Any, where: Any) -> Any:
        made = original(packed, where)
        if not work:
            work.append(packed.step)
            return []
        return made

    route._keep = keep  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [None, _swapped_pages, _wrong_layer, _stale_page])
def test_the_gate_turns_red_on_retained_pages(fault: Any) -> None:
    """Pages swapped, another layer's, or never kept: each changes bits; without a fault none do."""

    def prepare(local: LocalEngine) -> None:
        if fault is not None:
            fault(local.engine.route)

    where = ("4 equal", "long")
    outcome = play_cell(model(), BASE, "retained in part", *where, prepare, rigs.at_rest)
    assert rigs.same(outcome, reference(*where)) == (fault is None)


def test_the_gate_turns_red_on_a_row_in_place() -> None:
    """In place a fault is two contexts' homes changed with each other."""

    def prepare(local: LocalEngine) -> None:
        retention = local.engine.scheduler.kept.retention
        assert retention is not None
        original = retention.place

        def place(number: int, start: int, rows: int, step: int) -> Placement:
            found = original(number, start, rows, step)
            if number == 0 and step == 3:
                other = retention.pool.account(1)
                assert other is not None
                assert other.home is not None
                return Placement(other.home * PAGE, found.copies)
            return found

        retention.place = place  # type: ignore[method-assign]

    where = ("4 equal", "one past a page")
    outcome = play_cell(model(), BASE, "retained", *where, prepare, rigs.at_rest)
    assert not rigs.same(outcome, reference(*where))


@pytest.mark.parametrize(
    ("edge", "temperament"),
    [
        (Edge.MATERIALISE_BEFORE_ATTENTION, Temperament.LATE),
        (Edge.ATTENTION_BEFORE_MATERIALISE, Temperament.EARLY),
        (Edge.ATTENTION_BEFORE_REUSE, Temperament.EARLY),
    ],
)
def test_a_missing_edge_of_a_retained_stage_is_found(edge: Edge, temperament: Temperament) -> None:
    """Q1, in life: one wait forgotten around materialised pages. The run ends with the race named."""
    omitted = {edge, Edge.WRITE_BACK_BEFORE_REUSE} if edge is Edge.ATTENTION_BEFORE_REUSE else {edge}
    layers = 1 if edge is Edge.ATTENTION_BEFORE_MATERIALISE else 3  # with more, a slot's readers imply it

    def prepare(local: LocalEngine) -> None:
        local.engine.transport._omit = frozenset(omitted)

    loaded = rigs.model(temperament, num_hidden_layers=layers)
    with pytest.raises(RaceError):
        play_cell(loaded, BASE, "retained in part", "4 equal", "long", prepare)


# -- rules alone --------------------------------------------------------------------------------------------------


def test_a_whole_history_copies_nothing() -> None:
    """In life: prefill and decode of a context that fits; all its rows are hits."""
    retention = Retention(PagePool(8), PAGE)
    retention.admit(0, 20, 0)
    assert retention.place(0, 0, 8, 0) == Placement(0, ())
    assert retention.place(0, 8, 1, 1) == Placement(0, (), hit_rows=8)


def test_a_run_that_comes_later_is_filled_once_and_then_attended_in_place() -> None:
    """In life: another context leaves; after its last step has landed the run is filled with one step's copies."""
    retention = Retention(PagePool(6), PAGE)
    retention.admit(0, 16, 0)
    retention.place(0, 0, 8, 0)
    retention.admit(1, 20, 1)
    assert retention.place(1, 0, 8, 1).home is None
    retention.leave(0, 2)
    assert retention.place(1, 8, 1, 2) == Placement(None, ((0, 8),)), "its run still cools"
    retention.pool.landed(2)
    filled = retention.place(1, 9, 1, 3)
    assert (filled.home, filled.copies, filled.hit_rows) == (0, ((0, 9),), 0)
    assert retention.place(1, 10, 1, 4) == Placement(0, (), hit_rows=10)
    retention.check()


def test_a_broken_run_keeps_its_full_pages() -> None:
    """In life: a whole context loses pages to a newcomer: what it still holds is materialised, the rest streamed."""
    retention = Retention(PagePool(6, target=2), PAGE)
    retention.admit(0, 24, 0)
    retention.place(0, 0, 18, 0)
    assert retention.admit(1, 24, 1) is None
    assert retention.pool.moved[Reason.BORROWED] == 2
    found = retention.place(0, 18, 1, 1)
    assert found.home is None
    assert found.retained == ((0, 0, 4), (12, 12, 4))
    assert found.copies == ((4, 12), (16, 18))
    assert found.hit_rows == 8
    retention.check()


def test_a_parked_context_trusts_nothing_that_moved_meanwhile() -> None:
    """In life: its turn ends, its run goes to another and comes back to it: not one row in it counts as its own."""
    retention = Retention(PagePool(6), PAGE)
    retention.admit(0, 24, 0)
    retention.place(0, 0, 18, 0)
    retention.pool.park(0)
    assert retention.admit(1, 24, 1) is None
    retention.leave(1, 2)
    assert retention.pool.bring_in(0, 3) is None
    retention.pool.landed(2)
    again = retention.place(0, 18, 1, 3)
    assert (again.home, again.copies, again.hit_rows) == (0, ((0, 18),), 0)


def test_the_books_find_a_run_that_is_too_short() -> None:
    """The control: more rows count as resident than the run has."""
    retention = Retention(PagePool(4), PAGE)
    retention.admit(0, 8, 0)
    retention.place(0, 0, 8, 0)
    retention._holdings[0].resident = 9
    with pytest.raises(InvariantError, match="shorter run"):
        retention.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pages=st.integers(4, 24), target=st.sampled_from([0, 2, 4]), burst=st.integers(0, 5))
def test_every_row_of_a_history_comes_from_where_it_was_written(
    data: st.DataObject, pages: int, target: int, burst: int
) -> None:
    """Random lives over a memory of row numbers: whatever is copied, materialised, kept or attended in place, attention
    sees each row of each context's history once, and no page is written while a step under way still uses it."""
    retention = Retention(PagePool(pages, target, burst), PAGE)
    memory: dict[int, tuple[int, int]] = {}
    rows: dict[int, int] = {}
    numbers = 0
    used: dict[int, set[int]] = {}
    for step in range(data.draw(st.integers(5, 40))):
        retention.pool.landed(step - 2)
        if data.draw(st.integers(0, 3)) == 0 and retention.admit(numbers, data.draw(st.integers(4, 40)), step) is None:
            rows[numbers] = 0
            numbers += 1
        if rows and data.draw(st.integers(0, 7)) == 0:
            number = data.draw(st.sampled_from(sorted(rows)))
            retention.leave(number, step)
            del rows[number]
        used[step] = set()
        busy = used.get(step - 1, set())
        for number in rows:
            need = retention._holdings[number].account.need * PAGE
            added = min(data.draw(st.integers(1, 6)), need - rows[number])
            if added <= 0:
                continue
            start = rows[number]
            found = retention.place(number, start, added, step)
            seen: dict[int, tuple[int, int]] = {}
            base = found.home
            for first, end in found.copies:
                for row in range(first, end):
                    assert row not in seen
                    seen[row] = (number, row)
                    if base is not None:
                        memory[base + row] = (number, row)
            if base is not None:
                memory.update({base + row: (number, row) for row in range(start, start + added)})
                seen = {row: memory[base + row] for row in range(start)}
            for first, place, count in found.retained:
                for row in range(count):
                    assert first + row not in seen
                    seen[first + row] = memory[place + row]
                    used[step].add((number, place + row))  # type: ignore[arg-type]
            assert seen == {row: (number, row) for row in range(start)}
            for first, place, count in found.captures:
                assert first + count <= start + added
                for row in range(count):
                    assert not any(other != number and at == place + row for other, at in busy)  # type: ignore[misc]
                    memory[place + row] = (number, first + row)
            rows[number] = start + added
        retention.check()


def test_the_default_pool_retains_what_fits() -> None:
    """In life: nothing but defaults: short requests are never staged at all."""
    outcome = rigs.run(model(), rigs.together(6, 9), retain="on")
    assert outcome.local.engine.transport.bytes_in == 0
    assert torch.equal(outcome.steps[-1][1], rigs.run(model(), rigs.together(6, 9), residency="full").steps[-1][1])
