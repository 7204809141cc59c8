"""The broker's half of a session: login, fences, beats, farewell, death (S1-S4)."""

from __future__ import annotations

from typing import Any

import pytest

from broker import sessions
from broker.effects import ForgetWorker, SaveSession, SendBatch
from broker.inputs import Deaf, Faulted, Stop, Tick, Unsendable
from broker.state import KnownWorker, State
from common import limits, messages
from common.errors import InvariantError
from common.messages import HeldLine, LineRef
from tests.unit.broker.kit import (
    JOB,
    MODEL,
    NOW,
    STORE,
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
    said,
    wrote,
)  # fmt: skip

DISK = Tick(10**12)
STANDINGS = ("none", "logging_in", "open", "draining")
INPUTS = ("hello", "last_hello", "refused", "work", "drain", "bye", "silence", "fault", "unsendable", "superseded")


def standing(where: str) -> tuple[State, bytes]:
    """A state with one connection that stands so."""
    state = fresh()
    if where == "logging_in":
        feed(state, came(hello(more=True)))
    elif where != "none":
        session = log_in(state)
        if where == "draining":
            feed(state, came(messages.Drain(session.fence, "x")))
    return state, b"p"


def happen(state: State, peer: bytes, what: str) -> None:
    """Let ``what`` happen to the connection, through the door."""
    session = state.sessions.get(peer)
    fence = session.fence if session is not None else messages.Fence(STORE, 3, 1, 1)
    login = session.login + 1 if session is not None else 1
    page = state.logins[peer].pages if peer in state.logins else 0
    steps: dict[str, Any] = {
        "hello": came(hello(login, page=page, more=True)),
        "last_hello": came(hello(login, page=page)),
        "refused": came(hello(login, schema=limits.SCHEMA_VERSION + 1)),
        "work": came(messages.WorkerBeat(fence, "ready", 1, 1, 1, 1, 1, (), messages.RingReport())),
        "drain": came(messages.Drain(fence, "x")),
        "bye": came(messages.Bye(fence, "x", ())),
        "silence": DISK,
        "fault": Faulted(peer, "bad", "x"),
        "unsendable": Unsendable(peer),
        "superseded": came(hello(login), b"other"),
    }
    feed(state, steps[what], later(1000) if what == "silence" else NOW)


@pytest.mark.parametrize("where", STANDINGS)
@pytest.mark.parametrize("what", INPUTS)
def test_each_pair_of_standing_and_input(where: str, what: str) -> None:
    """What the table has happens; anything else leaves the connection as it is, and UNKNOWN answers it at most."""
    state, peer = standing(where)
    happen(state, peer, what)
    assert sessions.standing(state, peer) == sessions.TRANSITIONS.get((where, what), where)


@pytest.mark.parametrize("where", STANDINGS)
@pytest.mark.parametrize("what", INPUTS)
def test_the_guard_knows_the_table(where: str, what: str) -> None:
    """A transition of ours that the table does not have is a bug, and changes nothing."""
    state, peer = standing(where)
    if (where, what) in sessions.TRANSITIONS:
        sessions.legal(state, peer, what)
    else:
        with pytest.raises(InvariantError, match="cannot have"):
            sessions.legal(state, peer, what)


def test_a_message_without_a_session_is_told_to_log_in() -> None:
    """The broker restarted and the worker has not noticed: it logs in again at once."""
    step = feed(fresh(), came(messages.Bye(messages.Fence(STORE, 2, 1, 1), "x", ())))
    assert said(step, messages.Unknown)


def test_a_login_in_pages_is_judged_when_the_last_page_is_here() -> None:
    """A worker with a long outbox: nothing is decided on half a list."""
    state = fresh()
    step = feed(state, came(hello(held=(HeldLine(LineRef(JOB, 0, 1), "running"),), more=True)))
    assert not step.sends
    step = feed(state, came(hello(held=(HeldLine(LineRef(JOB, 1, 1), "running"),), page=1)))
    welcome = said(step, messages.Welcome)[0]
    assert {verdict.ref.index for verdict in welcome.verdicts} == {0, 1}
    assert wrote(step, SaveSession)[0].state == "open"


@pytest.mark.parametrize("page", [2, 0])
def test_pages_out_of_order_are_the_peers_fault(page: int) -> None:
    """A page that does not follow ends the login, and the worker hears why; page 0 begins anew."""
    state = fresh()
    feed(state, came(hello(more=True)))
    step = feed(state, came(hello(page=page)))
    assert bool(said(step, messages.Refused)) == (page == 2)
    assert bool(said(step, messages.Welcome)) == (page == 0)


def test_a_login_that_never_ends_is_given_up() -> None:
    """A peer that says "more" and nothing more, again and again: it must not grow the broker."""
    state = fresh()
    feed(state, came(hello(more=True)))
    feed(state, Tick(10**12), later(limits.LIVENESS_S - 0.1))
    assert state.logins, "control: a slow login is waited for"
    feed(state, Tick(10**12), later(limits.LIVENESS_S))
    assert not state.logins


def test_a_long_list_of_verdicts_goes_out_in_pages() -> None:
    """More held lines than one message may list."""
    state = fresh()
    count = limits.PAGE_MAX_COUNT
    first = tuple(HeldLine(LineRef(JOB, index, 1), "running") for index in range(count))
    feed(state, came(hello(held=first, more=True)))
    step = feed(state, came(hello(held=(HeldLine(LineRef(JOB, count, 1), "running"),), page=1)))
    welcomes = said(step, messages.Welcome)
    assert [(len(one.verdicts), one.more) for one in welcomes] == [(count, True), (1, False)]


def test_too_many_held_lines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer cannot make the broker hold any list it likes."""
    monkeypatch.setattr(limits, "HELD_MAX_COUNT", 1)
    state = fresh()
    held = (HeldLine(LineRef(JOB, 0, 1), "running"),)
    feed(state, came(hello(held=held, more=True)))
    step = feed(state, came(hello(held=held, page=1)))
    assert said(step, messages.Refused)[0].code == "too_many_held"
    assert not state.logins


def test_the_same_login_asked_twice_gets_the_same_epoch_and_answer() -> None:
    """The WELCOME was slow and the worker asked again: one session, one epoch, nothing judged twice."""
    state = fresh()
    job = running_job(state)
    first = feed(state, came(hello()))
    session = state.sessions[b"p"]
    job.assigned  # noqa: B018 - the job exists so that a second judgement could do harm
    second = feed(state, came(hello()))
    assert said(first, messages.Welcome) == said(second, messages.Welcome)
    assert state.sessions[b"p"] is session
    feed(state, came(beat(session)))
    assert not feed(state, came(hello())).sends


def test_the_same_login_on_another_connection_keeps_its_epoch() -> None:
    """Epoch is the same for the same incarnation and login number."""
    state = fresh()
    first = log_in(state)
    second = log_in(state, b"q")
    assert second.fence == first.fence
    assert list(state.sessions) == [b"q"]


def test_a_new_login_supersedes_the_old_session() -> None:
    """The worker's link broke and it is back before anyone noticed (``docker-compose up`` again, cases 8 and 9)."""
    state = fresh()
    first = log_in(state)
    second = log_in(state, b"q", login=2)
    assert second.fence.epoch > first.fence.epoch
    assert list(state.sessions) == [b"q"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"incarnation": 4}, "incarnation"),
        ({"incarnation": 5, "login": 1}, "stale_login"),
        ({"incarnation": 9, "schema": limits.SCHEMA_VERSION + 1}, "schema"),
        ({"incarnation": 9, "schema": 0}, "schema"),
        ({"incarnation": 9, "worker": ""}, "worker_id"),
    ],
)
def test_who_is_not_let_in_hears_why(changes: dict[str, Any], code: str) -> None:
    """An older run of a worker, a login overtaken by a later one, another version."""
    state = fresh()
    log_in(state, login=2, incarnation=5)
    step = feed(state, came(hello(**changes), b"q"))
    assert said(step, messages.Refused)[0].code == code
    assert list(state.sessions) == [b"p"]


def test_an_old_run_is_refused_after_a_restart_too() -> None:
    """What workers ran is remembered in the store, not in the process."""
    state = fresh()
    known = log_in(state, incarnation=5)
    restarted = fresh(known=dict(state.known), next_epoch=state.next_epoch)
    step = feed(restarted, came(hello(incarnation=4)))
    assert said(step, messages.Refused)[0].code == "incarnation"
    assert log_in(restarted, incarnation=5).fence.epoch > known.fence.epoch


def test_another_keys_worker_cannot_take_a_live_name() -> None:
    """A worker's name is not a password: a second key must not push the first one's session out."""
    state = fresh()
    feed(state, came(hello(), user="alice"))
    step = feed(state, came(hello(login=2), b"q", user="bob"))
    assert said(step, messages.Refused)[0].code == "name_taken"
    assert list(state.sessions) == [b"p"]


def stale(session: Any) -> Any:
    fence = session.fence
    return messages.Fence(fence.store_id, fence.broker_incarnation, fence.worker_incarnation, fence.epoch - 1)


def credit_after_stale_beat() -> int:
    state = fresh()
    session = log_in(state, login=1)
    session = log_in(state, login=2)
    feed(state, came(beat(session, lines=0)))
    feed(state, came(beat(session, lines=100, fence=stale(session))))
    return session.credit_lines


def test_a_stale_beat_gives_no_credit() -> None:
    """A beat of an earlier login that arrives late must not make work flow (S4)."""
    assert credit_after_stale_beat() == 0


def test_control_without_the_fence_a_stale_beat_gives_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the epoch check the same late beat opens the flow."""
    monkeypatch.setattr(sessions, "fenced", lambda *_: True)
    assert credit_after_stale_beat() == 100


@pytest.mark.parametrize("field", ["store_id", "broker_incarnation", "worker_incarnation", "epoch"])
def test_each_part_of_the_fence_counts(field: str) -> None:
    """Another store, another run of broker or worker, another login: dropped and counted."""
    state = fresh()
    session = log_in(state)
    values = {
        name: getattr(session.fence, name) for name in ("store_id", "broker_incarnation", "worker_incarnation", "epoch")
    }
    values[field] = "other" if field == "store_id" else values[field] + 1
    for message in (messages.Drain(messages.Fence(**values), "x"), messages.Bye(messages.Fence(**values), "x", ())):
        step = feed(state, came(message))
        assert [note.kind for note in step.notes] == ["message_dropped"]
    assert sessions.standing(state, b"p") == "open"


def test_silence_is_death_and_its_lines_wait_again() -> None:
    """A worker gone without a word: five seconds, then its lines wait; loading workers get more patience."""
    state = fresh()
    job = running_job(state, 2)
    session = log_in(state)
    give(state, session, lines=2)
    feed(state, DISK, later(limits.LIVENESS_S - 0.1))
    assert session.peer in state.sessions
    step = feed(state, DISK, later(limits.LIVENESS_S))
    assert not state.sessions
    assert job.waiting == 2
    assert any(note.kind == "session_gone" and note.fields["held"] == 2 for note in step.notes)
    loading = log_in(state, b"q", login=2)
    feed(state, DISK, later(limits.LIVENESS_S + 1))
    assert loading.peer in state.sessions
    feed(state, DISK, later(limits.LOADING_LIVENESS_S + 1))
    assert not state.sessions


def test_any_message_is_a_sign_of_life() -> None:
    """A working GPU is never declared dead: results keep its session as beats do (S3, cases 5)."""
    state = fresh()
    session = log_in(state)
    feed(state, came(beat(session)))
    feed(state, came(done(session)), later(4))
    feed(state, DISK, later(8))
    assert session.peer in state.sessions


def test_control_work_on_another_connection_does_not_keep_a_session() -> None:
    """Control of S3: beats on one registration and work on another is what killed working GPUs elsewhere."""
    state = fresh()
    session = log_in(state)
    feed(state, came(beat(session)))
    feed(state, came(done(session), b"second"), later(4))
    feed(state, DISK, later(8))
    assert session.peer not in state.sessions


def test_the_broker_beats_too() -> None:
    """A worker knows within seconds that its broker is gone."""
    state = fresh()
    log_in(state)
    assert not said(feed(state, DISK), messages.BrokerBeat)
    assert said(feed(state, DISK, later(limits.BEAT_S)), messages.BrokerBeat)
    assert not said(feed(state, DISK, later(limits.BEAT_S + 0.1)), messages.BrokerBeat)


def test_a_phase_nobody_knows_is_the_peers_fault() -> None:
    """Only its own session pays."""
    state = fresh()
    other = log_in(state, b"q", worker="v")
    session = log_in(state)
    step = feed(state, came(beat(session, phase="dreaming")))
    assert said(step, messages.Refused)[0].code == "bad_phase"
    assert list(state.sessions) == [other.peer]


def test_bye_hands_back_unblamed() -> None:
    """A drained worker leaves: what it hands back waits at once, and its name is free."""
    state = fresh()
    job = running_job(state, 2)
    session = log_in(state)
    refs = give(state, session, lines=2)
    step = feed(state, came(messages.Bye(session.fence, "drain", refs[:1])))
    assert job.waiting == 2
    assert wrote(step, SaveSession)[0].state == "left"
    assert all(line.deaths == 0 for line in job.windows["m"].lines.values())


def test_a_draining_worker_gets_no_work() -> None:
    """DRAIN from the worker: no new work from now on."""
    state = fresh()
    running_job(state, 2)
    session = log_in(state)
    feed(state, came(messages.Drain(session.fence, "x")))
    assert give(state, session) == ()


def test_the_previous_schema_may_deliver_and_gets_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgraded broker and a worker of the version before: what it finished is taken, nothing new is given."""
    monkeypatch.setattr(limits, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(sessions, "OLDEST_SCHEMA", 1)
    state = fresh()
    running_job(state, 2)
    session = log_in(state, schema=1, held=(HeldLine(LineRef(JOB, 0, 0), "finished"),))
    assert give(state, session) == ()
    job = state.jobs[JOB]
    line = job.windows["m"].lines[0]
    line.attempt = 1
    feed(state, came(done(session, result(LineRef(JOB, 0, 1))), facts={LineRef(JOB, 0, 1).line: None}))
    assert session.peer in state.sessions


def test_stopping_tells_workers_and_keeps_their_lines() -> None:
    """SIGTERM: workers look for the next broker at once; the lines stay theirs, to be claimed there."""
    state = fresh()
    job = running_job(state, 2)
    session = log_in(state)
    give(state, session, lines=2)
    step = feed(state, Stop())
    assert said(step, messages.Unknown)
    assert len(job.assigned) == 2
    assert not [send for send in feed(state, DISK).sends if isinstance(send, SendBatch)]
    assert said(feed(state, came(hello(login=9), b"q")), messages.Refused)[0].code == "stopping"
    assert MODEL.name in job.windows


def test_silence_that_nobody_listened_to_is_no_death() -> None:
    """The broker was stopped for a minute (SIGSTOP, a laptop's lid, a disk that hung): its workers' beats are on their
    way still, and nobody is declared gone for the broker's own absence (S3)."""
    state = fresh()
    feed(state, came(beat(log_in(state)), b"p"))
    feed(state, Deaf(60.0), later(60.0))
    feed(state, Tick(10**12), later(60.0))
    assert list(state.sessions) == [b"p"]
    feed(state, Tick(10**12), later(60.0 + limits.LIVENESS_S))
    assert not state.sessions


def test_without_that_word_the_brokers_absence_kills_every_session() -> None:
    """The control: the same minute, taken for the workers' silence."""
    state = fresh()
    feed(state, came(beat(log_in(state)), b"p"))
    feed(state, Tick(10**12), later(60.0))
    assert not state.sessions


def test_what_is_remembered_of_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of containers, each start under a new name: of too many, who came longest ago is forgotten, here and in
    the store, unless it is here or its lines are; who comes again counts as new."""
    monkeypatch.setattr(limits, "WORKERS_KNOWN_MAX_COUNT", 3)
    state = fresh(absent={"awaited"}, grace_until=NOW.mono + 30)
    state.known["awaited"] = KnownWorker("", 1, 1, 1)
    log_in(state, b"live", worker="live")
    for name in ("a", "b"):
        log_in(state, name.encode(), worker=name)
        feed(state, Faulted(name.encode(), "x", "gone"))
    assert list(state.known) == ["awaited", "live", "b"]
    log_in(state, b"b2", worker="b", login=2)
    step = feed(state, came(hello(worker="c"), b"c"))
    assert not wrote(step, ForgetWorker)  # all are here or awaited
    feed(state, Faulted(b"b2", "x", "gone"))
    state.accused["b"] = (1, LineRef(JOB, 0, 1).line)
    step = feed(state, came(hello(worker="d"), b"d"))
    assert wrote(step, ForgetWorker) == [ForgetWorker("b")]
    assert "b" not in {*state.known, *state.accused}
