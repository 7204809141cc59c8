"""Claims and the grace (D3): the broker believes durable facts and what workers say they hold, nothing else."""

from __future__ import annotations

import pytest

from broker.effects import AssignLine, EndAttempt, ReturnLine
from broker.inputs import Tick
from broker.state import Line, State
from common import messages
from common.messages import HeldLine, LineRef
from tests.unit.broker.kit import (
    JOB,
    NOW,
    STORE,
    came,
    ended,
    feed,
    fresh,
    give,
    hello,
    later,
    log_in,
    running_job,
    said,
    waiting,
    wrote,
)  # fmt: skip

DISK = Tick(10**12)
GRACE = 30.0


def restarted(*held: tuple[int, str], lines: int = 4) -> State:
    """A broker that has just come back: each of ``held`` is assigned to a worker that is not here yet."""
    state = fresh(grace_until=NOW.mono + GRACE)
    job = running_job(state, lines)
    for index, worker in held:
        line = job.windows["m"].lines[index]
        job.windows["m"].drop(index)
        line.attempt = line.held = 1
        line.worker = worker
        job.assigned[index] = line
        state.absent.add(worker)
    state.check()
    return state


def listed(index: int, how: str = "running", attempt: int = 1, job: str = JOB) -> HeldLine:
    return HeldLine(LineRef(job, index, attempt), how)


def verdicts(step: object) -> dict[int, str]:
    return {one.ref.index: one.verdict for welcome in said(step, messages.Welcome) for one in welcome.verdicts}  # type: ignore[arg-type]


def test_claimed_lines_are_kept_and_finished_ones_asked_for() -> None:
    """The broker was killed while a worker was busy: nothing it holds runs again."""
    state = restarted((0, "w"), (1, "w"))
    step = feed(state, came(hello(held=(listed(0), listed(1, "finished")))))
    assert verdicts(step) == {0: "keep", 1: "send"}
    assert {line.session for line in state.jobs[JOB].assigned.values()} == {state.sessions[b"p"]}
    assert not wrote(step, ReturnLine)


def test_assigned_lines_that_are_not_listed_wait_again_at_once() -> None:
    """The BATCH died with the broker: no reason to wait for the grace, and nobody is to blame."""
    state = restarted((0, "w"), (1, "w"))
    step = feed(state, came(hello(held=(listed(0),))))
    assert [write.idx for write in wrote(step, ReturnLine)] == [1]
    assert wrote(step, EndAttempt)[0].how == "unlisted"
    assert next(iter(state.jobs[JOB].windows["m"].lines)) == 1


def test_unclaimed_lines_wait_for_the_grace_and_no_longer() -> None:
    """The worker never comes back: after the grace its lines go to others."""
    state = restarted((0, "gone"))
    feed(state, DISK, later(GRACE - 1))
    assert len(state.jobs[JOB].assigned) == 1
    step = feed(state, DISK, later(GRACE))
    assert wrote(step, EndAttempt)[0].how == "unclaimed"
    assert not state.jobs[JOB].assigned
    assert state.grace_until == 0


def test_the_grace_ends_early_when_everybody_is_back() -> None:
    """All workers that held lines have logged in: nothing is left to wait for."""
    state = restarted((0, "w"), (1, "v"))
    feed(state, came(hello(held=(listed(0),))))
    feed(state, DISK, later(1))
    assert state.grace_until
    feed(state, came(hello(worker="v", held=(listed(1),)), b"q"))
    feed(state, DISK, later(1))
    assert state.grace_until == 0


def test_control_without_the_grace_a_claim_comes_too_late() -> None:
    """Control: with no grace the line has gone to somebody else, and the worker's work is cancelled."""
    state = restarted((0, "w"), lines=1)
    state.grace_until = NOW.mono
    other = log_in(state, b"q", worker="v")
    feed(state, DISK)
    assert give(state, other)
    step = feed(state, came(hello(held=(listed(0),))))
    assert verdicts(step) == {0: "cancel"}


def test_a_late_claim_wins_if_the_line_still_waits() -> None:
    """After the grace, before anyone else got the line: the work done so far is not thrown away."""
    state = restarted((0, "w"))
    feed(state, DISK, later(GRACE))
    step = feed(state, came(hello(held=(listed(0),)), facts={LineRef(JOB, 0, 1).line: waiting(0)}))
    assert verdicts(step) == {0: "keep"}
    assert wrote(step, AssignLine)[0][:3] == (1, 1, "w")


def test_a_late_claim_of_a_line_that_is_not_in_memory() -> None:
    """A long job: the line waits in the store only, beyond the window."""
    state = fresh()
    job = running_job(state, 4)
    job.windows["m"].drop(3)
    step = feed(state, came(hello(held=(listed(3),)), facts={LineRef(JOB, 3, 1).line: waiting(3)}))
    assert verdicts(step) == {3: "keep"}
    assert job.assigned[3].session is state.sessions[b"p"]


@pytest.mark.parametrize(("how", "word"), [("running", "cancel"), ("finished", "stored")])
def test_lines_that_have_ended(how: str, word: str) -> None:
    """The ack was lost, or somebody else was first: it is durable, so it may be dropped."""
    state = fresh()
    running_job(state, 4)
    step = feed(state, came(hello(held=(listed(0, how, attempt=2),)), facts={LineRef(JOB, 0, 2).line: ended(0)}))
    assert verdicts(step) == {0: word}
    assert bool(wrote(step, EndAttempt)) == (how == "finished")


@pytest.mark.parametrize(("how", "word"), [("running", "cancel"), ("finished", "send")])
def test_lines_that_another_worker_holds(how: str, word: str) -> None:
    """Two workers have the same line: a finished one is still wanted, the first durable result wins."""
    state = fresh()
    running_job(state, 1)
    other = log_in(state, b"q", worker="v")
    give(state, other)
    step = feed(state, came(hello(held=(listed(0, how),))))
    assert verdicts(step) == {0: word}
    assert state.jobs[JOB].assigned[0].session is other


def test_a_later_grant_that_never_arrived_gives_way_to_the_attempt_that_runs() -> None:
    """The worker works on attempt 1; attempt 2 was given to it in a BATCH that was lost: attempt 1 goes on."""
    state = restarted((0, "w"))
    line = state.jobs[JOB].assigned[0]
    line.attempt = line.held = 2
    step = feed(state, came(hello(held=(listed(0, attempt=1),))))
    assert verdicts(step) == {0: "keep"}
    assert line.held == 1
    assert line.attempt == 2


def test_lines_nobody_knows_are_cancelled() -> None:
    """A deleted job, or an attempt that was never given out."""
    state = fresh()
    running_job(state, 1)
    facts = {LineRef(JOB, 9, 1).line: None, LineRef(JOB, 0, 5).line: waiting(0, attempt=1)}
    step = feed(state, came(hello(held=(listed(9), listed(0, attempt=5))), facts=facts))
    assert verdicts(step) == {9: "cancel", 0: "cancel"}


@pytest.mark.parametrize(("how", "word", "left"), [("running", "cancel", 0), ("finished", "send", 1)])
def test_claims_while_the_job_is_being_cancelled(how: str, word: str, left: int) -> None:
    """Broker restarted in the middle of a cancel: what is finished is output, what runs is stopped."""
    state = restarted((0, "w"))
    job = state.jobs[JOB]
    job.status = "cancelling"
    job.windows.clear()
    step = feed(state, came(hello(held=(listed(0, how),))))
    assert verdicts(step) == {0: word}
    assert len(job.assigned) == left
    assert not job.waiting_ended


def foreign_rows() -> tuple[State, dict[int, str]]:
    state = restarted((0, "w"))
    step = feed(state, came(hello(held=(listed(0, "finished"),), store_id="another")))
    return state, verdicts(step)


def test_rows_of_another_store_are_not_judged() -> None:
    """The broker's state was recreated: a worker's finished rows of the old store are kept there, not dropped."""
    state, found = foreign_rows()
    assert found == {}
    assert not state.jobs[JOB].assigned


def test_control_without_the_store_id_foreign_rows_are_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a broker that takes every store for its own asks for results of lines it never gave out."""
    monkeypatch.setattr("tests.unit.broker.kit.STORE", STORE)
    state = restarted((0, "w"))
    state.store_id = "another"
    step = feed(state, came(hello(held=(listed(0, "finished"),), store_id="another")))
    assert verdicts(step) == {0: "send"}


def test_a_worker_that_comes_back_while_its_session_lives_keeps_its_lines() -> None:
    """A flapping link: login after login, and no line runs twice or is blamed (cases 6)."""
    state = fresh()
    job = running_job(state, 2)
    session = log_in(state)
    refs = give(state, session, lines=2)
    for login in range(2, 6):
        held = tuple(HeldLine(ref, "running") for ref in refs)
        step = feed(state, came(hello(login, held=held), b"p%d" % login))
        assert set(verdicts(step).values()) == {"keep"}
    assert len(job.assigned) == 2
    assert all(line.attempt == 1 and line.deaths == 0 for line in job.assigned.values())


def test_the_same_line_listed_twice_is_judged_once() -> None:
    """A worker's slip must not turn into two holders."""
    state = restarted((0, "w"))
    step = feed(state, came(hello(held=(listed(0), listed(0)))))
    assert verdicts(step) == {0: "keep"}
    assert len(said(step, messages.Welcome)[0].verdicts) == 1
    assert isinstance(state.jobs[JOB].assigned[0], Line)
