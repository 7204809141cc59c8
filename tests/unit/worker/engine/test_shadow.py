"""The vector-clock check: what counts as order, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.shadow import ClockCheck, Ranges, covers, overlap

COPY, COMPUTE = 0, 1
A: Ranges = ((0, 8),)
B: Ranges = ((8, 16),)
MIDDLE: Ranges = ((4, 12),)


class Raced(Exception):
    """What the checks here report."""


@pytest.fixture
def clocks() -> ClockCheck:
    return ClockCheck(["copy", "compute"], Raced)


def write(clocks: ClockCheck, lane: int, ranges: Ranges, label: str = "w") -> None:
    clocks.operate(lane, [(1, ranges, True, None)], label)


def read(clocks: ClockCheck, lane: int, ranges: Ranges, label: str = "r") -> None:
    clocks.operate(lane, [(1, ranges, False, None)], label)


def test_a_read_after_a_recorded_write_is_in_order(clocks: ClockCheck) -> None:
    """Compute waits for the copy's event, then reads."""
    write(clocks, COPY, A)
    clocks.wait(COMPUTE, clocks.mark(COPY))
    read(clocks, COMPUTE, A)


def test_a_read_with_no_wait_is_a_race(clocks: ClockCheck) -> None:
    """The control: the words name both operations, both queues and the bytes."""
    write(clocks, COPY, A, "history")
    with pytest.raises(Raced, match=r"compute reads 4 bytes at 0x4 in 'attend'.*after 'history', which writes .* copy"):
        read(clocks, COMPUTE, MIDDLE, "attend")


def test_a_write_after_an_unordered_read_is_a_race(clocks: ClockCheck) -> None:
    """A slot is filled again while attention may still read it."""
    read(clocks, COMPUTE, A)
    with pytest.raises(Raced):
        write(clocks, COPY, A)


def test_two_unordered_writes_are_a_race(clocks: ClockCheck) -> None:
    """Two offloads into one host block."""
    write(clocks, COMPUTE, A)
    with pytest.raises(Raced):
        write(clocks, COPY, A)


def test_two_unordered_reads_are_none(clocks: ClockCheck) -> None:
    """Any number of queues may read one history."""
    read(clocks, COMPUTE, A)
    read(clocks, COPY, A)


def test_other_bytes_are_none_of_it(clocks: ClockCheck) -> None:
    """Neighbouring rows of one pool are told apart to the byte."""
    write(clocks, COPY, A)
    read(clocks, COMPUTE, B)


def test_other_memory_is_none_of_it(clocks: ClockCheck) -> None:
    """Equal addresses under another key cannot meet."""
    write(clocks, COPY, A)
    clocks.operate(COMPUTE, [(2, A, False, None)], "r")


def test_one_queue_is_in_order_by_itself(clocks: ClockCheck) -> None:
    """No event is needed within a queue."""
    write(clocks, COPY, A)
    write(clocks, COPY, A)
    read(clocks, COPY, A)


def test_a_mark_taken_before_the_write_orders_nothing_after_it(clocks: ClockCheck) -> None:
    """An event recorded one operation too early: the write behind it still races."""
    mark = clocks.mark(COPY)
    write(clocks, COPY, A)
    clocks.wait(COMPUTE, mark)
    with pytest.raises(Raced):
        read(clocks, COMPUTE, A)


def test_order_carries_over_a_third_queue() -> None:
    """Copy, then compute, then write-back: the last comes after the first."""
    clocks = ClockCheck(["copy", "compute", "back"], Raced)
    write(clocks, COPY, A)
    clocks.wait(COMPUTE, clocks.mark(COPY))
    clocks.wait(2, clocks.mark(COMPUTE))
    write(clocks, 2, A)


def test_what_the_host_saw_done_orders_what_it_submits_later(clocks: ClockCheck) -> None:
    """Retirement: the host polled the event, so its next submissions come after."""
    read(clocks, COMPUTE, A)
    clocks.observe(clocks.mark(COMPUTE))
    write(clocks, COPY, A)


def test_the_host_reads_only_what_it_saw_done(clocks: ClockCheck) -> None:
    """A token is read after its event was polled, not before."""
    write(clocks, COMPUTE, A)
    mark = clocks.mark(COMPUTE)
    with pytest.raises(Raced, match="host reads"):
        clocks.host([(1, A, False, None)], "token")
    clocks.observe(mark)
    clocks.host([(1, A, False, None)], "token")


def test_the_host_writes_only_what_no_copy_reads(clocks: ClockCheck) -> None:
    """A step's table in a reused pinned buffer, overwritten while its copy runs (TensorRT-LLM 15546)."""
    read(clocks, COPY, A, "table")
    with pytest.raises(Raced, match="host writes"):
        clocks.host([(1, A, True, None)], "the next table")


def test_a_race_behind_a_covering_write_is_still_found(clocks: ClockCheck) -> None:
    """Forgetting what a later write covers hides nothing: the later one races too."""
    write(clocks, COPY, A)
    write(clocks, COPY, A)
    assert clocks.live == 1
    with pytest.raises(Raced):
        read(clocks, COMPUTE, A)


def test_memory_of_accesses_stays_bounded(clocks: ClockCheck) -> None:
    """A long run forgets what the host has seen over."""
    for index in range(5_000):
        read(clocks, COMPUTE, ((index * 8, index * 8 + 8),))
        if index % 50 == 0:
            clocks.observe(clocks.mark(COMPUTE))
    assert clocks.live < 600


@st.composite
def disjoint(draw: st.DrawFn) -> Ranges:
    cuts = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=12)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@given(one=disjoint(), other=disjoint())
def test_overlap_is_exact(one: Ranges, other: Ranges) -> None:
    """The two-pointer walk finds a common byte exactly where sets of bytes have one."""
    left, right = ({byte for low, high in ranges for byte in range(low, high)} for ranges in (one, other))
    common = overlap(one, other)
    assert (common is not None) == bool(left & right)
    if common is not None:
        assert set(range(*common)) <= left & right


@given(one=disjoint(), other=disjoint())
def test_covers_never_claims_too_much(one: Ranges, other: Ranges) -> None:
    """What is forgotten as covered really is."""
    left, right = ({byte for low, high in ranges for byte in range(low, high)} for ranges in (one, other))
    if covers(one, other):
        assert right <= left
