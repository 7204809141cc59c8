"""Results: the first durable one wins, every line ends once, and nothing is said before it is written (D1, D4)."""

from __future__ import annotations

from typing import Any

import pytest

from broker.effects import EndAttempt, ReturnLine, StoreResult
from broker.inputs import Tick, WaitingEnded
from common import limits, messages
from common.messages import LineRef
from tests.unit.broker.kit import (
    JOB,
    came,
    done,
    ended,
    feed,
    fresh,
    give,
    log_in,
    result,
    running_job,
    said,
    waiting,
    wrote,
)

DISK = Tick(10**12)


def verdict(step: Any) -> tuple[str, ...]:
    return tuple(one.verdict for ack in said(step, messages.Ack) for one in ack.verdicts)


def given(lines: int = 2) -> tuple[Any, Any, Any, tuple[LineRef, ...]]:
    state = fresh()
    job = running_job(state, lines)
    session = log_in(state)
    return state, job, session, give(state, session, lines=lines)


def test_a_result_is_stored_and_acked_in_one_step() -> None:
    """The write and the word are one value: whoever commits the one may say the other."""
    state, job, session, refs = given()
    step = feed(state, came(done(session, result(refs[0]), result(refs[1], "failed", status_code=400))))
    assert verdict(step) == ("stored", "stored")
    assert [(write.kind, write.seq) for write in wrote(step, StoreResult)] == [(0, 0), (1, 0)]
    assert (job.completed, job.failed, job.prompt_tokens, job.completion_tokens) == (1, 1, 2, 4)
    feed(state, DISK)
    assert job.status == "completed"
    assert job.reason == "1 of 2 lines failed"


def test_the_same_result_again_is_stored_still() -> None:
    """Our ack was lost with the link: the worker hears again that it may drop it."""
    state, _, session, refs = given()
    feed(state, came(done(session, result(refs[0]))))
    step = feed(state, came(done(session, result(refs[0])), facts={refs[0].line: ended(refs[0].index)}))
    assert verdict(step) == ("stored",)
    assert not step.writes


def test_a_second_result_is_known_and_counted() -> None:
    """Another attempt was first: the line keeps its one end, the work counts as wasted (cases 22)."""
    state, _, session, refs = given()
    feed(state, came(done(session, result(refs[0]))))
    late = LineRef(JOB, refs[0].index, 2)
    step = feed(state, came(done(session, result(late)), facts={late.line: ended(late.index, attempt=1)}))
    assert verdict(step) == ("known",)
    assert wrote(step, EndAttempt)[0].how == "known"
    assert not wrote(step, StoreResult)


def test_one_result_twice_in_one_message() -> None:
    """A worker's slip must not end a line twice."""
    state, job, session, refs = given()
    step = feed(state, came(done(session, result(refs[0]), result(refs[0]))))
    assert len(wrote(step, StoreResult)) == 1
    assert job.completed == 1


def test_a_result_of_an_earlier_login_counts() -> None:
    """DONE is judged by line and attempt alone, whatever the epoch."""
    state, job, session, refs = given()
    old = messages.Fence(session.fence.store_id, 1, 1, 0)
    step = feed(state, came(messages.Done(old, (result(refs[0]),))))
    assert verdict(step) == ("stored",)
    assert job.completed == 1


def test_a_result_of_another_store_does_not_count() -> None:
    """The broker's state was recreated: line ids of the old store mean nothing here."""
    state, job, _, refs = given()
    step = feed(state, came(messages.Done(messages.Fence("other", 1, 1, 1), (result(refs[0]),))))
    assert not said(step, messages.Ack)
    assert job.completed == 0


def test_a_result_for_a_line_that_waits_again_is_taken() -> None:
    """The session died, the line went back, then the worker's outbox brings the result: it is not run again."""
    state, job, session, refs = given()
    feed(state, came(messages.Bye(session.fence, "x", ())))
    session = log_in(state, b"q", login=2)
    facts = {refs[0].line: waiting(refs[0].index)}
    step = feed(state, came(done(session, result(refs[0])), b"q", facts=facts))
    assert verdict(step) == ("stored",)
    assert refs[0].index not in job.windows["m"].lines
    assert job.waiting == 1


def test_whoever_else_works_on_it_is_told_to_stop() -> None:
    """First durable result wins; the other worker's engine must not compute on for ever (cases 22)."""
    state, job, session, refs = given(1)
    feed(state, came(messages.Bye(session.fence, "x", ())))
    other = log_in(state, b"q", worker="v")
    again = give(state, other, lines=1)
    assert again[0].attempt == 2
    session = log_in(state, b"r", login=2)
    step = feed(state, came(done(session, result(refs[0])), b"r"))
    assert verdict(step) == ("stored",)
    assert said(step, messages.CancelLines, b"q")[0].lines == again
    assert wrote(step, EndAttempt)[0].how == "overtaken"
    assert job.completed == 1
    assert not other.lines


def test_an_attempt_that_was_never_given_out_is_refused() -> None:
    """A store restored from a copy, or a worker gone mad: the line goes on as it is."""
    state, job, session, refs = given(1)
    step = feed(state, came(done(session, result(LineRef(JOB, 0, 7)))))
    assert verdict(step) == ("refused",)
    assert len(job.assigned) == 1
    assert not step.writes
    assert refs[0].attempt == 1


@pytest.mark.parametrize("facts", [None, waiting(0)])
def test_a_result_of_no_job_of_ours_is_known(facts: Any) -> None:
    """The job was deleted, or failed validation: the worker may drop it."""
    state = fresh()
    session = log_in(state)
    ref = LineRef(JOB, 0, 1)
    assert verdict(feed(state, came(done(session, result(ref)), facts={ref.line: facts}))) == ("known",)


@pytest.mark.parametrize(
    ("body", "changes"),
    [(b"{\n}", {}), (b"text", {}), (b"", {}), (b"{}", {"status_code": 7})],
)
def test_a_body_that_would_break_the_output_is_refused_and_ends_its_line(body: bytes, changes: dict[str, int]) -> None:
    """The output file must stay one JSON object a line: the line ends ``result_refused``, with the reason."""
    state, job, session, refs = given(1)
    step = feed(state, came(done(session, result(refs[0], body=body, **changes))))
    assert verdict(step) == ("refused",)
    write = wrote(step, StoreResult)[0]
    assert (write.kind, write.code, write.body) == (1, "result_refused", b"")
    assert job.failed == 1


def test_a_result_longer_than_a_line_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded like any line."""
    monkeypatch.setattr(limits, "LINE_MAX_BYTES", 1)
    state, _, session, refs = given(1)
    assert verdict(feed(state, came(done(session, result(refs[0]))))) == ("refused",)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"status": "perhaps"}, "bad_status"), ({"total": 1}, "bad_length"), ({"total": 10**9}, "too_much_open")],
)
def test_malformed_results_close_the_session(changes: dict[str, Any], code: str) -> None:
    """The peer's fault: its lines wait again, everybody else goes on."""
    state, job, session, refs = given(1)
    step = feed(state, came(done(session, result(refs[0], **changes))))
    assert said(step, messages.Refused)[0].code == code
    assert not state.sessions
    assert job.waiting == 1


def test_a_long_result_in_parts() -> None:
    """A result beyond one message: confirmed part by part, judged once it is whole."""
    state, _, session, refs = given(1)
    whole = b"{" + b"x" * 8 + b"}"
    step = feed(state, came(done(session, result(refs[0], body=whole[:4], total=10, notes="0.50 s: ended"))))
    assert said(step, messages.PartTaken)[0].offset == 4
    assert not said(step, messages.Ack)
    step = feed(state, came(messages.ResultPart(session.fence, refs[0], 4, whole[4:7])))
    assert said(step, messages.PartTaken)[0].offset == 7
    step = feed(state, came(messages.ResultPart(session.fence, refs[0], 4, whole[4:7])))
    assert said(step, messages.PartTaken)[0].offset == 7
    step = feed(state, came(messages.ResultPart(session.fence, refs[0], 7, whole[7:])))
    assert verdict(step) == ("stored",)
    assert wrote(step, StoreResult)[0].body == whole
    assert wrote(step, StoreResult)[0].notes == "0.50 s: ended"
    assert not session.partial


@pytest.mark.parametrize(("offset", "data"), [(9, b"x"), (4, b"x" * 99)])
def test_parts_that_do_not_fit_close_the_session(offset: int, data: bytes) -> None:
    """A gap, or more than was announced."""
    state, _, session, refs = given(1)
    feed(state, came(done(session, result(refs[0], body=b"{123", total=10))))
    step = feed(state, came(messages.ResultPart(session.fence, refs[0], offset, data)))
    assert said(step, messages.Refused)[0].code == "bad_part"


def test_a_part_of_nothing_closes_the_session() -> None:
    """Parts left over from an earlier login."""
    state, _, session, refs = given(1)
    step = feed(state, came(messages.ResultPart(session.fence, refs[0], 0, b"x")))
    assert said(step, messages.Refused)[0].code == "bad_part"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (12, "the job was cancelled while this line ran; 12 tokens of its answer had been made"),
        (1, "the job was cancelled while this line ran; 1 token of its answer had been made"),
        (0, "the job was cancelled while this line was at its worker; no tokens of its answer had been made"),
    ],
)
def test_a_line_that_is_stopped_with_its_job_says_how_far_it_had_come(tokens: int, words: str) -> None:
    """Cancel while running: what was stopped says batch_cancelled and what was made of it, what had finished is output
    (cases 16); sent again, because our word was lost, it ends no second time."""
    state, job, session, refs = given(2)
    feed(state, came(messages.CancelJob(9, JOB)))
    stopped = result(refs[1], "cancelled", b"", status_code=0, completion_tokens=tokens, notes="admitted")
    step = feed(state, came(done(session, result(refs[0]), stopped)))
    assert verdict(step) == ("stored", "stored")
    assert wrote(step, ReturnLine) == []
    end = wrote(step, StoreResult)[-1]
    assert (end.idx, end.kind, end.code, end.message, end.status_code) == (
        refs[1].index,
        1,
        "batch_cancelled",
        words,
        0,
    )
    assert (end.completion_tokens, end.body, end.notes) == (tokens, b"", "admitted")
    feed(state, WaitingEnded(JOB, 0, False))
    feed(state, DISK)
    assert (job.status, job.completed, job.failed) == ("cancelled", 1, 1)


def test_a_line_that_is_stopped_in_a_job_that_goes_on_waits_again() -> None:
    """The control: an old CANCEL, answered when nobody wants it any more."""
    state, job, session, refs = given(1)
    step = feed(state, came(done(session, result(refs[0], "cancelled", b"", status_code=0))))
    assert verdict(step) == ("known",)
    assert [write.idx for write in wrote(step, ReturnLine)] == [refs[0].index]
    assert wrote(step, StoreResult) == []
    assert job.failed == 0


def test_cancelled_by_somebody_who_does_not_hold_it_changes_nothing() -> None:
    """A late answer to an old CANCEL."""
    state, job, session, _ = given(1)
    other = log_in(state, b"q", worker="v")
    step = feed(state, came(done(other, result(LineRef(JOB, 0, 1), "cancelled", b"")), b"q"))
    assert verdict(step) == ("known",)
    assert job.assigned[0].session is session
