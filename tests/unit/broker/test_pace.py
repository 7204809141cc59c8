"""A rate that people and forecasts can use: steady under uneven looks, quick to follow, never negative."""

from __future__ import annotations

import pytest

from broker.pace import Pace


def test_a_steady_total_has_its_rate_however_it_is_looked_at() -> None:
    """Looks close together, as beats come when credit returns, move nothing. Control: the last two alone would."""
    pace, now, last = Pace(2.0), 100.0, (0.0, 0.0)
    for gap in (1.0, 0.01, 1.0, 0.02, 0.98):
        now += gap
        total = 30.0 * int(now)  # it is counted a second at a time
        between = (total - last[0]) / (now - last[1])
        last = total, now
        pace.see(total, now)
    assert pace.a_second == pytest.approx(30.0, rel=0.4)
    assert between == pytest.approx(30.0 / 0.98) or between == 0.0
    assert Pace(2.0).a_second == 0.0


def test_what_was_is_forgotten() -> None:
    """A job that stands still is soon forecast as one."""
    pace = Pace(60.0)
    for second in range(0, 600, 10):
        pace.see(second * 2.0, float(second))
    assert pace.a_second == pytest.approx(2.0)
    for second in range(600, 1200, 10):
        pace.see(1180.0, float(second))
    assert 0 < pace.a_second < 0.02


def test_a_total_that_begins_again_is_no_loss_and_no_gain() -> None:
    """A worker's engine counts from 0 after a restart; the clock may stand still."""
    pace = Pace(1.0)
    pace.see(1_000.0, 1.0)
    pace.see(0.0, 2.0)
    assert pace.a_second == 0.0
    pace.see(5.0, 2.0)
    pace.see(5.0, 1.5)
    assert pace.a_second == 0.0
    pace.see(5.0, 3.0)
    assert pace.a_second > 0.0
