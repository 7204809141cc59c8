"""When an engine counts as stalled (S2), and when it does not."""

from __future__ import annotations

from common import limits
from worker.inputs import Snapshot
from worker.watch import StallWatch


def test_progress_of_any_kind_is_progress() -> None:
    """Steps without a finished token: a prompt of a million tokens is being read."""
    watch = StallWatch(0.0)
    for second in range(500):
        watch.see(Snapshot(steps=second), 1, float(second))
    assert watch.stalled(500.0) == ""


def test_held_work_without_progress_is_a_stall() -> None:
    """A wedged driver."""
    watch = StallWatch(0.0)
    for second in range(int(limits.STALL_S) + 3):
        watch.see(Snapshot(steps=5, tokens=9), 2, float(second))
    assert "2 lines" in watch.stalled(limits.STALL_S + 2)


def test_an_idle_engine_does_not_stall() -> None:
    """Nothing to do for a week."""
    watch = StallWatch(0.0)
    for second in range(0, 700_000, 4):
        watch.see(Snapshot(steps=5), 0, float(second))
    assert watch.stalled(700_000.0) == ""
    watch.see(Snapshot(steps=5), 1, 700_001.0)
    assert watch.stalled(700_002.0) == "", "the clock starts with the work"


def test_a_slow_step_whose_layers_go_by_is_awaited() -> None:
    """One step of a million-token history over a slow link takes minutes."""
    watch = StallWatch(0.0)
    for second in range(600):
        watch.see(Snapshot(steps=5, layers=second // 60), 1, float(second))
    assert watch.stalled(600.0) == ""


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """SIGSTOP and SIGCONT."""
    watch = StallWatch(0.0)
    watch.see(Snapshot(steps=5), 1, 1.0)
    watch.see(Snapshot(steps=5), 1, 2.0)
    assert watch.see(Snapshot(steps=5), 1, 1000.0)
    assert watch.stalled(1000.0) == ""
    assert watch.idle_s(1003.0) < 10
