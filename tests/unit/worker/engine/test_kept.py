"""One door to pages and headroom: a context is active, parked or gone in both alike, and the books say so."""

from __future__ import annotations

import pytest

from common.errors import InvariantError
from worker.engine.admission import PagePool
from worker.engine.fit import Fit
from worker.engine.headroom import Headroom
from worker.engine.kept import Kept
from worker.engine.retention import Retention, streamed

PAGE = 4


def kept() -> Kept:
    """Two contexts of four pages, known to pages and headroom both."""
    found = Kept(Fit(2, 16, PAGE, 32, 1000, 0, 0, (), pages=8), Retention(PagePool(8), PAGE))
    found.headroom = Headroom(PAGE, 4)
    found.headroom.open(0)
    for number in range(2):
        assert found.admit(number, 16, 0) is None
        found.headroom.place(number, streamed(0), 0, 8, 0)
    return found


def test_who_is_parked_is_parked_in_all_books_until_it_is_brought_in_or_gone() -> None:
    """H6, in life: one turn ends and the next begins."""
    both = kept()
    for what in (lambda: both.park(0), lambda: both.park(1), lambda: both.bring_in(0, 1), lambda: both.leave(1, 1)):
        what()
        both.check()
    assert (both.active(0), dict(both.headroom.parked())) == (True, {0: False})


@pytest.mark.parametrize("book", ["retention", "headroom", "neither"])
def test_books_that_disagree_on_who_is_parked_are_found(book: str) -> None:
    """The control: one of them missed that a turn ended, or alone heard of it."""
    both = kept()
    if book == "neither":
        both._parked.add(0)
    else:
        getattr(both, book).park(0)
    with pytest.raises(InvariantError, match="in one book alone"):
        both.check()
