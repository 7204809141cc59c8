"""rules: which pages of one chunk are free, as runs: neighbours are found without looking at each page."""

from __future__ import annotations

from bisect import bisect_right

from common.errors import InvariantError


class FreeRuns:
    """Pages 0 to ``pages``, all free at first. One thread."""

    def __init__(self, pages: int) -> None:
        self._firsts = [0] if pages else []
        self._ends = [pages] if pages else []

    def __len__(self) -> int:
        """Pages that are free."""
        return sum(self._ends) - sum(self._firsts)

    def __contains__(self, page: int) -> bool:
        at = bisect_right(self._firsts, page) - 1
        return at >= 0 and page < self._ends[at]

    def longest(self) -> tuple[int, int]:
        """First page and length of the longest run, the first of several; (0, 0) when nothing is free."""
        lengths = [end - first for first, end in zip(self._firsts, self._ends, strict=True)]
        if not lengths:
            return 0, 0
        at = lengths.index(max(lengths))
        return self._firsts[at], lengths[at]

    def take(self, page: int) -> None:
        """A free page is taken."""
        at = bisect_right(self._firsts, page) - 1
        if page not in self:
            raise InvariantError(f"page {page} is taken and not free")
        first, end = self._firsts.pop(at), self._ends.pop(at)
        if page + 1 < end:
            self._firsts.insert(at, page + 1)
            self._ends.insert(at, end)
        if first < page:
            self._firsts.insert(at, first)
            self._ends.insert(at, page)

    def give(self, page: int) -> None:
        """A page becomes free."""
        if page in self:
            raise InvariantError(f"page {page} is given back and free already")
        at = bisect_right(self._firsts, page)
        self._firsts.insert(at, page)
        self._ends.insert(at, page + 1)
        if at + 1 < len(self._firsts) and self._firsts[at + 1] == page + 1:
            del self._firsts[at + 1], self._ends[at]
        if at and self._ends[at - 1] == page:
            del self._firsts[at], self._ends[at - 1]
