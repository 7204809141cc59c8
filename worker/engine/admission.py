"""rules: A2, A3 and A4: who holds which pages of the device page pool, and every page that moves, on record.

A context holds its sink page and its newest pages. It has a target by right, a burst that it may borrow while pages are
free, and a floor (``FLOOR_PAGES``). ``PagePool`` is the one door: ``admit``, ``park``, ``bring_in``, ``leave``, and the
fills ``take`` (A3) and ``take_whole``. All of them are called at step boundaries alone. A page that moves is *cooling*
until the steps planned before have landed: what they still read of it is nobody else's yet. Knows no rows, no bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from common.errors import InvariantError
from common.limits import DECISIONS_KEPT_MAX_COUNT

FLOOR_PAGES = 2
"""What an active context holds whatever happens (A2): its sink page plus one."""


class PoolBooksError(InvariantError):
    """free + held is not the number of pages, a page is counted twice, or a floor is broken."""


class Reason(StrEnum):
    """Why pages moved. The reclaiming ones stand in A4's order."""

    FLOOR = "floor of an admitted context"
    OWN = "own page outside the window"
    FREE = "free page"
    WHOLE = "room for the whole history in one piece"
    BORROWED = "borrowed page reclaimed"
    ABOVE_TARGET = "page above target reclaimed"
    IDLE = "whole idle context reclaimed"
    SHRINK = "own oldest page, tail kept hot"
    LEFT = "context left"
    MOVED = "moved to lie in one piece"


RECLAIMING = (Reason.BORROWED, Reason.ABOVE_TARGET, Reason.IDLE)
"""The classes of A4, in its order."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One movement of pages. ``source`` and ``to`` are context numbers; None is the pool's free pages."""

    sequence: int
    step: int
    reason: StrEnum
    pages: tuple[int, ...]
    source: int | None
    to: int | None


@dataclass(slots=True, eq=False)
class Account:
    """What one context holds: ``pages`` maps the index of a page in its history to the pool's page."""

    number: int
    need: int
    """Pages of its longest possible history."""
    last_active: int
    """The newest step planned with it."""
    pages: dict[int, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    """Indices whose page is another than before, until whoever keeps what lies in them has looked and cleared this."""
    loans: int = 0
    """Pages it took beyond its target."""
    parked: bool = False
    home: int | None = None
    """First page of a run that holds its whole history in order; None unless it does."""

    def oldest(self) -> int | None:
        """The index of the page it gives up first: the oldest but the sink, and the sink last."""
        rest = [index for index in self.pages if index]
        if rest:
            return min(rest)
        return 0 if self.pages else None


class PagePool:
    """``capacity`` pages. ``target`` and ``burst`` pages a context; 0 shares the pool out equally, and lets a context
    borrow whatever is free. ``whole``: all pages of a context are its right, in one piece that is cool, or it waits.
    One thread."""

    def __init__(self, capacity: int, target: int = 0, burst: int = 0, *, whole: bool = False) -> None:
        self.capacity = capacity
        self._whole = whole
        target = capacity if whole else target
        self._target, self._burst = min(target, capacity), burst  # a right to more than all would wait for ever
        self._free: set[int] = set(range(capacity))
        self._cooling: dict[int, int] = {}
        self._landed = -1
        self._accounts: dict[int, Account] = {}
        self._active = 0
        self._sequence = 0
        self.records: deque[Decision] = deque(maxlen=DECISIONS_KEPT_MAX_COUNT)
        self.moved: Counter[Reason] = Counter()
        """Pages moved so far, by reason."""

    # -- what stands ----------------------------------------------------------------------------------------------
    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def account(self, number: int) -> Account | None:
        """What the context holds; None for one that was not admitted or has left."""
        return self._accounts.get(number)

    def target(self, account: Account) -> int:
        """Pages it holds by right: none while it is parked."""
        if account.parked:
            return 0
        share = self._target or max(FLOOR_PAGES, self.capacity // max(1, self._active))
        return min(account.need, share)

    def limit(self, account: Account) -> int:
        """Pages it may hold at most: its target and its burst."""
        if account.parked:
            return 0
        return min(account.need, self.target(account) + (self._burst or account.need))

    @property
    def sequence(self) -> int:
        """Grows with every decision: nothing moved while it stays."""
        return self._sequence

    def cool(self, pages: Iterable[int]) -> bool:
        """Whether every step that may still touch one of these pages for an earlier holder has landed."""
        return all(self._cooling.get(page, -1) <= self._landed for page in pages)

    def landed(self, step: int) -> None:
        """A step is over on every queue."""
        self._landed = max(self._landed, step)
        if self._cooling:
            self._cooling = {page: until for page, until in self._cooling.items() if until > self._landed}

    # -- contexts come, pause and go ------------------------------------------------------------------------------
    def admit(self, number: int, need: int, step: int) -> str | None:
        """A context becomes active and gets a whole run or its floor; or why it must wait, with its numbers."""
        if number in self._accounts:
            raise InvariantError(f"context {number} is admitted twice")
        account = Account(number, need, step)
        reason = self._room_for(account)
        if reason is not None:
            return reason
        self._accounts[number] = account
        self._active += 1
        if not self.take_whole(account, step):
            self._fill_floor(account, step)
        return None

    def park(self, number: int) -> None:
        """It stops running: target, burst and floor are suspended; what it holds may be reclaimed as idle."""
        account = self._known(number)
        if not account.parked:
            account.parked, account.loans = True, 0
            self._active -= 1

    def bring_in(self, number: int, step: int) -> str | None:
        """A parked context is to run again: active from this moment on; or why it must wait, as ``admit``."""
        account = self._known(number)
        if not account.parked:
            return None
        reason = self._room_for(account)
        if reason is not None:
            return reason
        account.parked, account.last_active = False, step
        self._active += 1
        account.loans = max(0, len(account.pages) - self.target(account))
        if not self.take_whole(account, step):
            self._fill_floor(account, step)
        return None

    def leave(self, number: int, step: int) -> None:
        """The context is over: its pages are free, cooling like all pages that move."""
        account = self._known(number)
        if account.pages:
            self._give_up(account, list(account.pages), Reason.LEFT, step, None)
        self._active -= not account.parked
        del self._accounts[number]

    # -- filling (A3) ---------------------------------------------------------------------------------------------
    def take(self, account: Account, index: int, step: int) -> int | None:
        """A page for the page ``index`` of its history, the newest it needs, in A3's order; None if it gets none."""
        if index in account.pages:
            return account.pages[index]
        held, limit = len(account.pages), self.limit(account)
        if account.home is not None or limit == 0:
            return None
        if held >= limit:
            return self._reuse(account, index, Reason.OWN, step)
        if not self._free and held < self.target(account):
            self._reclaim(1, account, step)
        if self._free:
            account.loans += held >= self.target(account)
            return self._give(account, index, min(self._free), Reason.FREE, step)
        return self._reuse(account, index, Reason.SHRINK, step)

    def take_whole(self, account: Account, step: int, *, reclaim: bool = False) -> bool:
        """A run of free pages for its whole history, so that it lies in order; False if there is none. With
        ``reclaim`` idle contexts are reclaimed for it, least recently active first."""
        if account.home is not None:
            return True
        if account.parked or account.need > self.limit(account):
            return False
        run = self._run(account)
        while run is None and reclaim and self._reclaim_idle(account, step):
            run = self._run(account)
        if run is None:
            return False
        if account.pages:
            self._give_up(account, list(account.pages), Reason.MOVED, step, None)
        pages = range(run, run + account.need)
        self._free.difference_update(pages)
        account.pages = dict(enumerate(pages))
        account.fresh.update(account.pages)
        account.home = run
        account.loans = max(0, account.need - self.target(account))
        self._record(step, Reason.WHOLE, tuple(pages), None, account.number)
        return True

    def check(self) -> None:
        """Raise unless each page is free or held once, floors hold, and whole histories lie in order."""
        held = [page for account in self._accounts.values() for page in account.pages.values()]
        if len(set(held)) != len(held) or self._free & set(held):
            raise PoolBooksError("a page is counted twice")
        if len(held) + len(self._free) != self.capacity:
            raise PoolBooksError(f"{len(self._free)} free + {len(held)} held is not {self.capacity} pages")
        if self._active != sum(not account.parked for account in self._accounts.values()):
            raise PoolBooksError(f"{self._active} contexts are booked as active")
        for account in self._accounts.values():
            if not account.parked and len(account.pages) < min(FLOOR_PAGES, account.need):
                raise PoolBooksError(f"context {account.number} holds {len(account.pages)} pages, below its floor")
            if account.pages and 0 not in account.pages:
                raise PoolBooksError(f"context {account.number} lost its sink page before others")
            if account.home is not None and account.pages != {
                index: account.home + index for index in range(account.need)
            }:
                raise PoolBooksError(f"context {account.number} is not whole")

    # -- parts ----------------------------------------------------------------------------------------------------
    def _known(self, number: int) -> Account:
        account = self._accounts.get(number)
        if account is None:
            raise InvariantError(f"context {number} has no account in the page pool")
        return account

    def _room_for(self, newcomer: Account) -> str | None:
        """Whether everyone's right, the newcomer's included, still fits (A2): else it waits (A4)."""
        active = [one for one in self._accounts.values() if not one.parked and one is not newcomer]
        right = self._target or FLOOR_PAGES
        needed = min(newcomer.need, right)
        promised = sum(min(one.need, right) for one in active)
        if promised + needed <= self.capacity:
            return self._piece_for(newcomer) if self._whole else None
        return f"needs {needed} device pages, {promised} of {self.capacity} are promised to {len(active)} contexts"

    def _piece_for(self, newcomer: Account) -> str | None:
        run = self._run(newcomer)
        if run is None:
            return f"needs {newcomer.need} device pages in one piece, {self.free} of {self.capacity} are free in more"
        if not self.cool(range(run, run + newcomer.need)):
            return f"needs {newcomer.need} device pages that no step under way still reads"
        return None

    def _fill_floor(self, account: Account, step: int) -> None:
        for index in range(min(FLOOR_PAGES, account.need)):
            if index in account.pages or len(account.pages) >= min(FLOOR_PAGES, account.need):
                continue
            if not self._free and not self._reclaim(1, account, step):
                raise PoolBooksError(f"no page can be reclaimed for the floor of context {account.number}")
            self._give(account, index, min(self._free), Reason.FLOOR, step)

    def _give(self, account: Account, index: int, page: int, reason: Reason, step: int) -> int:
        self._free.remove(page)
        account.pages[index] = page
        account.fresh.add(index)
        self._record(step, reason, (page,), None, account.number)
        return page

    def _reuse(self, account: Account, index: int, reason: Reason, step: int) -> int | None:
        """Its own oldest page holds a newer one from now on; never the sink."""
        oldest = account.oldest()
        if not oldest or oldest > index:
            return None
        page = account.pages.pop(oldest)
        account.pages[index] = page
        account.fresh.add(index)
        self._cooling[page] = account.last_active
        self._record(step, reason, (page,), account.number, account.number)
        return page

    def _reclaim(self, count: int, wanting: Account, step: int) -> int:
        """Free ``count`` pages in A4's order; how many it could."""
        got = 0
        others = sorted(
            (one for one in self._accounts.values() if one is not wanting and one.pages),
            key=lambda one: (one.last_active, one.number),
        )
        for reason in (Reason.BORROWED, Reason.ABOVE_TARGET):
            for account in others:
                if account.parked or got >= count:
                    continue
                excess = max(0, len(account.pages) - max(self.target(account), FLOOR_PAGES))
                mine = min(account.loans, excess) if reason is Reason.BORROWED else excess
                got += self._shrink(account, min(mine, count - got), reason, step, wanting)
        while got < count and (freed := self._reclaim_idle(wanting, step)):
            got += freed
        return got

    def _reclaim_idle(self, wanting: Account, step: int) -> int:
        idle = [one for one in self._accounts.values() if one.parked and one.pages and one is not wanting]
        if not idle:
            return 0
        account = min(idle, key=lambda one: (one.last_active, one.number))
        return self._give_up(account, list(account.pages), Reason.IDLE, step, wanting.number)

    def _shrink(self, account: Account, count: int, reason: Reason, step: int, wanting: Account) -> int:
        indices = sorted(index for index in account.pages if index)[:count]
        return self._give_up(account, indices, reason, step, wanting.number) if indices else 0

    def _give_up(self, account: Account, indices: list[int], reason: Reason, step: int, to: int | None) -> int:
        pages = tuple(account.pages.pop(index) for index in indices)
        account.home = None
        if reason is Reason.BORROWED:
            account.loans -= len(pages)
        account.loans = min(account.loans, len(account.pages))
        self._free.update(pages)
        self._cooling.update(dict.fromkeys(pages, account.last_active))
        self._record(step, reason, pages, account.number, to)
        return len(pages)

    def _run(self, account: Account) -> int | None:
        """The first page of the smallest run, of free pages and its own, that holds its whole history."""
        best: tuple[int, int] | None = None
        length, first, previous = account.need, None, None
        for page in [*sorted(self._free.union(account.pages.values())), None]:
            if first is not None and previous is not None and (page is None or page != previous + 1):
                size = previous - first + 1
                if size >= length and (best is None or size < best[0]):
                    best = (size, first)
                first = None
            if first is None:
                first = page
            previous = page
        return None if best is None else best[1]

    def _record(self, step: int, reason: Reason, pages: tuple[int, ...], source: int | None, to: int | None) -> None:
        self.records.append(Decision(self._sequence, step, reason, pages, source, to))
        self._sequence += 1
        self.moved[reason] += len(pages)
