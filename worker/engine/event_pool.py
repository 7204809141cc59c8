"""rules: device events from a pool with generations, bounds, an owner thread and books (Q4); L7's freeze.

Knows neither torch nor CUDA nor a clock: how a raw event is made and which thread is calling are arguments. An
``Event`` is one recording: it is taken, waited for and polled, and given back once; the raw event behind it is reused
under a new generation, so that a handle kept too long is found out instead of answering for somebody else's work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import InvariantError

Raw = TypeVar("Raw")


class EventPoolError(InvariantError):
    """The event pool was used against its rules."""


class EventBoundsError(EventPoolError):
    """An index or a generation that this pool never handed out."""


class StaleEventError(EventPoolError):
    """A handle that was given back: its raw event may already stand for other work."""


class DoubleReleaseError(StaleEventError):
    """The same handle was given back twice."""


class EventsExhaustedError(EventPoolError):
    """Every event is held: somebody keeps leases open or forgets to retire them."""


class ForeignThreadError(EventPoolError):
    """Called from a thread that does not own the pool."""


class EventsFrozenError(EventPoolError):
    """The pool was frozen by a quarantine: no event is handed out or recycled any more (L7)."""


class EventBooksError(EventPoolError):
    """free + held is not the capacity, or an event is counted twice."""


@dataclass(frozen=True, slots=True)
class Event:
    """One recording of one pooled event. ``generation`` is odd: the pool's own counter is odd while it is held."""

    index: int
    generation: int

    def __str__(self) -> str:
        return f"event {self.index}.{self.generation}"


class EventPool(Generic[Raw]):
    """A fixed number of raw events, all made at start: nothing is allocated after warm-up.

    ``capacity`` events are made by ``make``; ``current_thread`` names the calling thread (``threading.get_ident`` in a
    process). The constructing thread owns the pool until another adopts it. Generations count up by one at each taking
    and each giving back: odd is held, even is free.
    """

    def __init__(self, capacity: int, make: Callable[[], Raw], current_thread: Callable[[], int]) -> None:
        if capacity < 1:
            raise EventBoundsError(f"an event pool of {capacity} events cannot serve anything")
        self._raws = [make() for _ in range(capacity)]
        if len({id(raw) for raw in self._raws}) != capacity:
            raise EventBooksError("the factory returned one raw event twice; two recordings would share it")
        self._generations = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._current_thread = current_thread
        self._owner = current_thread()
        self._frozen: str | None = None
        self._held_max = 0

    @property
    def capacity(self) -> int:
        """How many events there are."""
        return len(self._raws)

    @property
    def free(self) -> int:
        """How many events may still be taken."""
        return len(self._free)

    @property
    def held(self) -> int:
        """How many events are out."""
        return len(self._raws) - len(self._free)

    @property
    def held_max(self) -> int:
        """The most events that were ever out together."""
        return self._held_max

    @property
    def frozen(self) -> str | None:
        """Why nothing is recycled any more, or None."""
        return self._frozen

    def adopt(self) -> None:
        """Make the calling thread the owner; refused while any event is held, since its holder is the old owner's."""
        if self.held:
            raise ForeignThreadError(
                f"thread {self._current_thread()} cannot adopt a pool while {self.held} events are held"
            )
        self._owner = self._current_thread()

    def take(self) -> Event:
        """An event nobody holds, under a generation never used before."""
        self._own()
        if self._frozen is not None:
            raise EventsFrozenError(f"no event is handed out: {self._frozen}")
        if not self._free:
            raise EventsExhaustedError(f"all {self.capacity} events are held; are finished leases retired?")
        index = self._free.pop()
        self._generations[index] += 1
        held = len(self._raws) - len(self._free)
        if held > self._held_max:
            self._held_max = held
        return Event(index, self._generations[index])

    def raw(self, event: Event) -> Raw:
        """The raw event behind a handle that is held now."""
        self._live(event)
        return self._raws[event.index]

    def release(self, event: Event) -> None:
        """Give an event back; its handle is stale from here on."""
        try:
            self._live(event)
        except StaleEventError as stale:
            if self._generations[event.index] == event.generation + 1:
                raise DoubleReleaseError(f"{event} was given back before and is free") from stale
            raise
        if self._frozen is not None:
            raise EventsFrozenError(f"{event} is not recycled: {self._frozen}")
        self._generations[event.index] += 1
        self._free.append(event.index)

    def is_held(self, event: Event) -> bool:
        """Whether the handle is still good; raises only for one this pool never handed out."""
        self._own()
        self._bounds(event)
        return self._generations[event.index] == event.generation

    def freeze(self, reason: str) -> None:
        """From here on nothing is taken or recycled; the first reason stays. Any thread may freeze."""
        if self._frozen is None:
            self._frozen = reason

    def check(self) -> None:
        """Raise unless the books agree: free + held = capacity, counters odd exactly where an event is held."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise EventBooksError("an event is free twice")
        if not free <= set(range(self.capacity)):
            raise EventBooksError("an event is free that does not exist")
        odd = {index for index, counter in enumerate(self._generations) if counter % 2}
        if odd & free or len(odd) + len(free) != self.capacity:
            raise EventBooksError(f"{len(free)} free + {len(odd)} held is not {self.capacity}")

    def _own(self) -> None:
        caller = self._current_thread()
        if caller != self._owner:
            raise ForeignThreadError(f"thread {caller} used the event pool of thread {self._owner}")

    def _bounds(self, event: Event) -> None:
        if not 0 <= event.index < len(self._raws):
            raise EventBoundsError(f"{event}: this pool has events 0 to {self.capacity - 1}")
        if event.generation % 2 == 0 or event.generation > self._generations[event.index]:
            raise EventBoundsError(f"{event}: this generation was never handed out")

    def _live(self, event: Event) -> None:
        if self._current_thread() != self._owner:
            self._own()
        index, generation = event.index, event.generation
        if 0 <= index < len(self._raws) and generation & 1 and self._generations[index] == generation:
            return  # the hot path: a handful of these a layer
        self._bounds(event)
        raise StaleEventError(f"{event} was given back; its raw event is at generation {self._generations[index]}")
