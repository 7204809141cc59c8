"""rules: who has which segment of the host pool: taken, given back, under a generation each (L5), with books.

A segment index stands for one context's history in every dense layer. The first ``count`` segments are for contexts;
``longs`` behind them are for shared histories and, with ``--own-tokens``, for what needs a whole history alone (H5).
Whether a copy may still touch it is asked of the page leases before it goes to another owner. Knows no memory:
``host_pool`` has the bytes.
"""

from __future__ import annotations

from common.errors import InvariantError
from worker.engine.page_leases import HostPage, PageLeases


class SegmentBooksError(InvariantError):
    """free + held is not the number of segments, or a segment is counted twice."""


class SegmentBook:
    """``leases`` counts the copies under way over the same indices. One thread."""

    def __init__(self, leases: PageLeases, count: int, longs: int = 0) -> None:
        self.count, self.longs = count, longs
        self._leases = leases
        self._free = list(range(count - 1, -1, -1))
        self._free_longs = list(range(count + longs - 1, count - 1, -1))
        self._held: set[HostPage] = set()

    @property
    def free_longs(self) -> int:
        """Segments behind those for contexts that may be taken."""
        return len(self._free_longs)

    @property
    def held(self) -> int:
        """Segments that contexts and shared histories own."""
        return len(self._held)

    def take(self, *, long: bool = False) -> HostPage | None:
        """A segment nobody owns, under its present generation; None when all of its kind are owned."""
        free = self._free_longs if long else self._free
        if not free:
            return None
        page = self._leases.current(free.pop())
        self._held.add(page)
        return page

    def may_recycle(self, page: HostPage) -> bool:
        """Whether no copy may still touch it."""
        return not self._leases.held(page.index)

    def give_back(self, page: HostPage) -> None:
        """Its generation passes and the next owner may have it; refused while a copy may still touch it."""
        if page not in self._held:
            raise SegmentBooksError(f"{page} is given back by someone who does not own it")
        self._leases.recycle(page)
        self._held.remove(page)
        free = self._free if page.index < self.count else self._free_longs
        free.append(page.index)
        free.sort(reverse=True)

    def check(self) -> None:
        """Raise unless each segment is free once or held once."""
        listed = [*self._free, *self._free_longs]
        free, held = set(listed), {page.index for page in self._held}
        if len(free) != len(listed) or len(held) != len(self._held) or free & held:
            raise SegmentBooksError("a segment is counted twice")
        if len(free) + len(held) != self.count + self.longs:
            raise SegmentBooksError(f"{len(free)} free + {len(held)} held is not {self.count + self.longs} segments")
        if any(index >= self.count for index in self._free) or any(index < self.count for index in self._free_longs):
            raise SegmentBooksError("a segment is free among those of the other kind")
        stale = [page for page in self._held if self._leases.current(page.index) != page]
        if stale:
            raise SegmentBooksError(f"{stale[0]} is owned under a generation that has passed")
