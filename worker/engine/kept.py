"""rules: what of histories is kept on the device: in its pages (H1) and in headroom (H2); either may be absent.

One door to both for whoever plans steps, so that a context is active, parked or gone in both alike. Knows rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import InvariantError
from worker.engine.admission import Decision
from worker.engine.contexts import Context
from worker.engine.fit import Fit
from worker.engine.headroom import Headroom
from worker.engine.retention import Placement, Retention, streamed
from worker.engine.story import fresh


class Kept:
    """``retention`` None keeps nothing in device pages; headroom has no chunk until one is opened. One thread."""

    def __init__(self, fit: Fit, retention: Retention | None) -> None:
        self.retention = retention
        self.headroom = Headroom(fit.page_rows, 0)
        self._parked: set[int] = set()
        self._told = [0, 0]
        """Decisions of the page pool, and of headroom, up to these were told."""

    def admit(self, number: int, rows: int, step: int) -> str | None:
        """A context of at most ``rows`` rows becomes active, known or not; or why it must wait, with its numbers."""
        if self.retention is None or self.retention.known(number):
            return self.bring_in(number, step)
        return self.retention.admit(number, rows, step)

    def bring_in(self, number: int, step: int) -> str | None:
        """Its turn comes: active from now on; or why it waits."""
        if number not in self._parked:
            return None
        reason = None if self.retention is None else self.retention.bring_in(number, step)
        if reason is None:
            self._parked.discard(number)
            self.headroom.bring_in(number)
        return reason

    def park(self, number: int) -> None:
        """Its turn is over: what is kept of it may be reclaimed as idle."""
        self._parked.add(number)
        self.headroom.park(number)
        if self.retention is not None:
            self.retention.park(number)

    def active(self, number: int) -> bool:
        """Whether it is not parked."""
        return number not in self._parked

    def leave(self, number: int, step: int) -> None:
        """The context is over."""
        self._parked.discard(number)
        self.headroom.leave(number, step)
        if self.retention is not None:
            self.retention.leave(number, step)

    def place(self, context: Context, start: int, rows: int, step: int) -> Placement:
        """It computes ``rows`` new rows behind ``start`` own ones: which of these are in its pages, in headroom, and on
        the host alone; counted for it (H3)."""
        found = streamed(start)
        if self.retention is not None:
            found = self.retention.place(context.number, start, rows, step)
        found = self.headroom.place(context.number, found, start, rows, step)
        context.served.add(found)
        return found

    def confirm(self, number: int, rows: int, step: int) -> None:
        """Only the first ``rows`` rows of its history are: what else was appended is kept nowhere (drafted tokens)."""
        self.headroom.confirm(number, rows, step)
        if self.retention is not None:
            self.retention.confirm(number, rows)

    def arrive(self, context: Context, most: int, step: int) -> Placement | None:
        """At most ``most`` of its rows that come into its pages ahead of its turn."""
        if self.retention is None:
            return None
        found = self.retention.arrive(context.number, context.own_rows, most, step)
        if found is not None:
            context.served.add(found)
        return found

    def landed(self, step: int) -> None:
        """A step is over on every queue."""
        if self.retention is not None:
            self.retention.pool.landed(step)
        self.headroom.landed(step)

    def news(self) -> Iterator[Decision]:
        """What page pool and headroom decided since the last time."""
        for at, books in enumerate((None if self.retention is None else self.retention.pool, self.headroom)):
            if books is not None and books.sequence != self._told[at]:
                yield from fresh(books.records, self._told[at])
                self._told[at] = books.sequence

    def check(self) -> None:
        """Raise unless all books agree, also on who is parked: each acts on it alone."""
        if self.retention is not None:
            self.retention.check()
        self.headroom.check()
        for books in (self.retention, self.headroom):
            for number, parked in books.parked() if books is not None else ():
                if parked == self.active(number):
                    raise InvariantError(f"context {number} is {'parked' if parked else 'active'} in one book alone")
