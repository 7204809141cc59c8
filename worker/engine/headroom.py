"""rules: H2: which whole pages of which history lie in which chunk of headroom, and how a chunk is given back.

Headroom is device memory outside the page pool, in chunks of ``chunk_pages`` pages. A context attended in a slot keeps
there what its own pages do not hold (H1): ``place`` says what of a history comes from headroom instead of the link, and
which pages are kept after attention. A running context's pages are nobody's to take; a parked one keeps its own until
somebody wants them, then it loses all (A4). ``revoke`` closes chunks, at step boundaries alone: pages are dropped in
A4's order until the others have room elsewhere; those move device to device beside the next step (``shifts``), or are
dropped where no step comes (``vacate``). A page or a chunk is *cooling* until the steps planned before have landed:
only then is it another's, or the device's (``cold``).
Knows rows, and no bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from sys import maxsize

from common.errors import InvariantError
from common.limits import DECISIONS_KEPT_MAX_COUNT
from worker.engine.admission import Decision
from worker.engine.free_runs import FreeRuns
from worker.engine.retention import Loan, Placement, joined, missing

Spot = tuple[int, int]
"""A chunk and a page in it."""
Shift = tuple[int, int, int, int, int]
"""Chunk and first row in a layer's rows of it, chunk and first row to move them to, how many rows."""


class HeadroomBooksError(InvariantError):
    """free + cooling + held is not the pages of a chunk, or more is held than there is room for."""


class Cause(StrEnum):
    """Why pages of headroom moved. The first two of the reclaiming ones are A4's order."""

    KEPT = "page kept in headroom"
    IDLE = "whole idle context reclaimed in headroom"
    REVOKED_IDLE = "headroom given back to the device, whole idle context"
    REVOKED = "headroom given back to the device, oldest page"
    STRANDED = "headroom given back to the device, no step to move its pages beside"
    SHIFTED = "moved within headroom, as a chunk is given back"
    OWN_PAGES = "kept in its device pages instead of headroom"
    IN_PLACE = "attended in place, no headroom needed"
    REFUTED = "page of headroom with rows of refuted drafts"
    LEFT = "context left headroom"
    OPENED = "chunk taken from the device"
    CLOSED = "chunk given back to the device"


@dataclass(slots=True, eq=False)
class Borrower:
    """What one context has in headroom: ``pages`` maps the index of a page in its history to where it lies."""

    number: int
    last_active: int = -1
    parked: bool = False
    pages: dict[int, Spot] = field(default_factory=dict)
    runs: tuple[Loan, ...] | None = None
    """The same as rows, ascending, neighbours joined: a step looks at these. None once ``pages`` have changed."""


class Headroom:
    """No chunk at first. ``page_rows`` rows a page, ``chunk_pages`` pages a chunk. One thread."""

    def __init__(self, page_rows: int, chunk_pages: int) -> None:
        self.chunk_pages = chunk_pages
        self._page = page_rows
        self._open: dict[int, FreeRuns] = {}
        self._closing: dict[int, int] = {}
        """Chunks given back, with the newest step that may touch each."""
        self._cooling: dict[Spot, int] = {}
        self._borrowers: dict[int, Borrower] = {}
        self._planned = self._landed = -1
        self.held = 0
        """Pages that hold history, in all chunks."""
        self.sequence = 0
        self.records: deque[Decision] = deque(maxlen=DECISIONS_KEPT_MAX_COUNT)
        self.moved: Counter[Cause] = Counter()
        """Pages moved so far, by cause."""

    # -- what stands ----------------------------------------------------------------------------------------------
    @property
    def chunks(self) -> int:
        """Chunks in use; those that are being given back are not."""
        return len(self._open)

    @property
    def closing(self) -> int:
        """Chunks that are being given back."""
        return len(self._closing)

    @property
    def capacity(self) -> int:
        """Pages of the chunks in use."""
        return len(self._open) * self.chunk_pages

    # -- contexts -------------------------------------------------------------------------------------------------
    def place(self, number: int, found: Placement, start: int, rows: int, step: int) -> Placement:
        """``found`` is where the history of a context that computes ``rows`` rows from ``start`` on is without headroom
        (``Retention.place``): what headroom changes. Once a step, when it is planned."""
        self._planned = max(self._planned, step)
        if not self._open and number not in self._borrowers:
            return found
        borrower = self._borrowers.setdefault(number, Borrower(number))
        borrower.last_active, borrower.parked = step, False
        parts = [(part, self._within(borrower, *part)) for part in found.copies]
        lent: tuple[Loan, ...] = ()
        if found.home is not None:
            self._drop(borrower, list(borrower.pages), Cause.IN_PLACE, step, None)
        else:
            own = sorted((first, count) for first, _, count in (*found.retained, *found.captures))
            doubled = [loan for first, count in own for loan in self._within(borrower, first, first + count)]
            self._drop(borrower, self._indices(doubled), Cause.OWN_PAGES, step, None)
            lent = self._loans(borrower, self._keep(borrower, own, (start + rows) // self._page, step))
        copies = [left for part, loans in parts for left in missing(part, [(loan[0], loan[3]) for loan in loans])]
        borrowed = tuple(loan for _, loans in parts for loan in loans)
        return replace(found, copies=tuple(copies), borrowed=borrowed, lent=lent)

    def confirm(self, number: int, rows: int, step: int) -> None:
        """Only the first ``rows`` rows of its history are: a page with others in it holds nothing (drafted tokens)."""
        borrower = self._borrowers.get(number)
        if borrower is not None:
            wrong = self._within(borrower, rows // self._page * self._page, maxsize)
            self._drop(borrower, self._indices(wrong), Cause.REFUTED, step, None)

    def park(self, number: int) -> None:
        """It stops running: what it holds may be reclaimed as idle."""
        if number in self._borrowers:
            self._borrowers[number].parked = True

    def bring_in(self, number: int) -> None:
        """Its turn comes: what it holds is its own again."""
        if number in self._borrowers:
            self._borrowers[number].parked = False

    def parked(self) -> list[tuple[int, bool]]:
        """Of each context that is known, whether it is parked."""
        return [(one.number, one.parked) for one in self._borrowers.values()]

    def leave(self, number: int, step: int) -> None:
        """The context is over."""
        borrower = self._borrowers.pop(number, None)
        if borrower is not None:
            self._drop(borrower, list(borrower.pages), Cause.LEFT, step, None)

    # -- chunks ---------------------------------------------------------------------------------------------------
    def open(self, step: int) -> int:
        """One more chunk is there to be used: its number."""
        chunk = next(one for one in range(len(self._open) + len(self._closing) + 1) if not self._known(one))
        self._open[chunk] = FreeRuns(self.chunk_pages)
        self._record(step, Cause.OPENED, self._all_of(chunk), None, None)
        return chunk

    def revoke(self, chunks: int, step: int) -> None:
        """Close so many chunks, or all: no page goes there any more, and what lies there moves or is dropped in A4's
        order."""
        for _ in range(min(chunks, len(self._open))):
            self._make_room(self.held - (self.capacity - self.chunk_pages), step)
            held = Counter(chunk for one in self._borrowers.values() for chunk, _ in one.pages.values())
            chunk = min(self._open, key=lambda one: (held[one], -one))
            del self._open[chunk]
            self._cooling = {spot: until for spot, until in self._cooling.items() if spot[0] != chunk}
            self._closing[chunk] = self._planned

    def shifts(self, step: int) -> tuple[Shift, ...]:
        """Pages that leave closing chunks beside ``step``, after its attention. Asked once its contexts are placed:
        this step reads them where they were, later ones where they go."""
        if not self._closing:
            return ()
        self._planned = max(self._planned, step)
        moves: list[tuple[tuple[int, int], int, int, int]] = []
        for borrower in sorted(self._borrowers.values(), key=lambda one: one.number):
            leaving = [index for index in sorted(borrower.pages) if borrower.pages[index][0] in self._closing]
            moved = []
            for index in leaving:
                spot = self._take(borrower, index)
                if spot is None:
                    break
                old, borrower.pages[index], borrower.runs = borrower.pages[index], spot, None
                self._closing[old[0]] = step
                moves.append(((old[0], spot[0]), old[1] * self._page, spot[1] * self._page, self._page))
                moved.append(self._number(spot))
            if moved:
                self._record(step, Cause.SHIFTED, tuple(moved), borrower.number, borrower.number)
        return tuple((chunk, row, to, place, count) for (chunk, to), row, place, count in joined(moves))

    def vacate(self, step: int) -> None:
        """No step comes that pages could move beside: what lies in closing chunks is dropped."""
        for borrower in self._borrowers.values() if self._closing else ():
            stranded = [index for index, (chunk, _) in borrower.pages.items() if chunk in self._closing]
            self._drop(borrower, stranded, Cause.STRANDED, step, None)

    def landed(self, step: int) -> None:
        """A step is over on every queue."""
        self._landed = max(self._landed, step)
        for (chunk, page), until in list(self._cooling.items()):
            if until <= self._landed:
                del self._cooling[chunk, page]
                self._open[chunk].give(page)

    def cold(self, step: int) -> list[int]:
        """Closed chunks that nothing holds or touches any more: they are the device's from here on."""
        if not self._closing:
            return []
        held = {chunk for one in self._borrowers.values() for chunk, _ in one.pages.values()}
        found = [chunk for chunk, until in self._closing.items() if until <= self._landed and chunk not in held]
        for chunk in found:
            del self._closing[chunk]
            self._record(step, Cause.CLOSED, self._all_of(chunk), None, None)
        return found

    def check(self) -> None:
        """Raise unless each page of each chunk is free, cooling or held once, and what leaves has room."""
        spots = [spot for one in self._borrowers.values() for spot in one.pages.values()]
        if len(set(spots)) != len(spots) or len(spots) != self.held:
            raise HeadroomBooksError(f"{len(set(spots))} pages are held, {self.held} are booked")
        for one in self._borrowers.values():
            if one.runs is not None and one.runs != self._loans(one, sorted(one.pages)):
                raise HeadroomBooksError(f"context {one.number} has pages that its rows do not tell of")
        if self.held > self.capacity:
            raise HeadroomBooksError(f"{self.held} pages are held where there is room for {self.capacity}")
        for chunk, free in self._open.items():
            held = {page for at, page in spots if at == chunk}
            cooling = {page for at, page in self._cooling if at == chunk}
            if held & cooling or any(page in free for page in held | cooling):
                raise HeadroomBooksError(f"a page of chunk {chunk} is counted twice")
            if len(free) + len(held) + len(cooling) != self.chunk_pages:
                raise HeadroomBooksError(
                    f"chunk {chunk}: {len(free)} free + {len(held)} held + {len(cooling)} cooling is not "
                    f"{self.chunk_pages} pages"
                )
        if any(not self._known(chunk) for chunk, _ in spots) or any(
            chunk not in self._open for chunk, _ in self._cooling
        ):
            raise HeadroomBooksError("a page of a chunk that is not there is in the books")

    # -- parts ----------------------------------------------------------------------------------------------------
    def _known(self, chunk: int) -> bool:
        return chunk in self._open or chunk in self._closing

    def _runs(self, borrower: Borrower) -> tuple[Loan, ...]:
        """All that it has, as rows."""
        if borrower.runs is None:
            borrower.runs = self._loans(borrower, sorted(borrower.pages))
        return borrower.runs

    def _within(self, borrower: Borrower, start: int, end: int) -> list[Loan]:
        """Of what it has, the whole pages between two rows."""
        runs, page, found = self._runs(borrower), self._page, []
        start, end = -(-start // page) * page, end // page * page
        for index in range(max(0, bisect_right(runs, start, key=lambda run: run[0]) - 1), len(runs)):
            first, chunk, place, count = runs[index]
            low, high = max(first, start), min(first + count, end)
            if low < high:
                found.append((low, chunk, place + low - first, high - low))
            elif first >= end:
                break
        return found

    def _indices(self, loans: Iterable[Loan]) -> list[int]:
        """Which pages of a history these are."""
        page = self._page
        return [index for first, _, _, count in loans for index in range(first // page, (first + count) // page)]

    def _keep(self, borrower: Borrower, own: Sequence[tuple[int, int]], full: int, step: int) -> list[int]:
        """Take room for whole pages that nothing on the device holds, ``own`` its pages' rows (first, how many); the
        indices to keep in this step."""
        there = sorted([*own, *((first, count) for first, _, _, count in self._runs(borrower))])
        gaps = missing((0, full * self._page), there)
        wanted = sum(end - start for start, end in gaps) // self._page
        while self.capacity - self.held < wanted and self._reclaim_idle(Cause.IDLE, step, borrower):
            pass
        taken: list[int] = []
        indices = (index for start, end in gaps for index in range(start // self._page, end // self._page))
        for index in islice(indices, max(0, self.capacity - self.held)):
            spot = self._take(borrower, index)
            if spot is None:
                break
            borrower.pages[index], borrower.runs = spot, None
            self.held += 1
            taken.append(index)
        if taken:
            pages = tuple(self._number(borrower.pages[index]) for index in taken)
            self._record(step, Cause.KEPT, pages, None, borrower.number)
        return taken

    def _take(self, borrower: Borrower, index: int) -> Spot | None:
        """A free page: behind the page before it if that can be, else where a long run can follow."""
        before = borrower.pages.get(index - 1)
        if before is not None and before[0] in self._open and before[1] + 1 in self._open[before[0]]:
            spot = before[0], before[1] + 1
        else:
            runs = [(*free.longest(), chunk) for chunk, free in self._open.items()]
            first, length, chunk = max(runs, key=lambda run: (run[1], -run[2]), default=(0, 0, 0))
            if not length:
                return None
            spot = chunk, first if length == self.chunk_pages else first + length // 2
        self._open[spot[0]].take(spot[1])
        return spot

    def _make_room(self, count: int, step: int) -> None:
        """Drop ``count`` pages or more in A4's order: idle contexts whole, then the least recently active's oldest."""
        before = self.held
        while before - self.held < count and self._reclaim_idle(Cause.REVOKED_IDLE, step, None):
            pass
        for borrower in sorted(self._borrowers.values(), key=lambda one: (one.last_active, one.number)):
            left = count - (before - self.held)
            if left > 0 and borrower.pages:
                self._drop(borrower, sorted(borrower.pages)[:left], Cause.REVOKED, step, None)

    def _reclaim_idle(self, cause: Cause, step: int, wanting: Borrower | None) -> bool:
        idle = [one for one in self._borrowers.values() if one.parked and one.pages]
        if not idle:
            return False
        borrower = min(idle, key=lambda one: (one.last_active, one.number))
        self._drop(borrower, list(borrower.pages), cause, step, None if wanting is None else wanting.number)
        return True

    def _drop(self, borrower: Borrower, indices: Sequence[int], cause: Cause, step: int, to: int | None) -> None:
        if not indices:
            return
        spots = [borrower.pages.pop(index) for index in indices]
        borrower.runs = None
        self.held -= len(spots)
        for spot in spots:
            if spot[0] in self._open:
                self._cooling[spot] = self._planned
            else:
                self._closing[spot[0]] = self._planned
        self._record(step, cause, tuple(map(self._number, spots)), borrower.number, to)

    def _loans(self, borrower: Borrower, indices: Iterable[int]) -> tuple[Loan, ...]:
        """Pages as moves of rows, neighbours joined."""
        page, pages = self._page, borrower.pages
        moves = ((pages[index][0], index * page, pages[index][1] * page, page) for index in indices)
        return tuple((first, chunk, place, count) for chunk, first, place, count in joined(moves))

    def _number(self, spot: Spot) -> int:
        return spot[0] * self.chunk_pages + spot[1]

    def _all_of(self, chunk: int) -> tuple[int, ...]:
        return tuple(range(chunk * self.chunk_pages, (chunk + 1) * self.chunk_pages))

    def _record(self, step: int, cause: Cause, pages: tuple[int, ...], source: int | None, to: int | None) -> None:
        self.records.append(Decision(self.sequence, step, cause, pages, source, to))
        self.sequence += 1
        self.moved[cause] += len(pages)
