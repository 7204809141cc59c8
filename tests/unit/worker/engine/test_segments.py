"""Segments: books over random taking and giving, and no recycling while a copy may read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.page_leases import ContextSet, HostPage, PageHeldError, PageLeases
from worker.engine.segments import SegmentBook, SegmentBooksError


@given(st.integers(1, 5), st.lists(st.integers(0, 5), max_size=60))
def test_books_agree_over_any_life(count: int, moves: list[int]) -> None:
    """free + held = segments, and each owner has a generation of its own."""
    book = SegmentBook(PageLeases(count), count)
    held: list[HostPage] = []
    seen: set[HostPage] = set()
    for move in moves:
        if move < len(held):
            book.give_back(held.pop(move))
        elif (page := book.take()) is not None:
            assert page not in seen
            seen.add(page)
            held.append(page)
        else:
            assert len(held) == count
        book.check()
        assert (book.free, book.held) == (count - len(held), len(held))


def test_a_segment_under_copy_has_no_new_owner() -> None:
    """L5, in life: a context ends while its history is being staged."""
    leases = PageLeases(1)
    book = SegmentBook(leases, 1)
    page = book.take()
    assert page is not None
    contexts = ContextSet((1,), (page,))
    leases.hold(contexts)
    assert not book.may_recycle(page)
    with pytest.raises(PageHeldError):
        book.give_back(page)
    leases.drop(contexts)
    book.give_back(page)
    with pytest.raises(SegmentBooksError):
        book.give_back(page)
