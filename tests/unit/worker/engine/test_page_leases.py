"""Holds on host pages (L5): a page keeps its generation while any copy may touch it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.engine.page_leases import (
    ContextSet,
    HostPage,
    LeaseBooksError,
    LeaseError,
    PageHeldError,
    PageLeases,
    StaleGenerationError,
)


def contexts_of(pages: PageLeases, *indices: int) -> ContextSet:
    return ContextSet(tuple(indices), tuple(pages.current(index) for index in indices))


def test_a_held_page_is_not_recycled() -> None:
    """A context finishes while its history is on its way to the device (sglang 31427)."""
    pages = PageLeases(2)
    contexts = contexts_of(pages, 0)
    pages.hold(contexts)
    with pytest.raises(PageHeldError, match="page 0"):
        pages.recycle(pages.current(0))
    pages.drop(contexts)
    assert pages.recycle(pages.current(0)) == HostPage(0, 1)


def test_a_page_is_held_until_its_last_lease_retires() -> None:
    """Several layers of one step share a set; several steps share a page."""
    pages = PageLeases(1)
    one, other = contexts_of(pages, 0), contexts_of(pages, 0)
    for contexts in (one, one, other):
        pages.hold(contexts)
    for contexts in (one, other, one):
        assert pages.held(0)
        pages.drop(contexts)
    assert not pages.held(0)
    pages.check()


def test_a_passed_generation_is_refused() -> None:
    """A stage planned with a page that has a new owner would attend to somebody else's history."""
    pages = PageLeases(2)
    contexts = contexts_of(pages, 0, 1)
    pages.recycle(pages.current(1))
    with pytest.raises(StaleGenerationError, match="page 1 is at 1, not at 0"):
        pages.hold(contexts)
    assert not pages.held(0), "nothing is counted of a set that is refused"
    pages.check()


def test_a_page_is_recycled_once() -> None:
    """Two owners of one host block (TensorRT-LLM 8813) begin with one page freed twice."""
    pages = PageLeases(1)
    page = pages.current(0)
    pages.recycle(page)
    with pytest.raises(StaleGenerationError, match="recycled before"):
        pages.recycle(page)


def test_a_hold_is_not_dropped_twice() -> None:
    """A lease retired twice after an abort (LMCache 3381)."""
    pages = PageLeases(1)
    contexts = contexts_of(pages, 0)
    pages.hold(contexts)
    pages.drop(contexts)
    with pytest.raises(LeaseBooksError, match="more often"):
        pages.drop(contexts)


def test_a_context_stands_once_in_a_step() -> None:
    """Its rows would be written twice."""
    with pytest.raises(LeaseError, match="twice"):
        ContextSet((3, 3), (HostPage(0, 0), HostPage(1, 0)))


def test_the_books_find_a_lost_hold() -> None:
    """What the check of every step rests on."""
    pages = PageLeases(1)
    pages.hold(contexts_of(pages, 0))
    pages._holds[0] = 0
    with pytest.raises(LeaseBooksError, match="add up"):
        pages.check()


class PagesMachine(RuleBasedStateMachine):
    """Holds, drops and recycling in any order, against a model."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageLeases(3)
        self.held: list[ContextSet] = []

    @rule(indices=st.sets(st.integers(0, 2), min_size=1))
    def hold(self, indices: set[int]) -> None:
        contexts = contexts_of(self.pages, *sorted(indices))
        self.pages.hold(contexts)
        self.held.append(contexts)

    @rule(pick=st.integers(0, 10))
    def hold_again(self, pick: int) -> None:
        if self.held:
            contexts = self.held[pick % len(self.held)]
            self.pages.hold(contexts)
            self.held.append(contexts)

    @rule(pick=st.integers(0, 10))
    def drop(self, pick: int) -> None:
        if self.held:
            self.pages.drop(self.held.pop(pick % len(self.held)))

    @rule(index=st.integers(0, 2))
    def recycle(self, index: int) -> None:
        page = self.pages.current(index)
        if any(page in contexts.pages for contexts in self.held):
            with pytest.raises(PageHeldError):
                self.pages.recycle(page)
        else:
            assert self.pages.recycle(page).generation == page.generation + 1

    @invariant()
    def books(self) -> None:
        self.pages.check()
        for index in range(3):
            assert self.pages.held(index) == any(index in contexts.ids for contexts in self.held)


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
