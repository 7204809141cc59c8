"""How long a worker waits between logins (D2)."""

from __future__ import annotations

import pytest

from common import limits
from worker.backoff import Backoff


def pauses(backoff: Backoff, now: float, count: int) -> list[float]:
    found = []
    for _ in range(count):
        backoff.failed(now)
        found.append(backoff.retry_at - now)
        now = backoff.retry_at
    return found


def test_pauses_double_up_to_half_a_second_in_the_first_minute() -> None:
    """A broker that restarts in ten seconds sees every worker again well within its grace."""
    found = pauses(Backoff(lambda: 1.0, 0.0), 0.0, 10)
    assert found[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert max(found) <= limits.BACKOFF_MAX_EARLY_S


def test_a_long_outage_is_asked_less_often() -> None:
    """A broker away for a night is not hammered by its whole fleet."""
    found = pauses(Backoff(lambda: 1.0, 0.0), 0.0, 200)
    assert found[-1] == limits.BACKOFF_MAX_S


def test_chance_spreads_a_fleet() -> None:
    """A hundred workers lose one broker at the same moment and do not all come back in the same one."""
    assert pauses(Backoff(lambda: 0.0, 0.0), 0.0, 1) == [limits.BACKOFF_FIRST_S / 2]


def test_a_session_that_stood_begins_anew() -> None:
    """The second outage of a day is as new as the first."""
    backoff = Backoff(lambda: 1.0, 0.0)
    pauses(backoff, 0.0, 200)
    backoff.succeeded()
    backoff.failed(1e6)
    assert abs(backoff.retry_at - 1e6 - limits.BACKOFF_FIRST_S) < 1e-6


def test_nothing_wrong_with_the_broker_is_the_first_pause() -> None:
    """UNKNOWN after a restart behind a proxy: back at once."""
    backoff = Backoff(lambda: 1.0, 0.0)
    pauses(backoff, 0.0, 5)
    backoff.failed(100.0, at_once=True)
    assert abs(backoff.retry_at - 100.0 - limits.BACKOFF_FIRST_S) < 1e-6


def test_a_try_at_one_of_two_endpoints_is_short_at_first_and_never_longer_than_a_handshake() -> None:
    """The name of a broker that is gone resolves to nothing and says nothing: its standby is asked a second later. A
    link that needs longer gets longer: each round over all endpoints doubles it."""
    backoff = Backoff(lambda: 1.0, 0.0)
    allowed = []
    for _ in range(8):
        allowed.append(backoff.connect_s(2))
        backoff.failed(0.0)
    assert allowed == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    assert backoff.connect_s(2) == limits.CONNECT_S
