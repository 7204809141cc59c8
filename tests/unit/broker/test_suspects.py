"""Lines that kill their worker: suspected, tried apart, halved, set aside; and who is never blamed (D5)."""

from __future__ import annotations

from typing import Any

import pytest

from broker.effects import CountDeath, SendBatch, StoreResult
from broker.inputs import Tick
from broker.scheduler import why_waiting
from common import limits, messages
from common.messages import HeldLine, LineRef
from tests.unit.broker.kit import (
    beat,
    came,
    done,
    feed,
    fresh,
    give,
    hello,
    later,
    log_in,
    result,
    running_job,
    wrote,
)  # fmt: skip

DISK = Tick(10**12)


def run_and_die(state: Any, lines: int = 4, running: int | None = None, login: int = 1, incarnation: int = 1) -> Any:
    """A worker gets lines, its beat says which run, and then it is silent for good."""
    session = log_in(state, b"p%d-%d" % (incarnation, login), login=login, incarnation=incarnation)
    refs = give(state, session, lines=lines)
    seen = refs if running is None else refs[:running]
    feed(state, came(beat(session, 0, running=seen, assignment=state.next_assignment), session.peer))
    feed(state, DISK, later(limits.LIVENESS_S))
    return refs


def batch(step: Any) -> list[LineRef]:
    return [line.ref for send in step.sends if isinstance(send, SendBatch) for line in send.lines]


def test_what_ran_when_a_worker_died_waits_apart() -> None:
    """Lines that only waited in its ring go back to all; those that ran are tried without others."""
    state = fresh()
    job = running_job(state, 6)
    run_and_die(state, lines=4, running=2)
    assert set(job.suspects) == {0, 1}
    assert set(job.windows["m"].lines) == {2, 3, 4, 5}
    assert job.waiting == 6


def test_suspects_are_tried_without_neighbours_and_one_group_at_a_time() -> None:
    """The worker under trial gets nothing else, the others go on with the rest."""
    state = fresh()
    running_job(state, 8)
    run_and_die(state, lines=4)
    first, second = log_in(state, b"a", worker="a"), log_in(state, b"b", worker="b")
    feed(state, came(beat(first, 8), b"a"))
    feed(state, came(beat(second, 8), b"b"))
    step = feed(state, DISK)
    by_peer = {send.peer: {line.ref.index for line in send.lines} for send in step.sends if isinstance(send, SendBatch)}
    assert by_peer == {b"a": {0, 1, 2, 3}, b"b": {4, 5, 6, 7}}
    feed(state, came(beat(first, 8), b"a"))
    assert batch(feed(state, DISK)) == []


def test_a_group_that_dies_again_is_halved() -> None:
    """Four suspects, then two and two, then one: the killer is found in a few deaths."""
    state = fresh()
    job = running_job(state, 4)
    run_and_die(state, incarnation=1)
    assert len({line.group for line in job.suspects.values()}) == 1
    run_and_die(state, incarnation=2)
    assert len({line.group for line in job.suspects.values()}) == 2
    assert len(run_and_die(state, incarnation=3)) == 2
    assert sorted(line.group for line in job.suspects.values())[0] < max(line.group for line in job.suspects.values())
    assert all(line.deaths == 0 for line in job.suspects.values())


def test_two_deaths_alone_set_a_line_aside() -> None:
    """It ran alone, the worker's process ended, twice: the line gets its error, the job goes on."""
    state = fresh()
    job = running_job(state, 1)
    run_and_die(state, lines=1, incarnation=1)
    step = feed(state, came(hello(incarnation=2), b"x"))
    assert wrote(step, CountDeath) == [CountDeath(1, 1, 0)]
    run_and_die(state, lines=1, incarnation=2, login=2)
    feed(state, came(hello(incarnation=3), b"y"))
    step = feed(state, DISK)
    assert [write.code for write in wrote(step, StoreResult)] == ["worker_died"]
    assert (job.status, job.failed) == ("completed", 1)


def test_a_broken_link_blames_nobody() -> None:
    """The same run of the worker comes back: it never died (cases 6), and what it still has it keeps."""
    state = fresh()
    job = running_job(state, 1)
    (ref,) = run_and_die(state, lines=1)
    step = feed(state, came(hello(2, held=(HeldLine(ref, "running"),)), b"q", facts={}))
    assert not wrote(step, CountDeath)
    line = job.assigned.get(0) or job.suspects[0]
    assert line.deaths == 0


@pytest.mark.parametrize("how", ["bye", "no evidence"])
def test_drains_and_kills_without_evidence_blame_nobody(how: str) -> None:
    """SIGTERM, or SIGKILL before anything ran."""
    state = fresh()
    job = running_job(state, 2)
    session = log_in(state)
    refs = give(state, session, lines=2)
    if how == "bye":
        feed(state, came(beat(session, 0, running=refs)))
        feed(state, came(messages.Bye(session.fence, "drain", refs)))
    else:
        feed(state, DISK, later(limits.LIVENESS_S))
    assert not job.suspects
    assert len(job.windows["m"].lines) == 2


def test_a_worker_that_restarts_before_it_is_missed_leaves_evidence_too() -> None:
    """A supervisor starts it again within a second: the later run itself proves the death."""
    state = fresh()
    job = running_job(state, 1)
    session = log_in(state)
    refs = give(state, session, lines=1)
    feed(state, came(beat(session, 0, running=refs)))
    step = feed(state, came(hello(incarnation=2), b"q"))
    assert wrote(step, CountDeath)
    assert set(job.suspects) == {0}


def test_suspects_that_answer_are_free() -> None:
    """The trial went well: the line has its result, and the worker takes any line again."""
    state = fresh()
    job = running_job(state, 3)
    run_and_die(state, lines=2)
    session = log_in(state, b"q", worker="v")
    refs = give(state, session, lines=4)
    assert {ref.index for ref in refs} == {0, 1}
    feed(state, came(done(session, *[result(ref) for ref in refs]), b"q"))
    assert {ref.index for ref in give(state, session, lines=4, assignment=9)} == {2}
    assert job.completed == 2


def test_waiting_for_a_trial_has_its_reason_in_words() -> None:
    """Every wait has a reason on record (A7)."""
    state = fresh()
    job = running_job(state, 1)
    run_and_die(state, lines=1)
    log_in(state, b"q", worker="v")
    assert "wait to be tried apart" in why_waiting(state, job)


# ------------------------------------------------------------------------------- what a later run says of the former


def crash(state: Any, lines: int = 4) -> Any:
    """A worker gets lines and dies before its next beat: only its own record knows what ran."""
    session = log_in(state, b"first")
    return give(state, session, lines=lines)


def test_a_line_that_kills_its_worker_before_the_next_beat_is_a_suspect() -> None:
    """The process is restarted within two seconds and tells what it was running; no beat ever did."""
    state = fresh()
    job = running_job(state, 6)
    refs = crash(state)
    feed(state, came(hello(incarnation=2, login=1, ran=refs[:2]), b"second"))
    assert set(job.suspects) == {0, 1}
    assert set(job.windows["m"].lines) == {2, 3, 4, 5}
    assert {line.deaths for line in job.suspects.values()} == {0}


def test_without_the_record_such_a_line_kills_for_ever() -> None:
    """The control: a worker that says nothing of its former run leaves the broker blind to it."""
    state = fresh()
    job = running_job(state, 6)
    crash(state)
    feed(state, came(hello(incarnation=2, login=1), b"second"))
    assert not job.suspects


def test_a_line_that_ran_alone_at_every_death_is_set_aside_without_any_beat() -> None:
    """A request that crashes the engine in its first step: two restarts later it is out, and its job goes on."""
    state = fresh()
    job = running_job(state, 1)
    for run in range(1, limits.DEATHS_ALONE_MAX_COUNT + 2):
        ran = () if run == 1 else (LineRef(job.id, 0, run - 1),)
        session = log_in(state, b"p%d" % run, login=1, incarnation=run, ran=ran)
        step = feed(state, came(beat(session, 1), session.peer))
        step = feed(state, DISK)
        if run <= limits.DEATHS_ALONE_MAX_COUNT:
            assert [ref.index for ref in batch(step)] == [0]
    assert [(one.idx, one.code) for one in wrote(step, StoreResult)] == [(0, "worker_died")]
    assert [note.fields["outcome"] for note in step.notes if note.kind == "line_ended"] == ["failed"]


def test_a_former_run_that_ended_in_order_blames_nobody() -> None:
    """The link broke while a line ran alone; then an operator ended the worker. The beat's suspicion is no death."""
    state = fresh()
    job = running_job(state, 1)
    run_and_die(state, lines=1)
    step = feed(state, came(hello(incarnation=2, login=1, ran=()), b"second"))
    assert not wrote(step, CountDeath)
    assert job.suspects[0].deaths == 0


def test_the_record_counts_once_however_often_the_worker_logs_in() -> None:
    """The first HELLO of a run is lost or its link breaks: each login says the same again."""
    state = fresh()
    job = running_job(state, 1)
    refs = crash(state, 1)
    for login in (1, 2, 3):
        feed(state, came(hello(incarnation=2, login=login, ran=refs), b"again-%d" % login))
    assert job.suspects[0].deaths == 1


def test_what_went_to_another_worker_meanwhile_is_not_taken_from_it() -> None:
    """The dead one was silent for long: its lines run elsewhere; the one it ran alone is counted all the same."""
    state = fresh()
    job = running_job(state, 1)
    refs = crash(state, 1)
    feed(state, DISK, later(limits.LIVENESS_S))
    other = log_in(state, b"other", worker="other", now=later(limits.LIVENESS_S))
    give(state, other, 1)
    step = feed(state, came(hello(incarnation=2, login=1, ran=refs), b"second"))
    assert [one.deaths for one in wrote(step, CountDeath)] == [1]
    assert job.assigned[0].session is other


def test_a_finished_line_is_no_suspect() -> None:
    """The record is unsynced and may be older than the result: what has ended, or is of no job here, is let be."""
    state = fresh()
    job = running_job(state, 2)
    refs = crash(state, 2)
    session = state.sessions[b"first"]
    feed(state, came(done(session, result(refs[0])), b"first"))
    gone = LineRef("00000000-0000-4000-8000-00000000000f", 0, 1)
    feed(state, came(hello(incarnation=2, login=1, ran=(refs[0], gone)), b"second"))
    assert not job.suspects


def test_a_worker_that_takes_nothing_does_not_hold_up_the_trial() -> None:
    """Its outbox cannot write and it grants no credit; the worker beside it is idle: the suspects are tried there."""
    state = fresh()
    running_job(state, 2)
    run_and_die(state, lines=2)
    first, second = log_in(state, b"a", worker="a"), log_in(state, b"b", worker="b")
    feed(state, came(beat(first, 0), b"a"))
    feed(state, came(beat(second, 0), b"b"))
    assert batch(feed(state, DISK)) == []
    feed(state, came(beat(second, 8), b"b"))
    step = feed(state, DISK)
    assert [send.peer for send in step.sends if isinstance(send, SendBatch)] == [b"b"]
