"""rules: H1 and H3: which rows of a step's history are on the device already, which come over the link, and where to.

A context whose pages are a run for its whole history is attended there, in place: a step copies nothing of it, or what
its run lacks yet. Any other one is attended in a slot: its retained pages (the sink and the newest) are materialised
there device to device beside the copy of what is missing, and pages that a step completes are kept (*captured*) as A3
allows. ``place`` is called once a step, when it is planned. Knows no bytes and no queue: rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from common.config import EngineSettings
from common.errors import InvariantError
from worker.engine.admission import Account, PagePool
from worker.engine.fit import Fit

Between = TypeVar("Between")
Range = tuple[int, int]
"""First row and the row past the last, of a context's history."""
Move = tuple[int, int, int]
"""First row of the history, first row in a layer's page rows, how many rows."""
Loan = tuple[int, int, int, int]
"""First row of the history, chunk of headroom, first row in a layer's rows of the chunk, how many rows (H2)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one context's history is for one step. ``home`` is the first of its rows in each layer's page rows, None in
    a slot."""

    home: int | None
    copies: tuple[Range, ...]
    """Rows that come over the link."""
    retained: tuple[Move, ...] = ()
    """Rows materialised from pages into the slot."""
    captures: tuple[Move, ...] = ()
    """Rows kept in pages once attention has run over the slot."""
    hit_rows: int = 0
    """Rows of the history that were in the device pages: attended in place or materialised (H3)."""
    borrowed: tuple[Loan, ...] = ()
    """Rows materialised from headroom."""
    lent: tuple[Loan, ...] = ()
    """Rows kept in headroom once attention has run over the slot."""

    @property
    def link_rows(self) -> int:
        """Rows that come over the link."""
        return sum(end - start for start, end in self.copies)

    @property
    def borrowed_rows(self) -> int:
        """Rows that were in headroom (H3)."""
        return sum(count for _, _, _, count in self.borrowed)


def streamed(rows: int) -> Placement:
    """Nothing is retained: all rows come over the link into a slot."""
    return Placement(None, ((0, rows),) if rows else ())


@dataclass(slots=True, eq=False)
class Holding:
    """What of a context's pages is valid: ``resident`` rows from the start of its run, or whole ``captured`` pages."""

    account: Account
    resident: int = 0
    captured: set[int] = field(default_factory=set)
    in_order: bool = False
    """Whether ``resident`` counts rows of the account's present run."""
    tried: int = -1


class Retention:
    """One engine's. ``need_rows`` of a context is its longest possible history. One thread."""

    def __init__(self, pool: PagePool, page_rows: int) -> None:
        self.pool = pool
        self._page = page_rows
        self._holdings: dict[int, Holding] = {}

    def admit(self, number: int, need_rows: int, step: int) -> str | None:
        """Give it its first pages; or why it waits (``PagePool.admit``)."""
        reason = self.pool.admit(number, -(-need_rows // self._page), step)
        account = self.pool.account(number)
        if reason is None and account is not None:
            self._holdings[number] = Holding(account)
        return reason

    def leave(self, number: int, step: int) -> None:
        """The context is over."""
        if self._holdings.pop(number, None) is not None:
            self.pool.leave(number, step)

    def place(self, number: int, start: int, rows: int, step: int) -> Placement:
        """The context computes ``rows`` new rows from ``start`` on in this step: where its history is."""
        holding = self._holdings[number]
        account = holding.account
        account.last_active = step
        if holding.in_order and account.home is not None and not account.fresh:
            return self._in_place(holding, account.home, start, rows)
        self._look(holding)
        if account.home is None and holding.tried != self.pool.sequence:
            self.pool.take_whole(account, step)
            holding.tried = self.pool.sequence
            self._look(holding)
        if account.home is not None and self._may_begin(holding):
            return self._in_place(holding, account.home, start, rows)
        return self._in_slot(holding, start, rows, step)

    def known(self, number: int) -> bool:
        """Whether it was admitted and has not left."""
        return number in self._holdings

    def confirm(self, number: int, rows: int) -> None:
        """Only the first ``rows`` rows of its history are: what else was appended is not retained (drafted tokens)."""
        holding = self._holdings[number]
        holding.resident = min(holding.resident, rows)
        holding.captured = {index for index in holding.captured if index < rows // self._page}

    def park(self, number: int) -> None:
        """Its turn is over: its pages may be reclaimed as idle."""
        self.pool.park(number)

    def parked(self) -> list[tuple[int, bool]]:
        """Of each context that is known, whether it is parked."""
        return [(number, holding.account.parked) for number, holding in self._holdings.items()]

    def bring_in(self, number: int, step: int) -> str | None:
        """Its turn comes: active from now on, in a run of idle contexts' pages if need be; or why it waits."""
        holding = self._holdings[number]
        if not holding.account.parked:
            return None
        reason = self.pool.bring_in(number, step)
        if reason is None:
            self.pool.take_whole(holding.account, step, reclaim=True)
        return reason

    def arrive(self, number: int, rows: int, most: int, step: int) -> Placement | None:
        """Of a context that does not run in this step, copy at most ``most`` of its ``rows`` into its run ahead of its
        turn; None if it has no run that may be written, or all its rows."""
        holding = self._holdings[number]
        self._look(holding)
        account = holding.account
        if account.home is None or not self._may_begin(holding) or holding.resident >= rows:
            return None
        account.last_active = step
        first, holding.resident = holding.resident, min(rows, holding.resident + most)
        return Placement(account.home * self._page, ((first, holding.resident),))

    def check(self) -> None:
        """Raise unless the pool's books agree and so do these."""
        self.pool.check()
        for number, holding in self._holdings.items():
            if self.pool.account(number) is not holding.account:
                raise InvariantError(f"context {number} is retained without an account")
            if holding.in_order and holding.resident > holding.account.need * self._page:
                raise InvariantError(f"context {number} has {holding.resident} rows in a shorter run")

    # -- parts ----------------------------------------------------------------------------------------------------
    def _may_begin(self, holding: Holding) -> bool:
        """A new run is written only once no earlier holder's step may still touch it."""
        if not holding.in_order and self.pool.cool(holding.account.pages.values()):
            holding.in_order, holding.resident = True, 0
            holding.captured.clear()
        return holding.in_order

    def _look(self, holding: Holding) -> None:
        """What moved since the last look holds nothing of this context any more. Of a run that was broken up, full
        pages that it still holds are retained pages from here on."""
        account = holding.account
        if holding.in_order and (account.home is None or account.fresh):
            holding.captured = set(range(holding.resident // self._page))
            holding.in_order, holding.resident = False, 0
        if holding.captured:
            holding.captured.intersection_update(account.pages)
            holding.captured.difference_update(account.fresh)
        account.fresh.clear()

    def _in_place(self, holding: Holding, home: int, start: int, rows: int) -> Placement:
        resident, holding.resident = holding.resident, start + rows
        copies = ((resident, start),) if resident < start else ()
        return Placement(home * self._page, copies, hit_rows=min(resident, start))

    def _in_slot(self, holding: Holding, start: int, rows: int, step: int) -> Placement:
        account = holding.account
        if account.home is not None:  # its run still cools: nothing in it is valid yet
            return streamed(start)
        fresh = self._fill(holding, (start + rows) // self._page, step)
        retained = self._moves(account, sorted(holding.captured))
        holding.captured.update(fresh)
        hit = sum(count for _, _, count in retained)
        copies = missing((0, start), [(first, count) for first, _, count in retained])
        return Placement(None, copies, retained, self._moves(account, fresh), hit)

    def _fill(self, holding: Holding, full: int, step: int) -> list[int]:
        """Take pages for the sink and the newest of ``full`` whole pages (A3); the indices to capture in this step."""
        account = holding.account
        limit = self.pool.limit(account)
        if full == 0 or limit == 0:
            return []
        if 0 not in account.pages:
            self.pool.take(account, 0, step)
        for index in range(full - 1, max(0, full - limit), -1):
            if index not in account.pages and self.pool.take(account, index, step) is None:
                break
        self._look(holding)
        pages = account.pages
        empty = pages.keys() - holding.captured
        return sorted(index for index in empty if index < full and self.pool.cool((pages[index],)))

    def _moves(self, account: Account, indices: Sequence[int]) -> tuple[Move, ...]:
        """Pages as moves of rows, neighbours joined."""
        page = self._page
        moves = joined((None, index * page, account.pages[index] * page, page) for index in indices)
        return tuple((first, place, count) for _, first, place, count in moves)


def retention_of(fit: Fit, settings: EngineSettings) -> Retention | None:
    """As the settings have it; None when nothing is retained, or everything."""
    if not fit.slot_rows or not fit.pages:
        return None
    pool = PagePool(fit.pages, settings.target_pages, settings.burst_pages, whole=fit.whole)
    return Retention(pool, fit.page_rows)


def missing(rows: Range, there: Sequence[tuple[int, int]]) -> tuple[Range, ...]:
    """What of ``rows`` is not ``there``, pieces of (first row, how many) ascending."""
    found, (at, end) = [], rows
    for first, count in there:
        if first > at:
            found.append((at, first))
        at = first + count
    if at < end:
        found.append((at, end))
    return tuple(found)


def joined(moves: Iterable[tuple[Between, int, int, int]]) -> list[tuple[Between, int, int, int]]:
    """Moves of rows (between what, first row, first row there, how many) in order, neighbours on both sides joined."""
    found: list[tuple[Between, int, int, int]] = []
    for between, first, place, count in moves:
        if found:
            last, row, there, rows = found[-1]
            if (last, row + rows, there + rows) == (between, first, place):
                found[-1] = (between, row, there, rows + count)
                continue
        found.append((between, first, place, count))
    return found
