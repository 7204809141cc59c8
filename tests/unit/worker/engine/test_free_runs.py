"""Runs of free pages against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from worker.engine.free_runs import FreeRuns


@given(st.integers(0, 12), st.lists(st.integers(0, 11), max_size=60))
def test_runs_are_a_set_whose_neighbours_are_joined(pages: int, touched: list[int]) -> None:
    """Each touched page is taken if free, else given back; the longest run is found as by looking at all."""
    runs, model = FreeRuns(pages), set(range(pages))
    for page in touched:
        if page >= pages:
            continue
        if page in model:
            runs.take(page)
            model.remove(page)
        else:
            runs.give(page)
            model.add(page)
        assert len(runs) == len(model)
        assert [one in runs for one in range(pages)] == [one in model for one in range(pages)]
        lengths = {first: _length(model, first) for first in model if first - 1 not in model}
        first, length = runs.longest()
        assert length == max(lengths.values(), default=0)
        assert not length or lengths[first] == length


def _length(model: set[int], first: int) -> int:
    length = 0
    while first + length in model:
        length += 1
    return length


def test_a_page_is_taken_once_and_given_back_once() -> None:
    """The control: books that are wrong raise."""
    runs = FreeRuns(2)
    runs.take(0)
    with pytest.raises(InvariantError, match="not free"):
        runs.take(0)
    with pytest.raises(InvariantError, match="free already"):
        runs.give(1)
