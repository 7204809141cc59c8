"""The watchdog of R6 speaks when a ring is stuck for good, once, and keeps still while results are on their way."""

from __future__ import annotations

from ring.accounting import Accounting, Finding
from ring.stall_control import PaddingForgotten, run_equal_batches
from ring.watch import RingWatch


def _finding(items: int) -> Finding:
    return Finding(items, 0, 64, 8, ())


def test_what_lasts_is_told_once() -> None:
    """The published stall: seen at once, told after five seconds, one log line and not one a poll."""
    stalled = run_equal_batches(PaddingForgotten(65_536, 1024), 640, 100_000).finding
    watch = RingWatch()
    told = [watch.see(stalled, progress=25_908, now=100 + tenth / 10) for tenth in range(100)]
    assert [index for index, finding in enumerate(told) if finding] == [50]
    assert told[50] is stalled


def test_progress_begins_the_time_anew() -> None:
    """Short answers one after another: every moment looks stuck, and none lasts."""
    watch = RingWatch(bound_s=5.0)
    for second in range(60):
        assert watch.see(_finding(3), progress=second // 4, now=second) is None
    for second in range(60):
        assert watch.see(_finding(100 - second // 4), progress=0, now=100 + second) is None


def test_work_in_between_begins_the_time_anew_and_lets_it_speak_again() -> None:
    """A ring that got stuck, was helped and gets stuck again is told twice."""
    watch = RingWatch(bound_s=5.0)
    told = []
    for second in range(30):
        finding = None if second == 10 else _finding(1)
        if watch.see(finding, progress=0, now=second):
            told.append(second)
    assert told == [5, 16]


def test_a_healthy_ring_is_never_told() -> None:
    """The other side of the control: the same work with its padding given back."""
    watch = RingWatch()
    healthy = run_equal_batches(Accounting(65_536, 1024), 640, 1_000).finding
    assert all(watch.see(healthy, progress=0, now=float(second)) is None for second in range(100))
