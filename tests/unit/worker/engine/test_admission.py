"""The page pool's rules: floors, fill order, reclaim order; the books over random lives; each decision on record."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from worker.engine.admission import FLOOR_PAGES, RECLAIMING, Account, PagePool, PoolBooksError, Reason


def account(pool: PagePool, number: int) -> Account:
    """An account that is there."""
    found = pool.account(number)
    assert found is not None
    return found


def admitted(pool: PagePool, number: int, need: int, step: int = 0) -> Account:
    """A context that got in."""
    assert pool.admit(number, need, step) is None
    return account(pool, number)


def last(pool: PagePool) -> tuple[Reason, tuple[int, ...], int | None, int | None]:
    """The newest decision without its number."""
    decision = pool.records[-1]
    return decision.reason, decision.pages, decision.source, decision.to


def test_a_history_that_fits_gets_a_run_of_pages() -> None:
    """In life: the pool has room; the context is whole from its first row, its pages in order."""
    pool = PagePool(8)
    one = admitted(pool, 0, 5)
    assert one.home == 0
    assert one.pages == {index: index for index in range(5)}
    assert last(pool) == (Reason.WHOLE, (0, 1, 2, 3, 4), None, 0)
    pool.check()


def test_the_smallest_run_that_is_long_enough_is_taken() -> None:
    """In life: contexts came and went; a short history does not break up the long run."""
    pool = PagePool(12)
    for number, need in enumerate((2, 3, 4, 2)):
        admitted(pool, number, need)
    pool.leave(1, 1)
    assert admitted(pool, 4, 2, 2).home == 2
    pool.check()


def test_who_does_not_fit_whole_gets_its_floor() -> None:
    """A2, in life: the pool is smaller than the history: the sink and one page, then what is free."""
    pool = PagePool(6)
    one = admitted(pool, 0, 9)
    assert set(one.pages) == {0, 1}
    assert one.home is None
    assert pool.take(one, 4, 1) is not None
    assert last(pool)[0] is Reason.FREE


def test_fill_order_own_free_reclaim_shrink() -> None:
    """A3, in its order: at its limit an own page outside the window; then a free page; then by right from others; then
    its own oldest page, the sink never."""
    pool = PagePool(8, target=4, burst=1)
    one = admitted(pool, 0, 20)
    for index in (2, 3, 4):
        pool.take(one, index, 1)
    assert last(pool)[0] is Reason.FREE
    assert one.loans == 1
    taken = pool.take(one, 5, 2)
    assert last(pool) == (Reason.OWN, (taken,), 0, 0)
    assert set(one.pages) == {0, 2, 3, 4, 5}
    two = admitted(pool, 1, 20)
    pool.take(two, 7, 3)
    assert pool.free == 0
    pool.take(two, 8, 3)
    assert (pool.records[-2].reason, pool.records[-2].source, pool.records[-2].to) == (Reason.BORROWED, 0, 1)
    assert 2 not in one.pages
    assert pool.take(two, 9, 4) is not None
    assert last(pool)[0] is Reason.SHRINK
    assert set(two.pages) == {0, 7, 8, 9}
    assert pool.take(two, 3, 5) is None
    pool.check()


def test_a_page_by_right_is_not_reclaimed() -> None:
    """A2, in life: everybody holds its target and no more; a newcomer whose right does not fit waits, with numbers."""
    pool = PagePool(8, target=4)
    for number in range(2):
        one = admitted(pool, number, 20)
        for index in (5, 6):
            pool.take(one, index, 1)
    assert pool.free == 0
    before = list(pool.records)
    assert "needs 4 device pages, 8 of 8 are promised to 2 contexts" in str(pool.admit(2, 20, 2))
    assert list(pool.records) == before
    assert pool.account(2) is None


def test_a_right_to_more_than_the_pool_is_a_right_to_all_of_it() -> None:
    """A7, in life: --target-pages beyond what is left of the device pages: requests run one at a time, none
    waits for ever."""
    pool = PagePool(4, target=9)
    admitted(pool, 0, 20)
    assert pool.admit(1, 20, 1) is not None
    pool.leave(0, 2)
    admitted(pool, 1, 20, 3)


def test_reclaim_order_is_by_class_then_least_recently_active() -> None:
    """A4, exactly: borrowed pages, the one longest not active first; pages above target; idle contexts whole."""
    pool = PagePool(16)
    one, two, three = (admitted(pool, number, 5, number) for number in range(3))
    one.last_active, two.last_active, three.last_active = 7, 5, 6
    two.loans, one.loans = 1, 0
    idle = three
    pool.park(2)
    assert (pool.target(one), pool.target(two)) == (5, 5)
    pool._target = 3
    newcomer = Account(9, 16, 8)
    pool._accounts[9] = newcomer
    pool._active += 1
    free = pool.free
    pool._reclaim(9, newcomer, 8)
    moved = [(record.reason, record.source, len(record.pages)) for record in list(pool.records)[-4:]]
    assert moved == [
        (Reason.BORROWED, 1, 1),
        (Reason.ABOVE_TARGET, 1, 1),
        (Reason.ABOVE_TARGET, 0, 2),
        (Reason.IDLE, 2, 5),
    ]
    assert pool.free == free + 9
    assert not idle.pages
    assert [record.sequence for record in pool.records] == list(range(len(pool.records)))


def test_a_whole_run_for_a_newcomer_takes_idle_contexts_alone() -> None:
    """H6, in life: a turn ends; the parked context's run goes to the next, a running one's never."""
    pool = PagePool(11)
    parked, running = admitted(pool, 0, 5), admitted(pool, 1, 4)
    third = admitted(pool, 2, 5, 1)
    assert third.home is None
    assert not pool.take_whole(third, 2, reclaim=True)
    assert parked.home is not None
    pool.park(0)
    assert pool.take_whole(third, 3, reclaim=True)
    assert running.home is not None
    assert not parked.pages
    pool.check()


def test_a_parked_context_s_rights_are_suspended_until_it_is_brought_in() -> None:
    """A4, in life: two contexts whose floors do not fit together take turns; one waits with the reason."""
    pool = PagePool(3)
    admitted(pool, 0, 9)
    assert pool.admit(1, 9, 1) is not None
    pool.park(0)
    assert pool.limit(account(pool, 0)) == 0
    assert pool.admit(1, 9, 2) is None
    assert "2 of 3 are promised" in str(pool.bring_in(0, 3))
    pool.park(1)
    assert pool.bring_in(0, 4) is None
    assert len(account(pool, 0).pages) == FLOOR_PAGES
    pool.check()


def test_a_page_that_moves_cools_until_its_last_step_has_landed() -> None:
    """L8, in life: the step under way still reads what was reclaimed; nobody writes there before it has landed."""
    pool = PagePool(4)
    one = admitted(pool, 0, 4, 3)
    one.last_active = 5
    pool.leave(0, 6)
    two = admitted(pool, 1, 4, 6)
    assert not pool.cool(two.pages.values())
    pool.landed(4)
    assert not pool.cool(two.pages.values())
    pool.landed(5)
    assert pool.cool(two.pages.values())


def test_the_books_find_what_does_not_add_up() -> None:
    """Controls: a page twice, a page lost, a floor broken, a sink lost, a run out of order."""
    for break_it in (
        lambda pool, one: one.pages.update({3: 0}),
        lambda pool, one: pool._free.pop(),
        lambda pool, one: pool._free.add(one.pages.pop(4)) or pool._free.update(one.pages.pop(i) for i in (1, 2, 3)),
        lambda pool, one: pool._free.add(one.pages.pop(0)),
        lambda pool, one: one.pages.update({1: 2, 2: 1}),
    ):
        pool = PagePool(8)
        one = admitted(pool, 0, 5)
        pool.check()
        break_it(pool, one)
        with pytest.raises(PoolBooksError):
            pool.check()
    with pytest.raises(InvariantError, match="no account"):
        PagePool(4).park(3)


class Life:
    """A pool and a model of it, kept apart: who must hold what."""

    def __init__(self, capacity: int, target: int, burst: int) -> None:
        self.pool = PagePool(capacity, target, burst)
        self.rows: dict[int, int] = {}
        self.parked: set[int] = set()
        self.numbers = 0
        self.step = 0

    def check(self) -> None:
        """Books; pages conserved by the records alone; nobody beyond its limit once it took something itself."""
        pool = self.pool
        pool.check()
        owner: dict[int, int | None] = {}
        for record in pool.records:
            taken = record.reason not in RECLAIMING and record.reason not in (Reason.LEFT, Reason.MOVED)
            for page in record.pages:
                assert owner.get(page) == record.source
                owner[page] = record.to if taken else None
        held = {page: number for number in self.rows for page in account(pool, number).pages.values()}
        assert {page: number for page, number in owner.items() if number is not None} == held


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    capacity=st.integers(2, 24),
    target=st.sampled_from([0, 2, 3, 5]),
    burst=st.integers(0, 6),
)
def test_any_life_keeps_pages_floors_and_order(data: st.DataObject, capacity: int, target: int, burst: int) -> None:
    """Random admissions, growth, parking, returns and ends: pages are conserved, floors never break, every movement is
    on record from its true holder, reclaiming goes by class, and a right is always served."""
    life = Life(capacity, target, burst)
    pool = life.pool
    for step in range(data.draw(st.integers(1, 40))):
        life.step = step
        choice = data.draw(st.integers(0, 9))
        running = [number for number in life.rows if number not in life.parked]
        before = len(pool.records)
        if choice < 3:
            need = data.draw(st.integers(1, 12))
            if pool.admit(life.numbers, need, step) is None:
                life.rows[life.numbers] = 0
                life.numbers += 1
        elif choice < 7 and running:
            number = data.draw(st.sampled_from(running))
            one = account(pool, number)
            life.rows[number] = min(life.rows[number] + 1, one.need - 1)
            one.last_active = step
            had = len(one.pages)
            by_right = had < pool.target(one) and one.home is None
            got = pool.take(one, life.rows[number], step)
            assert len(one.pages) <= max(had, pool.limit(one))
            assert not by_right or got is not None
        elif choice == 7 and running:
            number = data.draw(st.sampled_from(running))
            pool.park(number)
            life.parked.add(number)
        elif choice == 8 and life.parked:
            number = data.draw(st.sampled_from(sorted(life.parked)))
            if pool.bring_in(number, step) is None:
                life.parked.remove(number)
        elif life.rows:
            number = data.draw(st.sampled_from(sorted(life.rows)))
            pool.leave(number, step)
            del life.rows[number]
            life.parked.discard(number)
        news = [record.reason for record in list(pool.records)[before:]]
        classes = [RECLAIMING.index(reason) for reason in news if reason in RECLAIMING]
        assert classes == sorted(classes) or choice < 3 or choice == 8
        life.check()
    for number in list(life.rows):
        pool.leave(number, life.step)
    assert pool.free == capacity
