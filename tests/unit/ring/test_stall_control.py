"""The published failure comes back when the padding is forgotten, when arithmetic says, and only then (R3, R6)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from ring.accounting import Accounting
from ring.stall_control import PaddingForgotten, predicted_wraps, run_equal_batches


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(16, 256), length=st.integers(2, 128))
def test_without_the_padding_field_the_ring_stalls_after_the_predicted_wraps(capacity: int, length: int) -> None:
    """Each wrap strands its padding; the last one leaves a ring that is full with nothing in it."""
    if length > capacity or capacity % length == 0:
        return
    wraps = predicted_wraps(capacity, length)
    enough = (wraps + 2) * (capacity // length + 1)
    report = run_equal_batches(PaddingForgotten(capacity, 1024), length, enough)
    assert report.stalled
    assert report.wraps == wraps
    assert not run_equal_batches(Accounting(capacity, 1024), length, enough).stalled


def test_the_stall_is_found_and_starves_the_second_consumer() -> None:
    """R6 as it was published: tens of thousands unresolved, none pending, both consumers idle, no holder."""
    report = run_equal_batches(PaddingForgotten(65_536, 1024), 640, 100_000)
    assert report.stalled
    assert report.consumed == (12_954, 12_954)
    assert all(waiting == 37_046 for waiting in report.waiting), "the second consumer starves behind the first"
    assert report.finding is not None
    assert report.finding.items_unresolved == 74_092
    assert report.finding.holders == ()
    assert report.bytes_free < 640 + 65_536 % 640


def test_with_the_padding_given_back_the_same_work_ends() -> None:
    """The other side of the control: nothing else about the run is at fault."""
    report = run_equal_batches(Accounting(65_536, 1024), 640, 100_000)
    assert not report.stalled
    assert report.waiting == (0, 0)
    assert report.finding is None
    assert report.bytes_free == 65_536


@pytest.mark.parametrize(("capacity", "length"), [(1024, 256), (100, 101)])
def test_no_prediction_where_nothing_is_padded(capacity: int, length: int) -> None:
    """A ring of whole batches never pads: asking for its stall is a mistake."""
    with pytest.raises(InvariantError, match="no padding"):
        predicted_wraps(capacity, length)
