"""The life of a staged layer (L1, L2, L3, L4): every pair of state and verb, and each mistake by its own name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.engine.event_pool import Event
from worker.engine.leases import (
    TRANSITIONS,
    ContextSet,
    CopyTicket,
    ForeignOwnerError,
    HostPage,
    LayerBusyError,
    Lease,
    LeaseBook,
    LeaseBooksError,
    MissingReaderError,
    SlotBusyError,
    StaleTailError,
    State,
    SubstitutedEventError,
    UnfinishedError,
    UnknownLeaseError,
    Verb,
    WrongStateError,
)

CONTEXTS = ContextSet((1, 2), (HostPage(0, 0), HostPage(1, 0)))
TAIL = ((1, 5), (2, 9))


def event(number: int) -> Event:
    return Event(number, 1)


class Stage:
    """A book and one lease, moved by verbs with the right arguments."""

    def __init__(self) -> None:
        self.book = LeaseBook(2)
        self.lease = self.book.begin(0, 0, 0, CONTEXTS, ())
        self.book.ticket(self.lease, CopyTicket(event(1), (), 100))

    def do(self, verb: Verb) -> None:
        book, lease = self.book, self.lease
        actions: dict[Verb, Callable[[], object]] = {
            Verb.ATTEND: lambda: book.attend(lease, event(2)),
            Verb.WRITE: lambda: book.write(lease, CONTEXTS, CopyTicket(event(3), (), 10), TAIL),
            Verb.SEAL: lambda: book.seal(lease, lease.tail, lease.attention or event(2)),
            Verb.RETIRE: lambda: book.retire(lease, book.events(lease)),
            Verb.RELEASE: lambda: book.release(lease),
            Verb.QUARANTINE: book.quarantine,
        }
        actions[verb]()

    def reach(self, state: State) -> Stage:
        paths = {
            State.OPEN: [],
            State.ATTENDED: [Verb.ATTEND],
            State.WRITTEN: [Verb.ATTEND, Verb.WRITE],
            State.SEALED: [Verb.ATTEND, Verb.WRITE, Verb.SEAL],
            State.RETIRED: [Verb.ATTEND, Verb.WRITE, Verb.SEAL, Verb.RETIRE],
            State.QUARANTINED: [Verb.QUARANTINE],
        }
        for verb in paths[state]:
            self.do(verb)
        assert self.lease.state is state
        return self


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.book.check()


@pytest.mark.parametrize(("state", "verb"), list(product(State, Verb)), ids=lambda one: one.value)
def test_every_pair_of_state_and_verb_follows_the_table(stage: Stage, state: State, verb: Verb) -> None:
    """What the table has happens, what it has not is refused and changes nothing."""
    stage.reach(state)
    after = TRANSITIONS.get((state, verb))
    if verb is Verb.QUARANTINE and state in (State.RETIRED, State.QUARANTINED):
        stage.do(verb)  # quarantine takes the live ones and leaves these as they are
        assert stage.lease.state is state
    elif after is None:
        with pytest.raises((WrongStateError, UnknownLeaseError)):
            stage.do(verb)
        assert stage.lease.state is state
    else:
        stage.do(verb)
        assert stage.lease.state is after


def test_the_diagram_in_the_docs_is_the_table() -> None:
    """Who reads docs/devices.md reads what runs."""
    text = (Path(__file__).parents[4] / "docs" / "devices.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (\w+)$", text, re.MULTILINE))
    assert drawn == {(before.value, after.value, verb.value) for (before, verb), after in TRANSITIONS.items()}


@pytest.mark.parametrize("state", [State.OPEN, State.ATTENDED, State.WRITTEN, State.QUARANTINED])
def test_a_stage_does_not_begin_in_a_busy_slot(stage: Stage, state: State) -> None:
    """L1: the previous lease of the slot, of whatever step, must be sealed or retired."""
    stage.reach(state)
    with pytest.raises(SlotBusyError, match="slot 0"):
        stage.book.begin(0, 1, 0, CONTEXTS, ())


def test_a_stage_lists_the_readers_of_its_slot(stage: Stage) -> None:
    """L1: sealed but not retired, so attention and write-back may still read: the new stage waits for both."""
    stage.reach(State.SEALED)
    readers = stage.book.prior_readers(0)
    assert readers == (event(2), event(3))
    for left_out in readers:
        with pytest.raises(MissingReaderError, match=str(left_out)):
            stage.book.begin(0, 1, 0, CONTEXTS, [one for one in readers if one != left_out])
    lease = stage.book.begin(0, 1, 0, CONTEXTS, readers)
    assert lease.prior_readers == readers


def test_a_retired_lease_leaves_no_readers(stage: Stage) -> None:
    """Its events may already stand for other work: they must not be listed."""
    stage.reach(State.RETIRED)
    assert stage.book.prior_readers(0) == ()
    stage.book.begin(1, 0, 0, CONTEXTS, ())


@pytest.mark.parametrize("state", [State.OPEN, State.ATTENDED, State.WRITTEN])
def test_a_layer_is_not_staged_before_its_rows_are_on_their_way(stage: Stage, state: State) -> None:
    """A prefetch too far ahead would copy a history that lacks the newest row."""
    stage.reach(state)
    assert not stage.book.may_begin(1, 0)
    with pytest.raises(LayerBusyError, match="layer 0"):
        stage.book.begin(1, 0, 1, CONTEXTS, ())
    with pytest.raises(LayerBusyError, match="layer 0"):
        stage.book.begin_whole(1, (0, 1), CONTEXTS)


def test_a_foreign_host_owner_is_refused(stage: Stage) -> None:
    """L2: rows never go to host memory that the lease did not begin with."""
    stage.reach(State.ATTENDED)
    foreign = ContextSet((1, 2), (HostPage(0, 0), HostPage(1, 1)))
    with pytest.raises(ForeignOwnerError, match="did not begin with"):
        stage.book.write(stage.lease, foreign, CopyTicket(event(3), (), 0), TAIL)
    with pytest.raises(ForeignOwnerError, match="HostPage"):
        stage.book.owner(stage.lease, [HostPage(7, 0)])
    assert stage.lease.state is State.ATTENDED


def test_a_substituted_event_is_refused(stage: Stage) -> None:
    """L3: an event of another layer, or the same pooled event in another generation."""
    stage.reach(State.WRITTEN)
    for substitute in (event(9), Event(2, 3)):
        with pytest.raises(SubstitutedEventError):
            stage.book.seal(stage.lease, TAIL, substitute)
    stage.book.seal(stage.lease, TAIL, event(2))


def test_an_old_tail_is_refused(stage: Stage) -> None:
    """L3: sealed with the tail of the step before, the newest row would count as not there."""
    stage.reach(State.WRITTEN)
    with pytest.raises(StaleTailError):
        stage.book.seal(stage.lease, ((1, 4), (2, 8)), event(2))
    assert stage.lease.state is State.WRITTEN


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_lease_retires_only_with_every_event_over(stage: Stage, missing: int) -> None:
    """L4: the history copy's ticket, the consumer event and the write-back's ticket, each."""
    stage.reach(State.SEALED)
    over = [event(number) for number in (1, 2, 3) if number != missing]
    with pytest.raises(UnfinishedError, match=f"event {missing}.1"):
        stage.book.retire(stage.lease, over)
    assert stage.lease.tickets, "tickets stay until all is over"


def test_a_receipt_counts_and_publishes(stage: Stage) -> None:
    """L4, L8: bytes of both directions, and only contexts that nobody cancelled."""
    stage.reach(State.SEALED)
    receipt = stage.book.retire(stage.lease, stage.book.events(stage.lease), frozenset({2}))
    assert (receipt.nbytes, receipt.published) == (110, (1,))
    assert stage.lease.tickets == []


def test_quarantine_keeps_everything(stage: Stage) -> None:
    """L6: whatever its state, a live lease stays, with its tickets, and its slot takes no other."""
    stage.reach(State.SEALED)
    other = stage.book.begin(0, 1, 1, CONTEXTS, ())
    assert list(stage.book.quarantine()) == [stage.lease, other]
    assert {one.state for one in stage.book.live} == {State.QUARANTINED}
    assert stage.lease.tickets
    with pytest.raises(SlotBusyError):
        stage.book.begin(1, 0, 0, CONTEXTS, (event(2), event(3)))


def test_a_lease_of_another_book_is_unknown(stage: Stage) -> None:
    """Two transports in one process never share a lease."""
    foreign = LeaseBook(1).begin(0, 0, 0, CONTEXTS, ())
    for use in (
        lambda: stage.book.attend(foreign, event(2)),
        lambda: stage.book.ticket(foreign, CopyTicket(event(1), (), 0)),
    ):
        with pytest.raises(UnknownLeaseError):
            use()


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_was_not_made_is_refused(stage: Stage, slot: int) -> None:
    """-1 must not mean the last slot."""
    with pytest.raises(UnknownLeaseError, match="no slot"):
        stage.book.begin(0, 1, slot, CONTEXTS, ())


def test_the_books_find_a_lost_lease() -> None:
    """began = live + retired, at every step boundary."""
    stage = Stage()
    stage.book._live.clear()
    with pytest.raises(LeaseBooksError):
        stage.book.check()


class LeaseMachine(RuleBasedStateMachine):
    """Any sequence of stages over 2 slots and 3 layers; the books agree after each."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(2)
        self.leases: list[Lease] = []
        self.number = 0

    def fresh(self) -> Event:
        self.number += 1
        return event(self.number)

    @rule(slot=st.integers(0, 1), layer=st.integers(0, 2))
    def begin(self, slot: int, layer: int) -> None:
        readers = self.book.prior_readers(slot)
        if self.book.may_begin(slot, layer):
            self.leases.append(self.book.begin(0, layer, slot, CONTEXTS, readers))
            self.book.ticket(self.leases[-1], CopyTicket(self.fresh(), (), 1))
        else:
            with pytest.raises((SlotBusyError, LayerBusyError)):
                self.book.begin(0, layer, slot, CONTEXTS, readers)

    @rule(pick=st.integers(0, 5), verb=st.sampled_from([Verb.ATTEND, Verb.WRITE, Verb.SEAL, Verb.RETIRE]))
    def move(self, pick: int, verb: Verb) -> None:
        if not self.leases:
            return
        lease = self.leases[pick % len(self.leases)]
        legal = (lease.state, verb) in TRANSITIONS
        actions: dict[Verb, Callable[[], object]] = {
            Verb.ATTEND: lambda: self.book.attend(lease, self.fresh()),
            Verb.WRITE: lambda: self.book.write(lease, CONTEXTS, CopyTicket(self.fresh(), (), 1), TAIL),
            Verb.SEAL: lambda: self.book.seal(lease, TAIL, lease.attention or event(0)),
            Verb.RETIRE: lambda: self.book.retire(lease, self.book.events(lease)),
        }
        if not legal:
            with pytest.raises(WrongStateError):
                actions[verb]()
            return
        actions[verb]()
        if verb is Verb.RETIRE:
            self.leases.remove(lease)

    @invariant()
    def books(self) -> None:
        self.book.check()
        assert sorted(map(id, self.book.live)) == sorted(map(id, self.leases))


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
