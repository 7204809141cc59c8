"""What becomes of each line a worker holds (D1, D2, D4): one result, durable before it is told, then gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common import limits
from common import messages as wire
from common.messages import LineRef
from worker import inputs as on
from worker.lines import Stage
from worker.states import State
from worker.structures import Outcome

Line = Callable[..., LineRef]


def test_a_result_is_told_only_after_the_commit_that_holds_it(rig: Any, line: Line) -> None:
    """D1: the disk is slow: nobody hears of the result until it is synced."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.auto_commit = False
    rig.finish(line(0))
    rig.tick(1.1)
    assert not rig.done()
    for effect in rig.commit():
        rig._say(effect)
    assert [result.ref for result in rig.done()] == [line(0)]


def test_control_a_result_reported_stored_before_its_commit_is_caught(rig: Any, line: Line) -> None:
    """The control of D1: a shell that says "stored" before the commit has something told that a crash would lose."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.auto_commit = False
    rig.finish(line(0))
    with pytest.raises(AssertionError, match="before it was durable"):
        rig.tell(on.Stored((line(0),)))


def test_what_finished_while_the_broker_was_away_is_handed_over(rig: Any, line: Line) -> None:
    """D2: the broker is away for an hour; the worker finishes what it holds and delivers at the next login."""
    rig.up()
    rig.batch(line(0), line(1))
    rig.run(line(0))
    rig.tell(on.LinkLost("cut"))
    rig.finish(line(0))
    rig.run(line(1))
    rig.finish(line(1))
    assert not rig.done()
    rig.greet()
    rig.welcome(epoch=2, broker=2, verdicts=(wire.Verdict(line(0), "send"), wire.Verdict(line(1), "send")))
    assert [result.ref for result in rig.done()] == [line(0), line(1)]
    rig.ack(line(0), line(1))
    assert not rig.disk


def test_an_ack_lost_with_its_link_costs_nothing(rig: Any, line: Line) -> None:
    """Link cut exactly at the ack of a three-hour answer: listed as finished, judged ``stored``, dropped, not rerun."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0))
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    rig.welcome(epoch=2, verdicts=(wire.Verdict(line(0), "stored"),))
    assert not rig.disk
    assert len(rig.done()) == 1
    assert rig.held(line(0)) is None


@pytest.mark.parametrize("verdict", ["keep", "send", "cancel", ""])
def test_a_finished_line_is_delivered_whatever_else_is_said_of_it(rig: Any, line: Line, verdict: str) -> None:
    """A result is judged when it arrives: no verdict but ``stored`` makes a durable result disappear (D1)."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.tell(on.LinkLost("cut"))
    rig.finish(line(0))
    rig.greet()
    rig.welcome(epoch=2, verdicts=(wire.Verdict(line(0), verdict),) if verdict else ())
    assert [result.ref for result in rig.done()] == [line(0)]
    assert line(0) in rig.disk
    assert rig.session.counts["unjudged"] == (not verdict)


def test_a_running_line_goes_on_when_kept_and_ends_when_not(rig: Any, line: Line) -> None:
    """D3: a claimed line is not run again; one that is wanted no more does not occupy the GPU."""
    rig.up()
    rig.batch(line(0), line(1), line(2))
    rig.run(line(0), line(1), line(2))
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    verdicts = (wire.Verdict(line(0), "keep"), wire.Verdict(line(1), "cancel"), wire.Verdict(line(2), "stored"))
    rig.welcome(epoch=2, verdicts=verdicts)
    assert [request.ref for request in rig.stopped] == [line(1), line(2)]
    rig.finish(line(0))
    rig.finish(line(1), status="cancelled")
    rig.finish(line(2))
    assert [(result.ref, result.status) for result in rig.done()] == [(line(0), "ok"), (line(1), "cancelled")]
    assert rig.held(line(2)) is None, "its result is the broker's already"


def test_a_cancel_is_answered_wherever_the_line_is(rig: Any, line: Line) -> None:
    """A job is cancelled while its lines are everywhere: each is answered exactly once, so that the job can close."""
    rig.up(concurrency=8)
    rig.batch(*(line(i) for i in range(5)))
    rig.run(line(0))
    rig.tokenize(line(1))
    rig.publish()
    rig.tokenize(line(2))
    rig.run(line(4))
    rig.finish(line(4))
    before = len(rig.done())
    rig.hear(wire.CancelLines(rig.fence, tuple(line(i) for i in (0, 1, 2, 3, 4, 77))))
    assert {request.ref for request in rig.stopped} >= {line(0), line(1)}
    rig.finish(line(1), status="cancelled")
    rig.finish(line(0))
    for ref in [request.ref for request in rig.stopped if request.ref not in (line(0), line(1))]:
        rig.finish(ref, status="cancelled")
    rig.tell(on.Tokenized(rig.prepared(line(3))))
    answers = [(result.ref.index, result.status) for result in rig.done()[before:]]
    assert sorted(answers) == [(0, "ok"), (1, "cancelled"), (2, "cancelled"), (3, "cancelled"), (77, "cancelled")]
    assert rig.session.counts["late"] == 1, "line 3 was tokenized after its end"


def test_a_cancel_asked_twice_stops_the_engine_once(rig: Any, line: Line) -> None:
    """A broker repeats itself after a reconnect."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    for _ in range(2):
        rig.hear(wire.CancelLines(rig.fence, (line(0),)))
    assert len(rig.stopped) == 1


def test_a_line_that_comes_twice_is_run_once(rig: Any, line: Line) -> None:
    """A batch repeated on the wire."""
    rig.up()
    rig.batch(line(0))
    rig.batch(line(0), assignment=2)
    assert len(rig.jobs) == 1
    assert rig.session.counts["duplicate"] == 1


def test_a_line_has_one_result_even_if_two_are_made(rig: Any, line: Line) -> None:
    """D4: an engine with a bug answers twice: the first counts, the second is counted."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0))
    rig.finish(line(0), body=b'{"b":2}')
    assert [result.body for result in rig.done()] == [b'{"a":1}']
    assert rig.session.counts["late"] == 1


def test_a_refused_result_is_kept_aside_and_never_sent_again(rig: Any, line: Line) -> None:
    """The broker cannot use it: it is not thrown away, and not offered for ever."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0))
    rig.ack(line(0), verdict="refused")
    assert rig.aside == {line(0): "why"}
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    assert rig.of(wire.Hello)[-1].held == ()


def test_a_tokenizers_refusal_is_a_result_like_any_other(rig: Any, line: Line) -> None:
    """A prompt that is too long fails alone, durably, without having been in the ring."""
    rig.up()
    rig.batch(line(0))
    rig.tell(on.Ended(Outcome(line(0), "failed", 400, 9, 0, b'{"error":{}}')))
    assert [(result.status, result.status_code) for result in rig.done()] == [("failed", 400)]
    assert rig.resolved == 0


def test_what_was_in_the_ring_is_resolved_once(rig: Any, line: Line) -> None:
    """R4: the ring's count of unresolved items returns to zero, or the ring is found stuck for nothing."""
    rig.up()
    rig.batch(line(0), line(1))
    rig.run(line(0))
    rig.tokenize(line(1))
    rig.publish()
    rig.finish(line(0))
    rig.finish(line(1), status="cancelled")
    assert rig.resolved == 2


def test_a_long_body_arrives_in_parts_and_half_of_one_is_not_held(rig: Any, line: Line) -> None:
    """A 3 MB prompt: its parts come in order; a link lost half way leaves nothing to claim."""
    rig.up()
    body = bytes(range(256)) * 12
    first = wire.BatchLine(line(0), "/v1/chat/completions", len(body), body[:1000])
    rig.hear(wire.Batch(rig.fence, 1, (first,)))
    rig.hear(wire.BodyPart(rig.fence, line(0), 1000, body[1000:2000]))
    rig.hear(wire.BodyPart(rig.fence, line(0), 2000, body[2000:]))
    assert [job.body for job in rig.jobs] == [body]
    second = wire.BatchLine(line(1), "/v1/chat/completions", len(body), body[:1000])
    rig.hear(wire.Batch(rig.fence, 2, (second,)))
    rig.hear(wire.BodyPart(rig.fence, line(1), 5, b"out of order"))
    assert rig.held(line(1)).stage == Stage.RECEIVING
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    assert [one.ref for one in rig.of(wire.Hello)[-1].held] == [line(0)]


def test_a_body_that_cannot_be_costs_the_broker_its_session(rig: Any, line: Line) -> None:
    """A peer cannot make us hold more than a line may have."""
    rig.up()
    huge = wire.BatchLine(line(0), "/v1/chat/completions", limits.LINE_MAX_BYTES + 1, b"x")
    rig.hear(wire.Batch(rig.fence, 1, (huge,)))
    assert rig.session.state == State.OUT


def test_a_long_result_travels_in_parts_two_unconfirmed_at_most(rig: Any, line: Line) -> None:
    """A 5 MiB answer over a slow link: beats are never behind more than two parts of it."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    body = b"{" + b"x" * (5 * limits.PART_MAX_BYTES) + b"}"
    rig.finish(line(0), body=body)
    got = bytearray()
    sent = 0
    for _ in range(10):
        firsts = [(0, result.body) for result in rig.done() if result.ref == line(0)]
        parts = [*firsts, *((part.offset, part.data) for part in rig.of(wire.ResultPart))]
        news = parts[sent:]
        assert len(news) <= limits.PARTS_UNCONFIRMED_MAX_COUNT
        if not news:
            break
        sent = len(parts)
        for offset, data in news:
            assert offset == len(got)
            got += data
            rig.hear(wire.PartTaken(rig.fence, line(0), len(got)))
            break
        else:
            continue
        for offset, data in news[1:]:
            assert offset == len(got)
            got += data
            rig.hear(wire.PartTaken(rig.fence, line(0), len(got)))
    assert bytes(got) == body
    assert line(0) in rig.disk, "taken is not stored"
    rig.ack(line(0))
    assert not rig.disk


def test_a_long_result_begins_anew_after_a_lost_link(rig: Any, line: Line) -> None:
    """Cut mid-message: the broker forgot the parts with the session, so they come again from the first."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0), body=b"{" + b"x" * (3 * limits.PART_MAX_BYTES) + b"}")
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    rig.welcome(epoch=2, verdicts=(wire.Verdict(line(0), "send"),))
    assert [len(result.body) for result in rig.done()] == [limits.PART_MAX_BYTES] * 2
    assert [part.offset for part in rig.of(wire.ResultPart)] == [limits.PART_MAX_BYTES] * 2


def test_a_job_submitted_again_to_a_new_store_is_run_again(rig: Any, line: Line) -> None:
    """The broker's volume was lost, and the client's retry brings the same job id: its line has the number of a result
    kept for the lost store. It runs and is delivered; the old answer is kept aside and sent to nobody.
    """
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0), b'{"old":1}')
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    rig.welcome(epoch=1, store="store-b", broker=1)
    rig.said.clear()
    rig.batch(line(0), assignment=2)
    assert line(0) in rig.aside
    rig.run(line(0))
    rig.finish(line(0), b'{"new":1}')
    assert [result.body for result in rig.done()] == [b'{"new":1}']


def test_a_line_still_running_for_a_lost_store_costs_one_login(rig: Any, line: Line) -> None:
    """The same, and the engine is still at it: the new store's line is not mistaken for the old one."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    rig.welcome(epoch=1, store="store-b", broker=1)
    rig.batch(line(0), assignment=2)
    assert rig.session.state == State.OUT
    rig.greet()
    rig.welcome(epoch=2, store="store-b", broker=1)
    rig.batch(line(0, 2), assignment=3)
    assert rig.held(line(0, 2)).store_id == "store-b"
