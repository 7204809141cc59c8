"""The event pool (Q4): what a handle stands for, who may use it, and books that agree after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import InvariantError
from worker.engine.event_pool import (
    DoubleReleaseError,
    Event,
    EventBooksError,
    EventBoundsError,
    EventPool,
    EventPoolError,
    EventsExhaustedError,
    EventsFrozenError,
    ForeignThreadError,
    StaleEventError,
)


class Raw:
    """Stands for a device event: only its identity counts."""


class Threads:
    """Says which thread is calling."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def pool(threads: Threads) -> Iterator[EventPool[Raw]]:
    pool = EventPool(4, Raw, threads)
    yield pool
    pool.check()


def test_event_pool_makes_all_raw_events_at_start() -> None:
    """After warm-up nothing is allocated: the factory runs capacity times, once, before the first step."""
    made: list[Raw] = []

    def make() -> Raw:
        made.append(Raw())
        return made[-1]

    pool = EventPool(3, make, lambda: 1)
    for _ in range(10):
        pool.release(pool.take())
    assert len(made) == 3


@pytest.mark.parametrize("capacity", [0, -1])
def test_event_pool_without_room_is_refused(capacity: int) -> None:
    """A miscomputed capacity is found at start, not at the first step."""
    with pytest.raises(EventBoundsError, match="cannot serve"):
        EventPool(capacity, Raw, lambda: 1)


def test_event_pool_refuses_a_factory_that_shares() -> None:
    """Two handles over one raw event would answer for each other's work."""
    one = Raw()
    with pytest.raises(EventBooksError, match="twice"):
        EventPool(2, lambda: one, lambda: 1)


def test_event_pool_starts_free(pool: EventPool[Raw]) -> None:
    """At start all is free and nothing held."""
    assert (pool.free, pool.held, pool.capacity) == (4, 0, 4)


def test_event_pool_books_follow_taking_and_releasing(pool: EventPool[Raw]) -> None:
    """free + held = capacity at each moment of a step."""
    events = [pool.take() for _ in range(3)]
    assert (pool.free, pool.held) == (1, 3)
    for event in events:
        pool.release(event)
    assert (pool.free, pool.held) == (4, 0)


def test_event_pool_never_hands_out_a_held_event(pool: EventPool[Raw]) -> None:
    """Two leases in flight have two different raw events."""
    raws = [pool.raw(pool.take()) for _ in range(4)]
    assert len({id(raw) for raw in raws}) == 4


def test_event_pool_gives_a_new_generation_each_time(pool: EventPool[Raw]) -> None:
    """The raw event is reused, the handle never: an old handle cannot equal a new one."""
    seen = set()
    for _ in range(50):
        event = pool.take()
        assert event not in seen
        seen.add(event)
        pool.release(event)


def test_event_pool_reuses_raw_events(pool: EventPool[Raw]) -> None:
    """A pool of 4 serves any number of recordings one after another."""
    raws = set()
    for _ in range(20):
        event = pool.take()
        raws.add(id(pool.raw(event)))
        pool.release(event)
    assert len(raws) <= 4


def test_event_pool_exhaustion_is_named(pool: EventPool[Raw]) -> None:
    """Leases that are never retired end in an error that says so, not in a wait."""
    for _ in range(4):
        pool.take()
    with pytest.raises(EventsExhaustedError, match="all 4 events are held"):
        pool.take()


def test_event_pool_serves_again_after_exhaustion(pool: EventPool[Raw]) -> None:
    """One retirement is enough for the next recording."""
    events = [pool.take() for _ in range(4)]
    with pytest.raises(EventsExhaustedError):
        pool.take()
    pool.release(events[2])
    assert pool.take().index == events[2].index


def test_event_pool_stale_handle_has_no_raw_event(pool: EventPool[Raw]) -> None:
    """A lease that polls after its retirement would read another lease's event: refused."""
    event = pool.take()
    pool.release(event)
    with pytest.raises(StaleEventError, match="given back"):
        pool.raw(event)


def test_event_pool_recycled_handle_has_no_raw_event(pool: EventPool[Raw]) -> None:
    """The same when the raw event already stands for other work."""
    old = pool.take()
    pool.release(old)
    new = pool.take()
    assert new.index == old.index
    with pytest.raises(StaleEventError):
        pool.raw(old)
    assert pool.raw(new) is not None


def test_event_pool_control_without_generations_reads_foreign_work(pool: EventPool[Raw]) -> None:
    """The control: by index alone the old handle and the new one reach the same raw event."""
    old = pool.take()
    pool.release(old)
    new = pool.take()
    assert pool._raws[old.index] is pool.raw(new)


def test_event_pool_double_release_is_named(pool: EventPool[Raw]) -> None:
    """An abort that retires a lease twice is found at the second time (LMCache 3381)."""
    event = pool.take()
    pool.release(event)
    with pytest.raises(DoubleReleaseError, match="before"):
        pool.release(event)
    assert pool.free == 4


def test_event_pool_release_of_a_recycled_handle_is_stale(pool: EventPool[Raw]) -> None:
    """A late second release must not free the event from under its new holder."""
    old = pool.take()
    pool.release(old)
    new = pool.take()
    with pytest.raises(StaleEventError) as caught:
        pool.release(old)
    assert not isinstance(caught.value, DoubleReleaseError)
    assert pool.is_held(new)


@pytest.mark.parametrize("index", [-1, 4, 10_000])
def test_event_pool_index_out_of_bounds_is_refused(pool: EventPool[Raw], index: int) -> None:
    """A handle of another pool, or of corrupt memory; -1 must not mean the last event."""
    for use in (pool.raw, pool.release, pool.is_held):
        with pytest.raises(EventBoundsError, match="events 0 to 3"):
            use(Event(index, 1))


@pytest.mark.parametrize("generation", [0, 2, -2])
def test_event_pool_even_generation_is_refused(pool: EventPool[Raw], generation: int) -> None:
    """Even generations mean free: no handle ever had one."""
    with pytest.raises(EventBoundsError, match="never handed out"):
        pool.raw(Event(0, generation))


def test_event_pool_future_generation_is_refused(pool: EventPool[Raw]) -> None:
    """A forged handle cannot wait for its time to come."""
    event = pool.take()
    with pytest.raises(EventBoundsError, match="never handed out"):
        pool.raw(Event(event.index, event.generation + 2))


def test_event_pool_taking_from_a_foreign_thread_is_refused(pool: EventPool[Raw], threads: Threads) -> None:
    """The session thread must not record events on the engine's queues."""
    threads.now = 2
    with pytest.raises(ForeignThreadError, match="thread 2"):
        pool.take()


@pytest.mark.parametrize("use", ["raw", "release", "is_held"])
def test_event_pool_using_from_a_foreign_thread_is_refused(pool: EventPool[Raw], threads: Threads, use: str) -> None:
    """Nor poll or give back the engine's."""
    event = pool.take()
    threads.now = 2
    with pytest.raises(ForeignThreadError):
        getattr(pool, use)(event)
    threads.now = 1
    assert pool.is_held(event)


def test_event_pool_is_adopted_by_the_engine_thread(pool: EventPool[Raw], threads: Threads) -> None:
    """Made on the main thread at start, used by the engine's thread from then on."""
    threads.now = 2
    pool.adopt()
    event = pool.take()
    threads.now = 1
    with pytest.raises(ForeignThreadError):
        pool.release(event)
    threads.now = 2
    pool.release(event)


def test_event_pool_with_events_held_is_not_adopted(pool: EventPool[Raw], threads: Threads) -> None:
    """No thread takes over another's recordings."""
    pool.take()
    threads.now = 2
    with pytest.raises(ForeignThreadError, match="while 1 events are held"):
        pool.adopt()


def test_event_pool_is_held_tells_live_from_stale(pool: EventPool[Raw]) -> None:
    """Asking is allowed with a stale handle, unlike using it."""
    event = pool.take()
    assert pool.is_held(event)
    pool.release(event)
    assert not pool.is_held(event)


def test_event_pool_remembers_its_peak(pool: EventPool[Raw]) -> None:
    """The metric that says whether the capacity is ample."""
    events = [pool.take() for _ in range(3)]
    for event in events:
        pool.release(event)
    pool.take()
    assert pool.held_max == 3


def test_event_pool_frozen_hands_out_nothing(pool: EventPool[Raw]) -> None:
    """After an unproven fence nothing new is submitted (L7)."""
    pool.freeze("no proof")
    with pytest.raises(EventsFrozenError, match="no proof"):
        pool.take()


def test_event_pool_frozen_recycles_nothing(pool: EventPool[Raw]) -> None:
    """After an unproven fence a held event stays held (L7)."""
    event = pool.take()
    pool.freeze("no proof")
    with pytest.raises(EventsFrozenError, match="not recycled"):
        pool.release(event)
    assert pool.is_held(event)


def test_event_pool_first_reason_to_freeze_stays(pool: EventPool[Raw]) -> None:
    """What went wrong first is what the operator reads."""
    pool.freeze("first")
    pool.freeze("second")
    assert pool.frozen == "first"


def test_event_pool_books_find_a_lost_event(threads: Threads) -> None:
    """An event neither free nor held is found by the books."""
    pool = EventPool(2, Raw, threads)
    pool._free.pop()
    with pytest.raises(EventBooksError, match="is not 2"):
        pool.check()


def test_event_pool_books_find_an_event_that_is_free_twice(threads: Threads) -> None:
    """The damage of an undetected double release: two holders later."""
    pool = EventPool(2, Raw, threads)
    pool._free.append(0)
    with pytest.raises(EventBooksError, match="free twice"):
        pool.check()


def test_event_pool_books_find_a_foreign_index(threads: Threads) -> None:
    """A free list that names an event which does not exist."""
    pool = EventPool(2, Raw, threads)
    pool._free[0] = 7
    with pytest.raises(EventBooksError, match="does not exist"):
        pool.check()


def test_event_pool_errors_are_bugs_of_ours() -> None:
    """Each stops the process rather than going on with wrong books."""
    assert issubclass(EventPoolError, InvariantError)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of uses, against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = EventPool(3, Raw, lambda: 1)
        self.held: list[Event] = []
        self.gone: list[Event] = []

    @rule()
    def take(self) -> None:
        if len(self.held) == 3:
            with pytest.raises(EventsExhaustedError):
                self.pool.take()
            return
        event = self.pool.take()
        assert event not in self.held
        assert event not in self.gone
        self.held.append(event)

    @rule(pick=st.integers(0, 2))
    def release(self, pick: int) -> None:
        if pick < len(self.held):
            event = self.held.pop(pick)
            self.pool.release(event)
            self.gone.append(event)

    @rule(pick=st.integers(0, 50))
    def use_a_stale_one(self, pick: int) -> None:
        if self.gone:
            event = self.gone[pick % len(self.gone)]
            with pytest.raises(StaleEventError):
                self.pool.raw(event)
            with pytest.raises(StaleEventError):
                self.pool.release(event)

    @invariant()
    def books(self) -> None:
        self.pool.check()
        assert self.pool.held == len(self.held)
        assert len({id(self.pool.raw(event)) for event in self.held}) == len(self.held)


TestEventPoolMachine = PoolMachine.TestCase
TestEventPoolMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
