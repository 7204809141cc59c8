"""A job's machine, pair by pair, and what its owner may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from broker import jobs
from broker.effects import AppendInput, NewJob, Query, SaveJob, SealInput
from broker.inputs import Checked, ClosedJob, InputFailed, Now, Tick, WaitingEnded
from broker.state import CLOSED, OPEN, Job
from common import limits, messages
from common.errors import InvariantError
from common.messages import Problem
from tests.unit.broker.kit import JOB, NOW, came, feed, fresh, give, later, log_in, running_job, said, wrote

WHAT = ("seal", "pass", "fail", "cancel", "expire", "settle")
SHA = "a" * 64


def submit(size: int = 10, **changes: Any) -> messages.Submit:
    fields = {
        "request": 1, "job": JOB, "name": "n", "size": size, "sha256": SHA, "lenient": False, "priority": 0,
        "window_s": 0, "model": "",
    }  # fmt: skip
    return messages.Submit(**{**fields, **changes})  # type: ignore[arg-type]


def checked(**changes: Any) -> Checked:
    fields: dict[str, Any] = {
        "job": JOB, "lines": 1, "good": 1, "problems": 0, "bad_stored": 0, "models": ("m",), "checked_bytes": 10,
        "ended": True, "sha256_fits": True,
    }  # fmt: skip
    return Checked(**{**fields, **changes})


@pytest.mark.parametrize("status", [*OPEN, *CLOSED])
@pytest.mark.parametrize("what", WHAT)
def test_each_pair_of_status_and_input(status: str, what: str) -> None:
    """What the table has happens, and the rest raises and changes nothing."""
    job = Job(JOB, 1, "", "n", 1, SHA, False, 0, 0, "", 0.0, status=status)
    target = jobs.TRANSITIONS.get((status, what))
    if target is None:
        with pytest.raises(InvariantError, match="cannot happen"):
            jobs.move(job, what)
        assert job.status == status
    else:
        assert jobs.move(job, what) == (target != status)
        assert job.status == target


def test_every_open_status_leads_to_an_end() -> None:
    """No job is stuck in a status that nothing leaves."""
    for status in OPEN:
        assert {target for (source, _), target in jobs.TRANSITIONS.items() if source == status} - {status}
    assert not {source for source, _ in jobs.TRANSITIONS} & set(CLOSED)


def test_a_job_from_announcement_to_validation() -> None:
    """Submit, two pieces, seal: what is missing is asked for, the file is synced before anyone hears of it."""
    state = fresh()
    step = feed(state, came(submit()))
    assert wrote(step, NewJob)
    assert said(step, messages.Need)[0].offset == 0
    step = feed(state, came(messages.Seal(2, JOB)))
    assert said(step, messages.Need)[0].offset == 0
    feed(state, came(messages.Chunk(3, JOB, 0, b"12345")))
    step = feed(state, came(messages.Chunk(4, JOB, 5, b"67890")))
    assert wrote(step, AppendInput)[0].offset == 5
    assert said(step, messages.Need)[0].offset == 10
    step = feed(state, came(messages.Seal(5, JOB)))
    assert wrote(step, SealInput)
    assert state.jobs[JOB].status == "validating"
    step = feed(state, came(messages.Seal(6, JOB)))
    assert not wrote(step, SealInput)
    assert any(isinstance(send, Query) for send in step.sends)


def test_submitting_again_is_the_same_job() -> None:
    """The client lost the answer and asks again: nothing starts twice, and the upload goes on where it was."""
    state = fresh()
    feed(state, came(submit()))
    feed(state, came(messages.Chunk(3, JOB, 0, b"12345")))
    step = feed(state, came(submit(request=9)))
    assert not wrote(step, NewJob)
    assert said(step, messages.Need)[0].offset == 5
    step = feed(state, came(messages.Chunk(4, JOB, 0, b"12345")))
    assert not wrote(step, AppendInput)
    assert said(step, messages.Need)[0].offset == 5


@pytest.mark.parametrize("changes", [{"sha256": "b" * 64}, {"size": 11}])
def test_the_same_id_with_another_input_is_refused(changes: dict[str, Any]) -> None:
    """Two different files must not become one job, whether it is open or over."""
    state = fresh()
    closed = ClosedJob("", 10, SHA)
    assert said(feed(state, came(submit(**changes), closed=closed)), messages.Failure)[0].code == "job_exists"
    feed(state, came(submit()))
    assert said(feed(state, came(submit(**changes))), messages.Failure)[0].code == "job_exists"
    assert said(feed(state, came(submit(), user="other")), messages.Failure)[0].code == "job_exists"


def test_submitting_a_finished_job_again_asks_for_nothing() -> None:
    """``haulier submit --job-id`` in a script that is run again: the job is there, sealed and over."""
    step = feed(fresh(), came(submit(), closed=ClosedJob("", 10, SHA)))
    assert said(step, messages.Need)[0].offset == 10
    assert not step.writes


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"job": "x"}, "bad_job_id"), ({"sha256": "x"}, "bad_sha256"), ({"size": 10**12}, "disk_reserve")],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(changes: dict[str, Any], code: str) -> None:
    """A malformed announcement, or one that would eat the disk kept for results."""
    state = fresh(disk_reserve=1)
    step = feed(state, came(submit(**changes)))
    assert said(step, messages.Failure)[0].code == code
    assert not state.jobs


def test_announced_inputs_count_against_the_disk() -> None:
    """Two uploads begun at once must not together eat what one of them could have had."""
    state = fresh(disk_free=25, disk_reserve=1)
    feed(state, came(submit(size=20)))
    other = "00000000-0000-4000-8000-000000000002"
    assert said(feed(state, came(submit(size=20, job=other))), messages.Failure)[0].code == "disk_reserve"


def test_more_input_than_announced_is_refused() -> None:
    """A file that grew while it was sent."""
    state = fresh()
    feed(state, came(submit()))
    assert said(feed(state, came(messages.Chunk(2, JOB, 0, b"x" * 11))), messages.Failure)[0].code == "too_much_input"


def test_a_full_disk_tells_the_client_and_keeps_the_offset() -> None:
    """The piece was not written: the upload can go on from where it truly is."""
    state = fresh()
    feed(state, came(submit()))
    feed(state, came(messages.Chunk(2, JOB, 0, b"12345")))
    step = feed(state, InputFailed(JOB, 0, b"p", 2, "No space left on device"))
    assert "No space left" in said(step, messages.Failure)[0].message
    assert state.jobs[JOB].received == 0


def validating(lenient: bool = False) -> Any:
    state = fresh()
    feed(state, came(submit(lenient=lenient)))
    feed(state, came(messages.Chunk(2, JOB, 0, b"x" * 10)))
    feed(state, came(messages.Seal(3, JOB)))
    return state


def test_a_good_file_starts() -> None:
    """Every line is fine: lines wait from now on."""
    state = validating()
    feed(state, checked(ended=False))
    assert state.jobs[JOB].status == "validating"
    feed(state, checked(lines=2, good=2))
    job = state.jobs[JOB]
    assert (job.status, job.good, job.waiting, job.lines_read) == ("in_progress", 3, 3, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha256_fits": False}, "sha256_mismatch"),
        ({"lines": 0, "good": 0, "models": ()}, "empty_file"),
        ({"lines": 3, "problems": 2, "first_problem": Problem(2, "url_mismatch", "no")}, "2 of 3 lines are bad"),
    ],
)
def test_a_bad_file_fails_and_nothing_runs(changes: dict[str, Any], words: str) -> None:
    """Strict as the service: one bad line, and the job fails with the first of them in words."""
    state = validating()
    job = state.jobs[JOB]
    step = feed(state, checked(**changes))
    assert job.status == "failed"
    assert words in job.reason
    assert JOB not in state.jobs
    assert wrote(step, SaveJob)


def test_lenient_runs_the_good_lines() -> None:
    """--lenient: bad lines have their error line already and count as failed, the others run."""
    state = validating(lenient=True)
    feed(state, checked(lines=3, good=2, problems=1, bad_stored=1))
    job = state.jobs[JOB]
    assert (job.status, job.total, job.failed, job.waiting) == ("in_progress", 3, 1, 2)


def test_lenient_with_no_good_line_completes_with_failures_that_show() -> None:
    """``completed`` with every line failed must not read as success (cases 17)."""
    state = validating(lenient=True)
    job = state.jobs[JOB]
    feed(state, checked(lines=1, good=0, problems=1, bad_stored=1, models=()))
    feed(state, Tick(10**12))
    assert job.status == "completed"
    assert job.reason == "1 of 1 lines failed"
    assert jobs.info(job, 1, 0, "").failed == 1


def test_cancel_before_anything_ran_closes_at_once() -> None:
    """Ctrl-C during the upload or while the file is checked."""
    for state in (validating(),):
        job = state.jobs[JOB]
        feed(state, came(messages.CancelJob(9, JOB)))
        assert job.status == "cancelled"
        assert not state.jobs
        feed(state, checked())  # a slice that was under way comes too late


def test_cancel_while_running_stops_workers_and_accounts_for_every_line() -> None:
    """What waits gets its error line, what runs is told to stop, and only then is the job over."""
    state = fresh()
    job = running_job(state, 4)
    session = log_in(state)
    refs = give(state, session, lines=2)
    step = feed(state, came(messages.CancelJob(9, JOB)))
    assert set(said(step, messages.CancelLines)[0].lines) == set(refs)
    assert jobs.work_wanted(state) == [job]
    feed(state, WaitingEnded(JOB, 2, False))
    feed(state, Tick(10**12))
    assert job.status == "cancelling"
    feed(state, came(messages.Bye(session.fence, "x", refs)))
    assert not job.waiting_ended
    feed(state, WaitingEnded(JOB, 2, False))
    feed(state, Tick(10**12))
    assert (job.status, job.failed) == ("cancelled", 4)


def test_a_window_that_ends_expires_the_job() -> None:
    """--window 24h: at its end nothing more starts, and lines say batch_expired; the wall clock is not asked."""
    state = fresh()
    job = running_job(state, 2, window_s=60, deadline=NOW.mono + 60)
    feed(state, Tick(10**12), later(59))
    assert job.status == "in_progress"
    feed(state, Tick(10**12), later(60))
    assert job.status == "expiring"
    assert jobs.ENDS_LINES["expiring"][0] == "batch_expired"
    feed(state, WaitingEnded(JOB, 2, False))
    feed(state, Tick(10**12), later(61))
    assert job.status == "expired"


def test_others_jobs_cannot_be_touched() -> None:
    """Jobs belong to the key that submitted them; an admin's key may do all."""
    state = fresh()
    job = running_job(state, 1, owner="alice")
    step = feed(state, came(messages.CancelJob(9, JOB), user="bob"))
    assert job.status == "in_progress"
    assert isinstance(step.sends[0], Query)
    feed(state, came(messages.CancelJob(9, JOB), user="root", admin=True))
    assert job.status == "cancelling"


def test_lines_ended_for_a_job_that_does_not_end_are_a_bug() -> None:
    """The shell must not be able to end lines of a running job."""
    state = fresh()
    running_job(state, 1)
    with pytest.raises(InvariantError, match="does not end"):
        feed(state, WaitingEnded(JOB, 1, False))


def test_closing_with_lines_unaccounted_for_is_a_bug() -> None:
    """D4's last guard in the rules."""
    state = fresh()
    job = running_job(state, 1, status="cancelling", waiting_ended=True)
    job.windows.clear()
    with pytest.raises(InvariantError, match="unaccounted"):
        feed(state, Tick(10**12))


# ----------------------------------------------------------------------------------------------------------- clocks


def test_a_windows_length_outlives_a_clock_that_jumps() -> None:
    """The wall clock is set an hour ahead, or the machine sleeps for an hour: the job still has the time it asked for,
    and the shift is written down for the next broker."""
    state = fresh()
    job = running_job(state, 2, window_s=100, deadline=NOW.mono + 100.0)
    feed(state, Tick(10**12), NOW)
    before = job.expires_at
    step = feed(state, Tick(10**12), Now(NOW.mono + 50, NOW.wall + 3650))
    assert job.expires_at == before + 3600
    assert job.status == "in_progress"
    assert [one.job for one in wrote(step, SaveJob)] == [job]
    assert [note.kind for note in step.notes if note.kind == "clock_jumped"] == ["clock_jumped"]
    feed(state, Tick(10**12), Now(NOW.mono + 99.9, NOW.wall + 3699.9))
    assert job.status == "in_progress"
    feed(state, Tick(10**12), Now(NOW.mono + 100, NOW.wall + 3700))
    assert JOB not in state.jobs or state.jobs[JOB].status == "expiring"


def test_a_clock_that_is_slewed_shifts_nothing() -> None:
    """NTP corrects a few seconds: deadlines stay where they are, and nothing is logged."""
    state = fresh()
    job = running_job(state, 2, window_s=1000, deadline=NOW.mono + 1000.0)
    feed(state, Tick(10**12), NOW)
    step = feed(state, Tick(10**12), Now(NOW.mono + 50, NOW.wall + 50 + limits.CLOCK_JUMP_S))
    assert job.shift_s == 0.0
    assert not step.notes
    feed(state, Tick(10**12), Now(NOW.mono + 51, NOW.wall + 52 + limits.CLOCK_JUMP_S))
    assert job.shift_s == 1 + limits.CLOCK_JUMP_S


def test_an_input_that_stopped_coming_gives_its_disk_back() -> None:
    """A laptop closed in the middle of an upload: what it was promised is others' after a day, and not before."""
    state = fresh(disk_free=100)
    feed(state, came(submit(80)))
    feed(state, came(messages.Chunk(2, JOB, 0, b"x" * 10)), later(10))
    other = submit(50, job="00000000-0000-4000-8000-000000000002")
    almost = later(10 + limits.UPLOAD_PATIENCE_S - 1)
    feed(state, came(messages.Chunk(3, JOB, 0, b"")), almost)
    feed(state, Tick(100), almost)
    assert said(feed(state, came(other), almost), messages.Failure)[0].code == "disk_reserve"
    late = later(10 + limits.UPLOAD_PATIENCE_S)
    step = feed(state, Tick(100), late)
    saved = wrote(step, SaveJob)[-1].job
    assert (saved.status, "nothing more of its input came for 24 hours" in saved.reason) == ("expired", True)
    assert said(feed(state, came(other), late), messages.Need)


def test_a_line_that_ends_with_its_job_is_told_what_is_known_of_it() -> None:
    """In life: a job is cancelled with lines in every place; of those nobody answers for, only that they were out."""
    assert jobs.cut_short("it ended", 0) == "it ended before this line ran"
    assert jobs.cut_short("it ended", 1) == "it ended before this line had an answer; it had been given out once"
    assert jobs.cut_short("it ended", 3).endswith("it had been given out 3 times")
