"""Who gets which line: credit, priority, fair shares, models, and the reason in words of what waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from broker import scheduler
from broker.effects import SendBatch
from broker.inputs import Loaded, Tick
from broker.state import Line, Window
from common import limits, messages
from common.messages import ModelInfo
from tests.unit.broker.kit import JOB, MODEL, beat, came, done, feed, fresh, give, log_in, result, running_job

DISK = Tick(10**12)
OTHER = "00000000-0000-4000-8000-000000000002"


def batches(step: Any) -> list[SendBatch]:
    return [send for send in step.sends if isinstance(send, SendBatch)]


def test_no_more_than_the_credit() -> None:
    """A worker says 3 lines: it gets 3, and no more until it says so again."""
    state = fresh()
    running_job(state, 10)
    session = log_in(state)
    assert len(give(state, session, lines=3)) == 3
    assert not batches(feed(state, DISK))


def test_no_more_bytes_than_the_credit() -> None:
    """Ring bytes count as well as lines."""
    state = fresh()
    running_job(state, 10)
    session = log_in(state)
    assert len(give(state, session, lines=10, size=25)) == 2


def test_credit_of_a_beat_that_crossed_a_batch() -> None:
    """The beat was written before the batch arrived: what was sent since is taken off, once."""
    state = fresh()
    running_job(state, 10)
    session = log_in(state)
    assert len(give(state, session, lines=4)) == 4
    assert len(give(state, session, lines=4, assignment=0)) == 0
    assert len(give(state, session, lines=2, assignment=1)) == 2


def test_an_idle_worker_gets_one_line_however_long() -> None:
    """A line longer than the ring grants: the worker alone can say that it does not fit, with its numbers."""
    state = fresh()
    job = running_job(state, 3)
    for line in job.windows["m"].lines.values():
        line.size = 10**6
    session = log_in(state)
    assert len(give(state, session, lines=4, size=100)) == 1


def test_a_long_line_is_not_overtaken_for_ever() -> None:
    """Short lines behind a long one wait until it went out: no convoy in either direction."""
    state = fresh()
    job = running_job(state, 5)
    job.windows["m"].lines[1].size = 500
    session = log_in(state)
    first = give(state, session, lines=4, size=100)
    assert [ref.index for ref in first] == [0]
    feed(state, came(done(session, result(first[0]))))
    assert [ref.index for ref in give(state, session, lines=4, size=100, assignment=1)] == [1]


@pytest.mark.parametrize("phase", ["loading", "draining"])
def test_only_ready_workers_get_work(phase: str) -> None:
    """Credit of a worker that loads or drains counts for nothing."""
    state = fresh()
    running_job(state, 3)
    session = log_in(state)
    assert not give(state, session, phase=phase)


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment fits into a message; a body longer than one travels alone."""
    monkeypatch.setattr(limits, "BATCH_MAX_LINES", 4)
    monkeypatch.setattr(limits, "BATCH_MAX_BYTES", 100)
    state = fresh()
    job = running_job(state, 12)
    job.windows["m"].lines[5].size = 1000
    session = log_in(state)
    feed(state, came(beat(session, 12, 10**6)))
    sent = batches(feed(state, DISK))
    assert [len(one.lines) for one in sent] == [4, 1, 1, 4, 2]
    assert [one.assignment for one in sent] == sorted(one.assignment for one in sent)


def test_work_is_spread_over_workers() -> None:
    """Two workers with the same credit share a job."""
    state = fresh()
    running_job(state, 200)
    first, second = log_in(state), log_in(state, b"q", worker="v")
    feed(state, came(beat(first, 100, 10**6)))
    feed(state, came(beat(second, 100, 10**6), b"q"))
    feed(state, DISK)
    assert (len(first.lines), len(second.lines)) == (100, 100)


def test_priority_goes_first() -> None:
    """--priority: a higher one takes all credit while it has lines."""
    state = fresh()
    running_job(state, 10)
    running_job(state, 10, OTHER, priority=1)
    session = log_in(state)
    assert {ref.job for ref in give(state, session, lines=10)} == {OTHER}


def test_a_priority_gets_nobody_ahead_of_another_key() -> None:
    """A tenant that writes --priority 1000000 on everything still has one share."""
    state = fresh()
    running_job(state, 100, owner="modest")
    running_job(state, 100, OTHER, owner="loud", priority=1_000_000)
    session = log_in(state)
    got: Counter[str] = Counter()
    for number in range(40):
        refs = give(state, session, lines=1, assignment=number)
        got.update(ref.job for ref in refs)
        feed(state, came(done(session, *[result(ref) for ref in refs])))
    assert got == {JOB: 20, OTHER: 20}


def test_a_keys_weight_is_its_share() -> None:
    """haulier keys add night --weight 0.25: one line in five while somebody else wants the fleet too."""
    state = fresh(weights={"night": 0.25})
    running_job(state, 100, owner="day")
    running_job(state, 100, OTHER, owner="night")
    session = log_in(state)
    got: Counter[str] = Counter()
    for number in range(50):
        refs = give(state, session, lines=1, assignment=number)
        got.update(ref.job for ref in refs)
        feed(state, came(done(session, *[result(ref) for ref in refs])))
    assert abs(got[OTHER] - 10) <= 1


def test_shares_are_of_tokens_and_not_of_lines() -> None:
    """Long requests beside short ones: whose answers are a hundred times longer gets a hundredth of the lines."""
    state = fresh()
    running_job(state, 1000, owner="long")
    running_job(state, 1000, OTHER, owner="short")
    session = log_in(state)
    got: Counter[str] = Counter()
    for number in range(202):
        refs = give(state, session, lines=1, assignment=number)
        got.update(ref.job for ref in refs)
        tokens = 1000 if refs[0].job == JOB else 10
        feed(state, came(done(session, *[result(ref, completion_tokens=tokens, prompt_tokens=0) for ref in refs])))
    assert 1 <= got[JOB] <= 4


def shares(rounds: int, jobs: dict[str, tuple[str, int]]) -> Counter[str]:
    """Lines given to each job when credit is scarce: ``jobs`` maps id to (owner, lines)."""
    state = fresh()
    for job, (owner, lines) in jobs.items():
        one = running_job(state, lines, job, owner=owner)
        for line in one.windows["m"].lines.values():
            line.size = scheduler.QUANTUM_BYTES
    session = log_in(state)
    got: Counter[str] = Counter()
    for number in range(rounds):
        refs = give(state, session, lines=1, size=10**9, assignment=number)
        got.update(ref.job for ref in refs)
        feed(state, came(done(session, *[result(ref) for ref in refs])))
    return got


def test_one_keys_many_jobs_do_not_starve_anothers() -> None:
    """One tenant's 10,000 requests must not hold up everybody else for a day (cases 18): shares go by key first."""
    ids = [f"00000000-0000-4000-8000-{number:012d}" for number in range(4)]
    got = shares(20, {**dict.fromkeys(ids[:3], ("big", 20)), ids[3]: ("small", 20)})
    assert got[ids[3]] == 10
    assert max(got[one] for one in ids[:3]) - min(got[one] for one in ids[:3]) <= 1


def test_lines_wait_for_a_worker_that_serves_their_model_and_say_so() -> None:
    """A model that nobody serves: the others run, these wait with the reason in words."""
    state = fresh()
    job = running_job(state, 2, model="big")
    other = running_job(state, 2, OTHER)
    session = log_in(state)
    assert {ref.job for ref in give(state, session)} == {OTHER}
    assert "no worker serves model 'big'; served are: m" in scheduler.why_waiting(state, job)
    assert scheduler.why_waiting(state, other) == ""
    assert "started with --model big, or the job is cancelled" in scheduler.why_waiting(state, job)
    give(state, session, models=(MODEL, ModelInfo("big", "f", 10)), assignment=1)
    assert len(job.assigned) == 2


def test_a_model_that_nobody_serves_is_told_before_what_passes_by_itself() -> None:
    """In life: --lenient and one line with a slip of the pen in body.model: the others wait because all are busy, this
    one for ever. Each line is told its own reason, and the job the one that needs somebody."""
    state = fresh()
    job = running_job(state, 9)
    job.windows["typo"] = Window("typo", exhausted=True)
    job.windows["typo"].add(Line(20, "u", "typo", 0, 1))
    session = log_in(state)
    give(state, session, lines=1)
    assert "no worker serves model 'typo'; served are: m" in scheduler.why_waiting(state, job)
    assert "no worker serves model 'typo'" in scheduler.why_waiting(state, job, "typo")
    assert scheduler.why_waiting(state, job, "m") == "all workers are busy"
    job.windows["typo"].drop(20)
    assert scheduler.why_waiting(state, job) == "all workers are busy", "control: no line asks for it any more"


def test_reasons_in_words() -> None:
    """Every wait has a reason on record (A7)."""
    state = fresh()
    job = running_job(state, 10)
    assert scheduler.why_waiting(state, job) == "no worker is connected"
    session = log_in(state, models=())
    assert "still loading" in scheduler.why_waiting(state, job)
    feed(state, came(beat(session, 0, phase="loading", models=(MODEL,))))
    assert "still loading" in scheduler.why_waiting(state, job)
    give(state, session, lines=1)
    assert scheduler.why_waiting(state, job) == "all workers are busy"
    feed(state, came(messages.Drain(session.fence, "x")))
    assert "draining" in scheduler.why_waiting(state, job)
    job.assigned[0].session = None
    state.grace_until = 1.0
    assert "before the broker's restart" in scheduler.why_waiting(state, job)
    job.assigned[0].session = session


def test_windows_are_asked_for_when_they_run_low_and_somebody_could_take() -> None:
    """Memory is flat: a window is loaded only when its lines can go somewhere, and never whole."""
    state = fresh()
    job = running_job(state, 0)
    window = job.windows["m"]
    window.exhausted, job.good = False, 10_000
    assert not list(scheduler.windows_wanted(state))
    session = log_in(state)
    feed(state, came(beat(session)))
    assert list(scheduler.windows_wanted(state)) == [(job, window, limits.WAITING_LOADED_MAX_COUNT)]
    lines = tuple(Line(index, "u", "m", 0, 1) for index in range(limits.WAITING_LOADED_MAX_COUNT))
    feed(state, Loaded(JOB, "m", lines, len(lines), False))
    assert not list(scheduler.windows_wanted(state))
    assert len(window.lines) == limits.WAITING_LOADED_MAX_COUNT
    state.stopping = True
    for index in list(window.lines):
        window.drop(index)
    assert not list(scheduler.windows_wanted(state))


def test_loading_does_not_bring_a_line_twice() -> None:
    """A line that came back to the window, or is assigned, is in the store's answer too."""
    state = fresh()
    job = running_job(state, 3)
    session = log_in(state)
    give(state, session, lines=1)
    feed(state, Loaded(JOB, "m", tuple(Line(index, "u", "m", 0, 1) for index in range(3)), 3, True))
    assert set(job.windows["m"].lines) == {1, 2}
    feed(state, Loaded("unknown", "m", (), 0, True))
