"""rules: who may still touch a host page: no page changes its generation while a copy may read or write it (L5).

Knows no device and no lease: a set of contexts is held once for each lease that copies their rows, and dropped when
that lease retires. Whoever owns the pages (the host pool) asks ``held`` and calls ``recycle``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from common.errors import InvariantError


class LeaseError(InvariantError):
    """A staged layer was used against its rules."""


class LeaseBooksError(LeaseError):
    """Leases, slots or page holds do not add up."""


class StaleGenerationError(LeaseError):
    """A host page under a generation that has passed (L5)."""


class PageHeldError(LeaseError):
    """A host page recycled while a copy may still touch it (L5)."""


@dataclass(frozen=True, slots=True)
class HostPage:
    """A host page (or segment) under one generation: the owner of pinned bytes that a copy reads or writes."""

    index: int
    generation: int


@dataclass(frozen=True, eq=False)
class ContextSet:
    """The contexts of one step and the host owners of their rows, made once a step and shared by all its leases.

    ``owners`` are ``HostPage`` where the host pool recycles pages; any other hashable owner is compared, not counted.
    """

    ids: tuple[int, ...]
    owners: tuple[Hashable, ...]
    owner_set: frozenset[Hashable] = field(init=False)
    pages: tuple[HostPage, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise LeaseError("a context stands twice in one step")
        if len(set(self.owners)) != len(self.owners):
            raise LeaseError("two contexts of one step write to one host owner")
        object.__setattr__(self, "owner_set", frozenset(self.owners))
        object.__setattr__(self, "pages", tuple(owner for owner in self.owners if isinstance(owner, HostPage)))


class PageLeases:
    """Who may still touch a host page. One hold covers all pages of a ``ContextSet``; the first and the last of a set
    cost one look at each page, those between nothing."""

    def __init__(self, pages: int) -> None:
        self._generations = [0] * pages
        self._holds = [0] * pages
        self._sets: dict[int, tuple[ContextSet, int]] = {}

    def current(self, index: int) -> HostPage:
        """The page under its present generation."""
        return HostPage(index, self._generations[index])

    def hold(self, contexts: ContextSet) -> None:
        """A copy will touch these pages; a page of a passed generation is refused before anything is counted."""
        known, count = self._sets.get(id(contexts), (contexts, 0))
        if count == 0:
            for page in contexts.pages:
                if self._generations[page.index] != page.generation:
                    now = self._generations[page.index]
                    raise StaleGenerationError(f"host page {page.index} is at {now}, not at {page.generation}")
            for page in contexts.pages:
                self._holds[page.index] += 1
        self._sets[id(contexts)] = (known, count + 1)

    def drop(self, contexts: ContextSet) -> None:
        """One copy is over."""
        known, count = self._sets.get(id(contexts), (contexts, 0))
        if count == 0:
            raise LeaseBooksError("host pages given back more often than they were held")
        if count > 1:
            self._sets[id(contexts)] = (known, count - 1)
            return
        del self._sets[id(contexts)]
        for page in contexts.pages:
            self._holds[page.index] -= 1

    def held(self, index: int) -> bool:
        """Whether a copy may still touch the page: ask before recycling; it becomes False as leases retire."""
        return self._holds[index] > 0

    def recycle(self, page: HostPage) -> HostPage:
        """The page goes to another owner: its generation passes."""
        if self._generations[page.index] != page.generation:
            raise StaleGenerationError(f"host page {page.index} was recycled before")
        if self._holds[page.index]:
            raise PageHeldError(f"host page {page.index} is recycled while {self._holds[page.index]} steps touch it")
        self._generations[page.index] += 1
        return self.current(page.index)

    @property
    def holds(self) -> int:
        """Sets of contexts with copies under way."""
        return len(self._sets)

    def check(self) -> None:
        """Raise unless each page is held by exactly the live sets it is in."""
        wanted = [0] * len(self._holds)
        for contexts, count in self._sets.values():
            if count < 1:
                raise LeaseBooksError("a set of contexts is booked with no hold")
            for page in contexts.pages:
                wanted[page.index] += 1
                if self._generations[page.index] != page.generation:
                    raise LeaseBooksError(f"host page {page.index} changed its generation while held")
        if wanted != self._holds:
            raise LeaseBooksError("page holds do not add up")
