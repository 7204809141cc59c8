"""rules: the life of a staged layer as one table (L1, L2, L3, L4, L8).

A stage is a transaction keyed by (step, layer, slot). A step whose histories are all in place is one transaction over
all its layers, without a slot. ``TRANSITIONS`` is the whole machine; ``LeaseBook`` is its one door and keeps the books:
what began is live or retired. Knows no device: events are handles that it compares, whether
they are over is told to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from worker.engine.event_pool import Event
from worker.engine.page_leases import ContextSet, HostPage, LeaseBooksError, LeaseError, PageLeases

__all__ = [
    "TRANSITIONS",
    "ContextSet",
    "CopyTicket",
    "ForeignOwnerError",
    "HostPage",
    "LayerBusyError",
    "Lease",
    "LeaseBook",
    "LeaseBooksError",
    "LeaseError",
    "MissingReaderError",
    "PageLeases",
    "Receipt",
    "SlotBusyError",
    "StaleTailError",
    "State",
    "SubstitutedEventError",
    "UnfinishedError",
    "UnknownLeaseError",
    "Verb",
    "WrongStateError",
]


class SlotBusyError(LeaseError):
    """A stage begins in a slot whose previous lease is neither sealed nor retired (L1)."""


class LayerBusyError(LeaseError):
    """A layer's history is copied before an earlier step has put its changed rows of that layer on their way."""


class MissingReaderError(LeaseError):
    """A stage begins without listing a prior reader of its slot among its own (L1)."""


class WrongStateError(LeaseError):
    """The lease is not in a state in which this may happen."""


class ForeignOwnerError(LeaseError):
    """Host memory that the lease did not begin with (L2)."""


class SubstitutedEventError(LeaseError):
    """An attention event other than the one this lease recorded (L3)."""


class StaleTailError(LeaseError):
    """A seal with a tail that is not the one written back (L3)."""


class UnfinishedError(LeaseError):
    """Retired although a consumer event or a copy ticket is not over (L4)."""


class UnknownLeaseError(LeaseError):
    """A lease that this book did not begin, or no longer has."""


class State(StrEnum):
    """Where a lease stands."""

    OPEN = "open"
    ATTENDED = "attended"
    WRITTEN = "written"
    SEALED = "sealed"
    RETIRED = "retired"
    QUARANTINED = "quarantined"


class Verb(StrEnum):
    """What may happen to it."""

    ATTEND = "attend"
    WRITE = "write"
    SEAL = "seal"
    RETIRE = "retire"
    QUARANTINE = "quarantine"
    RELEASE = "release"
    """A drain proved that all work of a quarantined lease is over."""


TRANSITIONS: dict[tuple[State, Verb], State] = {
    (State.OPEN, Verb.ATTEND): State.ATTENDED,
    (State.ATTENDED, Verb.WRITE): State.WRITTEN,
    (State.WRITTEN, Verb.SEAL): State.SEALED,
    (State.SEALED, Verb.RETIRE): State.RETIRED,
    (State.OPEN, Verb.QUARANTINE): State.QUARANTINED,
    (State.ATTENDED, Verb.QUARANTINE): State.QUARANTINED,
    (State.WRITTEN, Verb.QUARANTINE): State.QUARANTINED,
    (State.SEALED, Verb.QUARANTINE): State.QUARANTINED,
    (State.QUARANTINED, Verb.RELEASE): State.RETIRED,
}
NO_SLOT = -1
SETTLED = (State.SEALED, State.RETIRED)


@dataclass(slots=True, eq=False)
class CopyTicket:
    """One queue's share of a lease: the memory it touches stays alive, its host pages keep their generation, until its
    event is over (L5). ``keep`` are the tensors themselves, ``nbytes`` what crosses the link."""

    event: Event
    keep: tuple[object, ...]
    nbytes: int


@dataclass(slots=True, eq=False)
class Lease:
    """The hold on one staged layer. Only a ``LeaseBook`` changes it."""

    step: int
    layers: tuple[int, ...]
    """The one that is staged, or all."""
    slot: int
    """``NO_SLOT`` where nothing is staged."""
    contexts: ContextSet
    prior_readers: tuple[Event, ...]
    state: State = State.OPEN
    attention: Event | None = None
    tail: Hashable = None
    tickets: list[CopyTicket] = field(default_factory=list)
    written: Event | None = None
    holds_pages: bool = False
    awaited_s: float | None = None
    """When retirement first found it unfinished: its deadline counts from there, so that idle time costs nothing."""

    @property
    def layer(self) -> int:
        """The staged layer; the first of all."""
        return self.layers[0]

    @property
    def key(self) -> tuple[int, int, int]:
        """(step, layer, slot)."""
        return self.step, self.layer, self.slot

    def __str__(self) -> str:
        where = "all layers" if self.slot == NO_SLOT else f"layer {self.layer}, slot {self.slot}"
        return f"lease of step {self.step}, {where} ({self.state.value})"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a staged layer is over: what it moved, and whose results may be published (L4, L8)."""

    step: int
    layer: int
    slot: int
    nbytes: int
    published: tuple[int, ...]
    """Ids of the contexts that nobody cancelled meanwhile."""


class LeaseBook:
    """All leases of one transport. ``begin`` to ``retire`` in the order of ``TRANSITIONS``; one door, no device."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise LeaseBooksError("staging needs a slot")
        self._last: list[Lease | None] = [None] * slots
        self._of_layer: dict[int, Lease] = {}
        self._sealed: deque[Lease] = deque()
        self._live: dict[int, Lease] = {}
        self.began = 0
        self.retired = 0

    @property
    def slots(self) -> int:
        """How many staging slots there are."""
        return len(self._last)

    @property
    def live(self) -> Sequence[Lease]:
        """Leases not retired, oldest first."""
        return list(self._live.values())

    @property
    def sealed(self) -> Sequence[Lease]:
        """Leases that wait for retirement, oldest first."""
        return self._sealed

    def prior_readers(self, slot: int) -> tuple[Event, ...]:
        """The events that the slot's next stage must list and wait for: none once the last lease there is retired."""
        last = self._last_of(slot)
        if last is None or last.state is State.RETIRED or last.attention is None or last.written is None:
            return ()
        return last.attention, last.written

    def may_begin(self, slot: int, layer: int) -> bool:
        """Whether a stage of ``layer`` in ``slot`` would find both settled."""
        last, earlier = self._last_of(slot), self._of_layer.get(layer)
        return (last is None or last.state in SETTLED) and (earlier is None or earlier.state in SETTLED)

    def begin(self, step: int, layer: int, slot: int, contexts: ContextSet, readers: Iterable[Event]) -> Lease:
        """A new lease (L1). ``readers``: the events its copies wait for; those of ``prior_readers`` must be there."""
        last = self._last_of(slot)
        if last is not None and last.state not in SETTLED:
            raise SlotBusyError(f"step {step}, layer {layer} cannot begin in slot {slot}: it has the {last}")
        self._settled(step, (layer,))
        listed = tuple(readers)
        for event in self.prior_readers(slot):
            if event not in listed:
                raise MissingReaderError(f"step {step}, layer {layer} does not wait for {event} of the {last}")
        self._last[slot] = lease = self._began(Lease(step, (layer,), slot, contexts, listed))
        return lease

    def begin_whole(self, step: int, layers: Sequence[int], contexts: ContextSet) -> Lease:
        """One lease for all layers of a step that needs no slot: every history is in place."""
        self._settled(step, layers)
        return self._began(Lease(step, tuple(layers), NO_SLOT, contexts, ()))

    def ticket(self, lease: Lease, ticket: CopyTicket) -> None:
        """A copy of this lease is under way."""
        self._own(lease)
        lease.tickets.append(ticket)

    def owner(self, lease: Lease, owners: Iterable[Hashable]) -> None:
        """Raise unless the lease began with each of these host owners (L2)."""
        for owner in owners:
            if owner not in lease.contexts.owner_set:
                raise ForeignOwnerError(f"{lease} began without host owner {owner!r}")

    def attend(self, lease: Lease, attention: Event) -> None:
        """Attention is on its queue; ``attention`` is over when it has consumed the slot."""
        self._move(lease, Verb.ATTEND)
        lease.attention = attention

    def write(self, lease: Lease, contexts: ContextSet, ticket: CopyTicket, tail: Hashable) -> None:
        """The changed rows are on their way to the host rows of ``contexts``; ``tail`` names how far they now reach."""
        if contexts is not lease.contexts and contexts.owner_set != lease.contexts.owner_set:
            raise ForeignOwnerError(f"{lease} writes back to host owners that it did not begin with")
        self._move(lease, Verb.WRITE)
        lease.tickets.append(ticket)
        lease.written = ticket.event
        lease.tail = tail

    def seal(self, lease: Lease, tail: Hashable, attention: Event) -> None:
        """Nothing more will be put on a queue for this lease (L3)."""
        if (lease.state, Verb.SEAL) not in TRANSITIONS:
            raise WrongStateError(f"cannot seal the {lease}")
        if attention != lease.attention:
            raise SubstitutedEventError(f"{lease} is sealed with {attention}, but recorded {lease.attention}")
        if tail != lease.tail:
            raise StaleTailError(f"{lease} is sealed with tail {tail!r}, but wrote back {lease.tail!r}")
        self._move(lease, Verb.SEAL)
        self._sealed.append(lease)

    def events(self, lease: Lease) -> tuple[Event, ...]:
        """Every event that retirement waits for: the consumer event and each ticket's (L4)."""
        own = () if lease.attention is None else (lease.attention,)
        return own + tuple(ticket.event for ticket in lease.tickets)

    def retire(self, lease: Lease, over: Iterable[Event], revoked: frozenset[int] = frozenset()) -> Receipt:
        """Remove the lease, its tickets and its hold, for a receipt; ``over`` are the events seen done."""
        events = self.events(lease)
        if events != over and (missing := set(events) - set(over)):
            raise UnfinishedError(f"{lease} cannot retire before {', '.join(map(str, missing))}")
        self._move(lease, Verb.RETIRE)
        if self._sealed and self._sealed[0] is lease:
            self._sealed.popleft()
        elif lease in self._sealed:
            self._sealed.remove(lease)
        return self._receipt(lease, revoked)

    def release(self, lease: Lease) -> Receipt:
        """A drain proved that all work of a quarantined lease is over (L6): it ends like a retired one, unpublished."""
        self._move(lease, Verb.RELEASE)
        return self._receipt(lease, frozenset(lease.contexts.ids))

    def quarantine(self) -> Sequence[Lease]:
        """All live leases are retained until a drain proves completion (L6)."""
        for lease in self._live.values():
            if lease.state is not State.QUARANTINED:
                self._move(lease, Verb.QUARANTINE)
        self._sealed.clear()
        return self.live

    def check(self) -> None:
        """Raise unless began = live + retired, slots know their last lease, and only sealed leases await retirement."""
        if self.began != self.retired + len(self._live):
            raise LeaseBooksError(f"{self.began} leases began, {self.retired} retired, {len(self._live)} are live")
        for slot, last in enumerate(self._last):
            if last is not None and (last.state is State.RETIRED) == (id(last) in self._live):
                raise LeaseBooksError(f"slot {slot}: the {last} is booked wrongly")
        for lease in self._live.values():
            if lease.state is State.RETIRED:
                raise LeaseBooksError(f"the {lease} is booked as live")
            if lease.slot == NO_SLOT or lease.state in (*SETTLED, State.QUARANTINED):
                continue
            if self._last[lease.slot] is not lease:
                raise LeaseBooksError(f"the {lease} lost its slot before it was sealed")
        if any(lease.state is not State.SEALED for lease in self._sealed):
            raise LeaseBooksError("a lease that is not sealed awaits retirement")

    def _settled(self, step: int, layers: Iterable[int]) -> None:
        for layer in layers:
            earlier = self._of_layer.get(layer)
            if earlier is not None and earlier.state not in SETTLED:
                raise LayerBusyError(
                    f"step {step}, layer {layer} cannot begin: the {earlier} has not written its rows back"
                )

    def _began(self, lease: Lease) -> Lease:
        for layer in lease.layers:
            self._of_layer[layer] = lease
        self._live[id(lease)] = lease
        self.began += 1
        return lease

    def _receipt(self, lease: Lease, revoked: frozenset[int]) -> Receipt:
        ids = lease.contexts.ids
        published = ids if not revoked or revoked.isdisjoint(ids) else tuple(one for one in ids if one not in revoked)
        nbytes = sum(ticket.nbytes for ticket in lease.tickets)
        del self._live[id(lease)]
        lease.tickets = []
        self.retired += 1
        return Receipt(lease.step, lease.layer, lease.slot, nbytes, published)

    def _last_of(self, slot: int) -> Lease | None:
        if not 0 <= slot < len(self._last):
            raise UnknownLeaseError(f"there is no slot {slot}: {len(self._last)} were made")
        return self._last[slot]

    def _own(self, lease: Lease) -> None:
        if id(lease) not in self._live:
            raise UnknownLeaseError(f"{lease} is not in this book")

    def _move(self, lease: Lease, verb: Verb) -> None:
        self._own(lease)
        after = TRANSITIONS.get((lease.state, verb))
        if after is None:
            raise WrongStateError(f"cannot {verb.value} the {lease}")
        lease.state = after
