"""The broker's check of its own books: every way they can disagree is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.state import State
from common.errors import InvariantError
from common.ids import LineId
from tests.unit.broker.kit import JOB, fresh, give, log_in, running_job


def busy() -> State:
    """A job with one assigned and two waiting lines."""
    state = fresh()
    running_job(state, 3)
    give(state, log_in(state), lines=1)
    state.check()
    return state


def close(state: State) -> None:
    state.jobs[JOB].status = "completed"


def lose_count(state: State) -> None:
    state.jobs[JOB].completed = 9


def wait_and_run(state: State) -> None:
    state.jobs[JOB].windows["m"].add(state.jobs[JOB].assigned[0])


def no_attempt(state: State) -> None:
    state.jobs[JOB].assigned[0].held = 0


def unawaited(state: State) -> None:
    state.jobs[JOB].assigned[0].session = None


def not_in_session(state: State) -> None:
    state.sessions[b"p"].lines.clear()


def in_session_only(state: State) -> None:
    state.jobs[JOB].assigned.clear()


def two_sessions(state: State) -> None:
    state.sessions[b"q"] = state.sessions[b"p"]


def nobody(state: State) -> None:
    state.by_worker["v"] = next(iter(state.by_worker.values()))


@pytest.mark.parametrize(
    "harm",
    [close, lose_count, wait_and_run, no_attempt, unawaited, not_in_session, in_session_only, two_sessions, nobody],
    ids=lambda harm: harm.__name__,
)
def test_books_that_disagree_are_found(harm: Callable[[Any], None]) -> None:
    """A bug of ours stops a test at the input that made it, not a thousand inputs later."""
    state = busy()
    harm(state)
    with pytest.raises(InvariantError):
        state.check()


def test_lines_are_found_wherever_they_are() -> None:
    """Assigned, waiting in a window, or not in memory at all."""
    state = busy()
    assert state.find(LineId(JOB, 0)) is state.jobs[JOB].assigned[0]
    assert state.find(LineId(JOB, 2)) is state.jobs[JOB].windows["m"].lines[2]
    assert state.find(LineId(JOB, 9)) is None
    assert state.find(LineId("x", 0)) is None
