"""Segments: books over random taking and giving, and no recycling while a copy may read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
        assert book.held == len(held)


def test_segments_of_two_kinds_never_change_places() -> None:
    """H5, in life: contexts come and go on short segments, shared histories on long ones."""
    book = SegmentBook(PageLeases(5), 3, 2)
    short = [book.take() for _ in range(4)]
    long = [book.take(long=True) for _ in range(3)]
    assert [page and page.index for page in short] == [0, 1, 2, None]
    assert [page and page.index for page in long] == [3, 4, None]
    for page in (long[0], short[1]):
        assert page is not None
        book.give_back(page)
    book.check()
    assert (len(book._free), book.free_longs, book.held) == (1, 1, 3)
    again, other = book.take(long=True), book.take()
    assert (again and again.index, other and other.index) == (3, 1)
    with pytest.raises(SegmentBooksError, match="other kind"):
        _crossed().check()


def _crossed() -> SegmentBook:
    """A book with a free segment among those of the other kind."""
    book = SegmentBook(PageLeases(2), 1, 1)
    book._free, book._free_longs = [1], [0]
    return book


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


class HostPoolMachine(RuleBasedStateMachine):
    """The host pool's books with copies under way: owners come and go, steps hold and drop, in any order."""

    SEGMENTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.leases = PageLeases(self.SEGMENTS)
        self.book = SegmentBook(self.leases, self.SEGMENTS)
        self.owned: list[HostPage] = []
        self.steps: list[ContextSet] = []
        self.seen: set[HostPage] = set()

    @rule()
    def take(self) -> None:
        page = self.book.take()
        assert (page is None) == (len(self.owned) == self.SEGMENTS)
        if page is not None:
            assert page not in self.seen, "a generation is never handed out twice"
            self.seen.add(page)
            self.owned.append(page)

    @rule()
    def stage(self) -> None:
        if self.owned:
            pages = tuple(self.owned)
            contexts = ContextSet(tuple(range(len(pages))), pages)
            self.leases.hold(contexts)
            self.steps.append(contexts)

    @rule()
    def retire(self) -> None:
        if self.steps:
            self.leases.drop(self.steps.pop(0))

    @rule(pick=st.integers(0, 10))
    def end(self, pick: int) -> None:
        if not self.owned:
            return
        page = self.owned[pick % len(self.owned)]
        if any(page in contexts.pages for contexts in self.steps):
            assert not self.book.may_recycle(page)
            with pytest.raises(PageHeldError):
                self.book.give_back(page)
            return
        self.book.give_back(page)
        self.owned.remove(page)

    @invariant()
    def books(self) -> None:
        self.book.check()
        self.leases.check()
        assert self.book.held == len(self.owned)
        assert self.leases.holds == len(self.steps)


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
