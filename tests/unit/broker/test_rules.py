"""The one door: who may say what, and whose fault costs whom."""

from __future__ import annotations

import pytest

from broker import rules
from broker.effects import Query
from broker.inputs import Faulted, Tick, Unsendable
from common import messages
from common.errors import InvariantError
from common.messages import HeldLine, LineRef
from tests.unit.broker.kit import JOB, NOW, came, done, feed, fresh, give, hello, log_in, result, running_job, said


def test_an_input_without_a_rule_is_a_bug() -> None:
    """Nothing is ignored in silence."""
    with pytest.raises(InvariantError, match="no rule"):
        rules.handle(fresh(), "nonsense", NOW)  # type: ignore[arg-type]


def test_what_is_ours_to_say_closes_the_session_of_who_says_it() -> None:
    """A peer that speaks the broker's part: only its own session pays."""
    state = fresh()
    log_in(state)
    log_in(state, b"q", worker="v")
    step = feed(state, came(messages.Unknown("x")))
    assert said(step, messages.Refused)[0].code == "wrong_way"
    assert list(state.sessions) == [b"q"]


@pytest.mark.parametrize("input", [Faulted(b"p", "not_msgpack", "x"), Unsendable(b"p")])
def test_a_bad_or_deaf_connection_loses_its_session_and_its_lines_wait(input: object) -> None:
    """Garbage on the socket, or a queue that is full: the broker never waits for it."""
    state = fresh()
    job = running_job(state, 1)
    session = log_in(state)
    give(state, session, lines=1)
    feed(state, input)
    assert not state.sessions
    assert job.waiting == 1


def test_garbage_from_a_stranger_costs_nobody_anything() -> None:
    """A port scanner with a key."""
    state = fresh()
    log_in(state)
    step = feed(state, Faulted(b"stranger", "not_msgpack", "x"))
    assert len(state.sessions) == 1
    assert said(step, messages.Refused, b"stranger")


def test_questions_are_answered_after_the_commit() -> None:
    """A client's question is a send like any other: it sees what this turn wrote."""
    step = feed(fresh(), came(messages.AskJobs(1, 0)))
    assert isinstance(step.sends[0], Query)


def test_what_the_shell_must_look_up() -> None:
    """Lines that memory does not know: those of a whole login, and of results nobody is waiting for."""
    state = fresh()
    running_job(state, 2)
    held = (HeldLine(LineRef(JOB, 0, 1), "running"),)
    assert rules.lookups(state, came(hello(held=held))) == [LineRef(JOB, 0, 1)]
    feed(state, came(hello(held=held, more=True)))
    more = (HeldLine(LineRef(JOB, 1, 1), "running"),)
    assert rules.lookups(state, came(hello(held=more, page=1))) == [LineRef(JOB, 0, 1), LineRef(JOB, 1, 1)]
    session = log_in(state, login=2)
    refs = give(state, session, lines=1)
    other = LineRef(JOB, 1, 1)
    assert rules.lookups(state, came(done(session, result(refs[0]), result(other)))) == [other]
    assert rules.lookups(state, came(done(session, result(other)), b"stranger")) == []
    assert rules.lookups(state, came(messages.AskWorkers(1))) == []


def test_while_pages_of_a_login_come_nothing_else_is_heard() -> None:
    """The login is under way: no UNKNOWN, which would make the worker begin anew."""
    state = fresh()
    feed(state, came(hello(more=True)))
    step = feed(state, came(messages.Drain(messages.Fence("s", 1, 1, 1), "x")))
    assert not step.sends
    feed(state, Tick(10**12))
