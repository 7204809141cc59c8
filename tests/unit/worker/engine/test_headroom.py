"""The books of headroom: pages conserved over chunks, A4's order exact, nothing reused before its step has landed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from worker.engine.admission import PagePool
from worker.engine.headroom import Cause, Headroom, HeadroomBooksError, Spot
from worker.engine.retention import Placement, Retention, streamed

PAGE = 4


def opened(chunks: int, pages: int = 4) -> Headroom:
    """Headroom with so many chunks."""
    headroom = Headroom(PAGE, pages)
    for _ in range(chunks):
        headroom.open(0)
    return headroom


def grown(headroom: Headroom, number: int, pages: int, step: int) -> Placement:
    """A context that had nothing computes so many whole pages in this step."""
    return headroom.place(number, streamed(0), 0, pages * PAGE, step)


def pages(headroom: Headroom, number: int) -> dict[int, Spot]:
    """Where the pages of a context lie, by their index in its history."""
    return headroom._borrowers[number].pages


def dropped(headroom: Headroom, since: int = 0) -> list[tuple[Cause, int | None, int]]:
    """What was taken from whom, in order: cause, context, pages."""
    taken = (Cause.IDLE, Cause.REVOKED_IDLE, Cause.REVOKED)
    return [
        (one.reason, one.source, len(one.pages))  # type: ignore[misc]
        for one in headroom.records
        if one.sequence >= since and one.reason in taken
    ]


def test_whole_pages_are_kept_and_come_from_headroom_from_then_on() -> None:
    """In life: a prompt of two and a half pages, then decode: two pages are kept, the rest comes over the link."""
    headroom = opened(1)
    first = headroom.place(0, streamed(0), 0, 10, 0)
    assert (first.borrowed, first.lent, first.copies) == ((), ((0, 0, 0, 8),), ())
    again = headroom.place(0, streamed(10), 10, 1, 1)
    assert (again.borrowed, again.copies, again.borrowed_rows, again.link_rows) == (((0, 0, 0, 8),), ((8, 10),), 8, 2)
    headroom.check()


def test_what_its_own_pages_hold_is_not_kept_twice() -> None:
    """H1 beside H2: the arena's pages stay the arena's; one that it captures leaves headroom after this step."""
    headroom = opened(1)
    grown(headroom, 0, 3, 0)
    found = Placement(None, ((4, 13),), ((0, 0, 4),), ((4, 4, 4),), 4)
    placed = headroom.place(0, found, 13, 1, 1)
    assert placed.borrowed == ((4, 0, 4, 8),), "this step still reads the page that the arena keeps from now on"
    assert placed.copies == ((12, 13),)
    assert sorted(pages(headroom, 0)) == [2]
    assert headroom.moved[Cause.OWN_PAGES] == 2
    headroom.check()


def test_a_context_in_place_fills_its_run_from_headroom_and_needs_none_then() -> None:
    """In life: a run becomes free for a context that was attended in a slot."""
    headroom = opened(1)
    grown(headroom, 0, 3, 0)
    placed = headroom.place(0, Placement(16, ((0, 13),)), 13, 1, 1)
    assert (placed.home, placed.borrowed, placed.copies) == (16, ((0, 0, 0, 12),), ((12, 13),))
    assert headroom.held == 0
    headroom.check()


def test_a_running_context_keeps_what_it_has_and_a_parked_one_until_somebody_wants_it() -> None:
    """A4, in life: no room is left: a running neighbour loses nothing, a parked one all it has, and not before."""
    headroom = opened(1)
    grown(headroom, 0, 4, 0)
    assert grown(headroom, 1, 1, 1).lent == ()
    headroom.park(0)
    assert headroom.held == 4
    since = headroom.sequence
    assert grown(headroom, 1, 1, 2).lent == (), "its pages still cool"
    assert dropped(headroom, since) == [(Cause.IDLE, 0, 4)]
    headroom.landed(2)
    assert len(grown(headroom, 1, 1, 3).lent) == 1
    headroom.check()


def test_revoked_pages_go_in_a4s_order() -> None:
    """A4, exactly: whole idle contexts, the one longest not active first; then the least recently active's oldest."""
    headroom = opened(4)
    for number, pages in enumerate((3, 4, 2, 5)):
        grown(headroom, number, pages, number)
    headroom.park(0)
    headroom.park(2)
    headroom.bring_in(0)
    headroom.park(3)
    since = headroom.sequence
    headroom.revoke(1, 5)
    assert headroom.chunks == 3
    assert dropped(headroom, since) == [(Cause.REVOKED_IDLE, 2, 2)], "14 pages to 12: the whole of the first idle one"
    headroom.revoke(2, 5)
    assert dropped(headroom, since)[1:] == [(Cause.REVOKED_IDLE, 3, 5), (Cause.REVOKED, 0, 3)]
    headroom.check()
    headroom.revoke(9, 5)
    assert headroom.held == 0
    headroom.check()


def test_a_page_that_stays_moves_out_of_a_closed_chunk_beside_the_next_step() -> None:
    """In life: two chunks half full, one is given back: nothing is dropped, its pages move, then it is the device's."""
    headroom = opened(2)
    grown(headroom, 0, 2, 0)
    grown(headroom, 1, 1, 0)
    assert {chunk for chunk, _ in pages(headroom, 1).values()} == {1}
    headroom.revoke(1, 1)
    assert headroom.cold(1) == []
    before = headroom.place(1, streamed(4), 4, 1, 1)
    assert before.borrowed == ((0, 1, 0, 4),), "this step still reads the old chunk"
    assert headroom.shifts(1) == ((1, 0, 0, 12, 4),)
    after = headroom.place(1, streamed(5), 5, 1, 2)
    assert after.borrowed == ((0, 0, 12, 4),)
    headroom.landed(0)
    assert headroom.cold(2) == [], "step 1 still reads it"
    headroom.landed(1)
    assert headroom.cold(2) == [1]
    assert (headroom.moved[Cause.CLOSED], dropped(headroom)) == (4, [])
    headroom.check()


def test_a_chunk_that_could_not_be_left_stays_warm_until_its_last_reader_has_landed() -> None:
    """In life: no cool page is left to move to; the context reads on in the closed chunk, then it ends."""
    headroom = opened(2, 2)
    grown(headroom, 0, 2, 0)
    grown(headroom, 1, 1, 1)
    headroom.revoke(1, 2)
    assert dropped(headroom) == [(Cause.REVOKED, 0, 1)]
    assert headroom.place(1, streamed(4), 4, 1, 2).borrowed == ((0, 1, 0, 4),)
    assert headroom.shifts(2) == (), "the page that was dropped still cools"
    headroom.leave(1, 3)
    headroom.landed(1)
    assert headroom.cold(3) == []
    headroom.landed(2)
    assert headroom.cold(3) == [1]
    headroom.check()


def test_a_chunk_no_step_can_leave_is_emptied() -> None:
    """In life: the engine idles, so no step moves the page that a cached history has there: it is dropped instead, and
    nothing else is; a step still under way keeps the chunk warm."""
    headroom = opened(2)
    grown(headroom, 0, 2, 0)
    grown(headroom, 1, 1, 0)
    headroom.revoke(1, 1)
    headroom.vacate(1)
    assert (headroom.held, headroom.moved[Cause.STRANDED], headroom.closing) == (2, 1, 1)
    assert headroom.cold(1) == [], "step 0 still reads it"
    headroom.landed(0)
    assert headroom.cold(1) == [1]
    headroom.vacate(1)
    assert headroom.held == 2
    headroom.check()


def test_pages_of_a_context_lie_side_by_side() -> None:
    """In life: four prompts prefilled in turn: each history is few copies, not one a page."""
    headroom = opened(2, 64)
    rows: Counter[int] = Counter()
    for step in range(16):
        for number in range(4):
            headroom.place(number, streamed(rows[number]), rows[number], 2 * PAGE, step)
            rows[number] += 2 * PAGE
    assert all(len(headroom.place(one, streamed(rows[one]), rows[one], 1, 16).borrowed) <= 2 for one in range(4))


def test_a_step_that_keeps_nothing_new_looks_at_no_page() -> None:
    """In life: decode over a long history: its rows are put together when its pages change, not once a step."""
    headroom = opened(2, 64)
    grown(headroom, 0, 100, 0)
    headroom.place(0, streamed(401), 401, 1, 1)
    before = headroom._borrowers[0].runs
    assert headroom.place(0, streamed(402), 402, 1, 2).borrowed == before
    assert headroom._borrowers[0].runs is before
    headroom.place(0, streamed(403), 403, 1, 3)
    assert headroom._borrowers[0].runs is not before, "a page was completed"
    headroom.check()


def test_without_a_chunk_nothing_changes() -> None:
    """--headroom-gib 0, in life."""
    headroom = Headroom(PAGE, 4)
    found = streamed(9)
    assert headroom.place(0, found, 9, 1, 0) is found
    headroom.revoke(1, 0)
    assert (headroom.shifts(0), headroom.cold(0), headroom.closing) == ((), [], 0)


def test_the_books_find_what_does_not_add_up() -> None:
    """Controls: a page twice, a page lost, a page of no chunk, more held than there is room for."""
    for break_it in (
        lambda one: one._borrowers[0].pages.update({1: (0, 0)}),
        lambda one: one._open[0].take(3),
        lambda one: one._borrowers[0].pages.update({1: (7, 1)}),
        lambda one: one._open.clear(),
        lambda one: one._cooling.update({(0, 0): 3}),
        lambda one: setattr(one._borrowers[0], "runs", ((0, 0, 4, 8),)),
    ):
        headroom = opened(1)
        grown(headroom, 0, 2, 0)
        headroom.check()
        break_it(headroom)
        with pytest.raises((HeadroomBooksError, InvariantError)):
            headroom.check()


class Life:
    """Headroom beside a model of its memory: what each page holds, and which steps may still touch it."""

    def __init__(self, data: st.DataObject, chunk_pages: int, arena: int) -> None:
        self.data, self.step = data, 0
        self.headroom = Headroom(PAGE, chunk_pages)
        self.retention = Retention(PagePool(arena), PAGE) if arena else None
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.arena: dict[int, tuple[int, int]] = {}
        self.rows: dict[int, int] = {}
        self.parked: set[int] = set()
        self.touched: dict[tuple[int, int], int] = {}
        """The newest step that reads or writes a row of a chunk."""
        self.numbers = self.landed = 0
        self.there: set[int] = set()

    def admit(self) -> None:
        need = self.data.draw(st.integers(4, 40))
        if self.retention is None or self.retention.admit(self.numbers, need, self.step) is None:
            self.rows[self.numbers] = 0
            self.numbers += 1

    def leave(self, number: int) -> None:
        if self.retention is not None:
            self.retention.leave(number, self.step)
        self.headroom.leave(number, self.step)
        del self.rows[number]
        self.parked.discard(number)

    def park(self, number: int) -> None:
        self.parked.add(number)
        self.headroom.park(number)
        if self.retention is not None:
            self.retention.park(number)

    def bring_in(self, number: int) -> None:
        if self.retention is None or self.retention.bring_in(number, self.step) is None:
            self.parked.discard(number)
            self.headroom.bring_in(number)

    def compute(self, number: int) -> None:
        """One context's part of the step, checked row by row; captures are kept for after attention."""
        start, limit = self.rows[number], 40
        if self.retention is not None:
            limit = self.retention._holdings[number].account.need * PAGE
        added = min(self.data.draw(st.integers(1, 9)), limit - start)
        if added <= 0:
            return
        found = streamed(start)
        if self.retention is not None:
            found = self.retention.place(number, start, added, self.step)
        placed = self.headroom.place(number, found, start, added, self.step)
        seen: dict[int, tuple[int, int]] = {}
        for first, end in placed.copies:
            seen.update(self.once(seen, {row: (number, row) for row in range(first, end)}))
        for first, chunk, place, count in placed.borrowed:
            assert chunk in self.there
            assert count % PAGE == first % PAGE == place % PAGE == 0
            seen.update(self.once(seen, {first + row: self.memory[chunk, place + row] for row in range(count)}))
            self.touched.update({(chunk, place + row): self.step for row in range(count)})
        if placed.home is not None:
            self.arena.update({placed.home + row: what for row, what in seen.items()})
            self.arena.update({placed.home + row: (number, row) for row in range(start, start + added)})
            seen = {row: self.arena[placed.home + row] for row in range(start)}
        for first, place, count in placed.retained:
            seen.update(self.once(seen, {first + row: self.arena[place + row] for row in range(count)}))
        assert seen == {row: (number, row) for row in range(start)}
        for first, place, count in placed.captures:
            self.arena.update({place + row: (number, first + row) for row in range(count)})
        self.lend(number, placed, start + added)
        self.rows[number] = start + added

    def lend(self, number: int, placed: Placement, end: int) -> None:
        for first, chunk, place, count in placed.lent:
            assert first + count <= end
            assert chunk in self.there
            self.write(chunk, place, [(number, first + row) for row in range(count)])

    def write(self, chunk: int, place: int, what: list[tuple[int, int]]) -> None:
        for row, one in enumerate(what):
            assert self.touched.get((chunk, place + row), -9) <= self.landed, "a page of an unlanded step is reused"
            self.memory[chunk, place + row] = one
        self.touched.update({(chunk, place + row): self.step for row in range(len(what))})

    @staticmethod
    def once(seen: dict[int, Any], more: dict[int, Any]) -> dict[int, Any]:
        assert not seen.keys() & more.keys(), "a row comes from two places"
        return more

    def shift(self) -> None:
        for source, row, target, place, count in self.headroom.shifts(self.step):
            assert {source, target} <= self.there
            self.write(target, place, [self.memory[source, row + at] for at in range(count)])
            self.touched.update({(source, row + at): self.step for at in range(count)})

    def chunks(self, choice: int) -> None:
        """One more chunk, or some given back: victims in A4's order, and no more of them than need be."""
        headroom = self.headroom
        if choice == 0 and headroom.chunks < 4:
            self.there.add(headroom.open(self.step))
        elif choice == 1:
            before = {one: (len(one.pages), one.parked) for one in headroom._borrowers.values() if one.pages}
            order = sorted(before, key=lambda one: (not one.parked, one.last_active, one.number))
            count = self.data.draw(st.integers(0, 2))
            room = max(0, headroom.capacity - min(count, headroom.chunks) * headroom.chunk_pages)
            expected, held = [], headroom.held
            for one in order:
                if held > room:
                    gone = before[one][0] if one.parked else min(before[one][0], held - room)
                    expected.append((one.number, gone))
                    held -= gone
            since = headroom.sequence
            headroom.revoke(count, self.step)
            lost: Counter[int] = Counter()
            for _, source, pages in dropped(headroom, since):
                lost[source] += pages  # type: ignore[index]
            assert list(lost.items()) == expected
        for chunk in headroom.cold(self.step):
            assert all(until <= self.landed for (at, _), until in self.touched.items() if at == chunk)
            self.there.remove(chunk)
            self.touched = {spot: until for spot, until in self.touched.items() if spot[0] != chunk}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), chunk_pages=st.integers(1, 6), arena=st.sampled_from([0, 0, 6, 12]))
def test_any_life_keeps_pages_rows_and_order(data: st.DataObject, chunk_pages: int, arena: int) -> None:
    """Random admissions, growth, parking, ends; chunks come and are given back in the middle of it all. Each row of a
    history comes from one place (arena, headroom or link) and is its own; pages are conserved; revoking goes in A4's
    order; no page and no chunk changes hands before the steps that touch it have landed."""
    life = Life(data, chunk_pages, arena)
    for step in range(data.draw(st.integers(3, 30))):
        life.step, life.landed = step, step - 2
        life.headroom.landed(life.landed)
        if life.retention is not None:
            life.retention.pool.landed(life.landed)
        life.chunks(data.draw(st.integers(0, 3)))
        choice = data.draw(st.integers(0, 6))
        if choice == 0 or not life.rows:
            life.admit()
        elif choice in (1, 2, 3):
            number = data.draw(st.sampled_from(sorted(life.rows)))
            if choice == 1:
                life.leave(number)
            elif number in life.parked:
                life.bring_in(number)
            else:
                life.park(number)
        for number in sorted(life.rows.keys() - life.parked):
            life.compute(number)
        life.shift()
        life.headroom.check()
        assert life.there == life.headroom._open.keys() | life.headroom._closing.keys()
    for number in list(life.rows):
        life.leave(number)
    life.headroom.landed(life.step)
    assert life.headroom.held == 0
    assert all(len(free) == chunk_pages for free in life.headroom._open.values())


def test_the_life_finds_a_page_that_does_not_cool() -> None:
    """The control: without cooling a page of a step under way is written, or a chunk goes while it is read."""

    class Hasty(Headroom):
        def landed(self, step: int) -> None:
            super().landed(10**9)

    @settings(max_examples=150, deadline=None, database=None, report_multiple_bugs=False, phases=[Phase.generate])
    @given(data=st.data())
    def lived(data: st.DataObject) -> None:
        life = Life(data, 2, 0)
        life.headroom = Hasty(PAGE, 2)
        life.there.add(life.headroom.open(0))
        for step in range(12):
            life.step, life.landed = step, step - 2
            life.headroom.landed(life.landed)
            life.chunks(data.draw(st.integers(0, 3)))
            if len(life.rows) < 3:
                life.admit()
            for number in sorted(life.rows):
                life.compute(number)
            life.shift()
            if data.draw(st.booleans()):
                life.leave(data.draw(st.sampled_from(sorted(life.rows))))

    with pytest.raises(AssertionError):
        lived()
