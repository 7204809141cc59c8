"""The worker's end of a session: who may say what when (S1-S4), and what a worker does about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from common import limits
from common import messages as wire
from common.errors import InvariantError
from common.messages import Fence, LineRef
from worker import inputs as on
from worker.session import MESSAGES, TABLE
from worker.states import State
from worker.structures import HeldUp, Outcome

Line = Callable[..., LineRef]
FENCE = Fence("store-a", 1, 1, 1)
SAMPLES: dict[type, Any] = {
    wire.Welcome: wire.Welcome(FENCE, 1.0, 5.0, (), False),
    wire.Refused: wire.Refused("stopping", "later"),
    wire.Unknown: wire.Unknown("who?"),
    wire.Batch: wire.Batch(FENCE, 1, ()),
    wire.BodyPart: wire.BodyPart(FENCE, LineRef("j", 0, 1), 0, b"x"),
    wire.BrokerBeat: wire.BrokerBeat(FENCE),
    wire.PartTaken: wire.PartTaken(FENCE, LineRef("j", 0, 1), 0),
    wire.Ack: wire.Ack(FENCE, ()),
    wire.CancelLines: wire.CancelLines(FENCE, ()),
    wire.Drain: wire.Drain(FENCE, "maintenance"),
    wire.Bye: wire.Bye(FENCE, "off", ()),
}
INPUTS: dict[type, Any] = {
    on.LinkReady: on.LinkReady(),
    on.LinkLost: on.LinkLost("cut"),
    on.Received: on.Received(SAMPLES[wire.BrokerBeat]),
    on.Loaded: on.Loaded((), 1, 1),
    on.Published: on.Published(()),
    on.Admitted: on.Admitted(()),
    on.Ended: on.Ended(Outcome(LineRef("j", 9, 1), "ok", 200, 1, 1, b"{}")),
    on.Stored: on.Stored(()),
    on.StoreBlocked: on.StoreBlocked("disk full"),
    on.Tick: on.Tick(on.Snapshot()),
    on.Terminate: on.Terminate("told to"),
}


def reach(rig: Any, state: State) -> None:
    """Bring a fresh rig into ``state``."""
    if state == State.LEFT:
        rig.tell(on.Terminate("test", at_once=True))
    elif state != State.OUT:
        rig.tick()
        if state != State.CONNECTING:
            rig.tell(on.LinkReady())
        if state in (State.UP, State.DRAINING):
            rig.welcome()
        if state == State.DRAINING:
            rig.hear(wire.Drain(rig.fence, "test"))
    assert rig.session.state == state


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_pair_of_state_and_input_does_as_the_table_says(rigs: Any, state: State, kind: type) -> None:
    """A shell with a bug tells a session something impossible: it stops, with its books as they were."""
    rig = rigs()
    reach(rig, state)
    before = (rig.session.fence, rig.session.login, rig.session.leaving, len(rig.said))
    if kind in TABLE[state]:
        rig.tell(INPUTS[kind])
        return
    with pytest.raises(InvariantError, match=kind.__name__):
        rig.session.handle(INPUTS[kind], rig.now)
    assert (rig.session.fence, rig.session.login, rig.session.leaving, len(rig.said)) == before
    assert rig.session.state == state


@pytest.mark.parametrize("state", [State.GREETING, State.UP, State.DRAINING])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_message_out_of_turn_costs_the_broker_its_session_and_nothing_else(
    rigs: Any, state: State, kind: type
) -> None:
    """A broker with a bug: the worker logs out with a reason and tries again; it never crashes."""
    rig = rigs()
    reach(rig, state)
    rig.hear(SAMPLES[kind])
    if kind not in MESSAGES[state]:
        assert rig.session.state == State.OUT
        assert "protocol" in rig.notes[-1].fields["reason"]


def test_it_logs_in_before_its_model_is_loaded_and_grants_nothing_until_then(rig: Any) -> None:
    """S2: after a restart what the outbox holds is handed over at once, however long loading takes."""
    rig.up(loaded=False)
    beat = rig.of(wire.WorkerBeat)[0]
    assert (beat.phase, beat.credit_lines, beat.credit_bytes, beat.models) == ("loading", 0, 0, ())
    rig.load()
    rig.tick()
    beat = rig.of(wire.WorkerBeat)[-1]
    assert beat.phase == "ready"
    assert beat.models[0].name == "echo"
    assert beat.credit_lines == 4 + limits.PREFETCH_MIN_LINES


def test_everything_travels_on_one_link_under_one_fence(rig: Any, line: Line) -> None:
    """S1: beats, work, results: one registration, one socket."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0))
    rig.tick(1.1)
    assert {endpoint for endpoint, _ in rig.said} == {"tcp://a:1"}
    assert {m.fence for _, m in rig.said if hasattr(m, "fence")} == {rig.fence}


def test_beats_carry_the_engines_progress_and_what_it_runs(rig: Any, line: Line) -> None:
    """S3: a GPU at work on a long step is seen to be at work."""
    rig.up()
    rig.batch(line(0), line(1))
    rig.run(line(0))
    rig.tick(1.1, steps=7)
    beat = rig.of(wire.WorkerBeat)[-1]
    assert beat.steps == 7
    assert beat.running == (line(0),)
    assert beat.assignment == 1
    assert rig.ran == [line(0)]
    assert (beat.head, beat.waits) == (None, "")
    rig.snapshot = dataclasses.replace(rig.snapshot, held_up=HeldUp(line(1), "segments: all 1 are owned"))
    rig.tick(1.1)
    beat = rig.of(wire.WorkerBeat)[-1]
    assert (beat.head, beat.waits) == (line(1), "segments: all 1 are owned")


@pytest.mark.parametrize("field", ["store_id", "broker_incarnation", "worker_incarnation", "epoch"])
def test_work_of_another_fence_is_dropped_and_counted(rig: Any, line: Line, field: str) -> None:
    """S4: a batch from before a takeover, late on the wire, is not run: somebody else has the line by now."""
    rig.up()
    values = {name: getattr(rig.fence, name) for name in Fence.__slots__}
    values[field] = "store-b" if field == "store_id" else values[field] + 1
    body = (wire.BatchLine(line(0), "/v1/chat/completions", 2, b"{}"),)
    rig.hear(wire.Batch(Fence(**values), 1, body))
    assert rig.held(line(0)) is None
    assert rig.session.counts["stale"] == 1
    assert rig.session.state == State.UP


def test_control_without_the_fence_check_a_stale_batch_is_run(rig: Any, line: Line) -> None:
    """The control of S4: the same batch, told as if its fence were the session's, is taken."""
    rig.up()
    rig.session.fence = stale = Fence(rig.fence.store_id, 9, 1, 1)
    rig.hear(wire.Batch(stale, 1, (wire.BatchLine(line(0), "/v1/chat/completions", 2, b"{}"),)))
    assert rig.held(line(0)) is not None


def test_a_stale_ack_deletes_nothing(rig: Any, line: Line) -> None:
    """S4: the word of a broker that was taken over is not the store's word."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.finish(line(0))
    rig.ack(line(0), fence=Fence(rig.fence.store_id, 7, 1, 1))
    assert line(0) in rig.disk
    rig.ack(line(0))
    assert line(0) not in rig.disk


def test_a_silent_broker_is_gone_and_the_session_with_it(rig: Any, line: Line) -> None:
    """S2, D2: five seconds of silence: log out, keep the work, log in again with what is held."""
    rig.up()
    rig.batch(line(0), line(1))
    rig.run(line(0))
    rig.tick(limits.LIVENESS_S + 0.1)
    assert rig.session.state == State.OUT
    assert rig.link is None
    rig.finish(line(0))
    rig.greet()
    hello = rig.of(wire.Hello)[-1]
    assert {(one.ref.index, one.state) for one in hello.held} == {(0, "finished"), (1, "running")}
    assert (hello.login, hello.store_id) == (2, "store-a")


def test_a_beat_of_the_broker_keeps_the_session(rig: Any) -> None:
    """Nothing to do for an hour: both sides beat, nobody is declared gone."""
    rig.up()
    for _ in range(20):
        rig.tick(limits.LIVENESS_S - 1)
        rig.hear(wire.BrokerBeat(rig.fence))
    assert rig.session.state == State.UP


def test_no_answer_to_a_login_is_the_end_of_it(rig: Any) -> None:
    """A standby that listens and says nothing: five seconds, then the next endpoint."""
    rig.tick()
    rig.tell(on.LinkReady())
    rig.tick(limits.HANDSHAKE_S)
    assert rig.session.state == State.OUT


def test_endpoints_are_tried_one_at_a_time_with_a_socket_for_each_login(rigs: Any) -> None:
    """A broker and its standby: never both at once, or every second message is lost."""
    rig = rigs(brokers=("tcp://a:1", "tcp://b:1"))
    tried = []
    for _ in range(4):
        rig.tick(5.0)
        tried.append(rig.link)
        rig.tell(on.LinkLost("nobody answers"))
        assert rig.link is None
    assert tried == ["tcp://a:1", "tcp://b:1", "tcp://a:1", "tcp://b:1"]
    assert rig.session.login == 4


def test_unknown_logs_in_again_at_the_same_broker(rigs: Any) -> None:
    """A broker was restarted behind a proxy that kept the connection: the worker is back within a moment."""
    rig = rigs(brokers=("tcp://a:1", "tcp://b:1"))
    rig.up()
    rig.hear(wire.Unknown("restarted"))
    rig.tick(limits.BACKOFF_FIRST_S)
    assert rig.link == "tcp://a:1"


@pytest.mark.parametrize("code", ["incarnation", "schema", "worker_id"])
def test_a_refusal_that_cannot_mend_ends_the_process(rig: Any, code: str) -> None:
    """A copy of this worker's state folder runs elsewhere, or one side must be upgraded: trying again is no use."""
    rig.tick()
    rig.tell(on.LinkReady())
    rig.hear(wire.Refused(code, "words"))
    assert rig.exit is not None
    assert rig.exit.code == 4
    assert "words" in rig.exit.reason


def test_any_other_refusal_is_tried_again(rig: Any) -> None:
    """A broker that is stopping refuses logins: its successor will not."""
    rig.tick()
    rig.tell(on.LinkReady())
    rig.hear(wire.Refused("stopping", "later"))
    assert rig.exit is None
    rig.greet()
    assert rig.session.state == State.GREETING


def test_a_welcome_to_another_run_is_not_ours(rig: Any) -> None:
    """S4: an answer meant for the process before this one."""
    rig.tick()
    rig.tell(on.LinkReady())
    rig.hear(wire.Welcome(Fence("store-a", 1, 99, 1), 1.0, 5.0, (), False))
    assert rig.session.state == State.OUT


def test_long_lists_travel_in_pages_both_ways(rigs: Any, line: Line) -> None:
    """10,000 results after a night's outage: the login is a few frames, and counts only when its last page is there."""
    count = limits.PAGE_MAX_COUNT + 5
    rows = {line(i): (Outcome(line(i), "ok", 200, 1, 1, b"{}"), "store-a") for i in range(count)}
    rig = rigs(rows=rows)
    rig.tick()
    rig.tell(on.LinkReady())
    pages = rig.of(wire.Hello)
    assert [(page.page, page.more, len(page.held)) for page in pages] == [(0, True, count - 5), (1, False, 5)]
    verdicts = tuple(wire.Verdict(line(i), "stored") for i in range(count))
    rig.welcome(verdicts=verdicts[:-5], more=True)
    assert rig.session.state == State.GREETING
    rig.welcome(verdicts=verdicts[-5:])
    assert rig.session.state == State.UP
    assert not rig.disk


def test_rows_of_another_store_are_never_sent_and_kept(rigs: Any, line: Line) -> None:
    """The broker's store was recreated: what belongs to the old one stays, and is claimed again if that one returns."""
    rig = rigs(rows={line(0): (Outcome(line(0), "ok", 200, 1, 1, b"{}"), "store-old")})
    rig.tick()
    rig.tell(on.LinkReady())
    assert rig.of(wire.Hello)[-1].store_id == "store-old"
    rig.welcome(store="store-new", verdicts=(wire.Verdict(line(0), "stored"),))
    assert line(0) in rig.disk
    assert not rig.done()
    assert any(note.name == "rows_of_another_store" for note in rig.notes)
    rig.tell(on.LinkLost("cut"))
    rig.greet()
    assert rig.of(wire.Hello)[-1].held == ()
    rig.welcome(store="store-old", epoch=2)
    assert rig.session.state == State.OUT, "the HELLO did not list what is held of this store"
    rig.greet()
    assert [one.ref for one in rig.of(wire.Hello)[-1].held] == [line(0)]
    rig.welcome(store="store-old", epoch=3, verdicts=(wire.Verdict(line(0), "send"),))
    assert [result.ref for result in rig.done()] == [line(0)]


def test_credit_is_what_can_still_be_taken_and_grows_back_with_results(rig: Any, line: Line) -> None:
    """Credit, not guessing: the broker never holds more than was granted, and hears soon when there is room again."""
    rig.up(concurrency=4)
    rig.batch(*(line(i) for i in range(8)))
    rig.tick(1.1)
    assert rig.of(wire.WorkerBeat)[-1].credit_lines == 0
    beats = len(rig.of(wire.WorkerBeat))
    for i in range(8):
        rig.run(line(i))
    for i in range(2):
        rig.finish(line(i))
    assert rig.of(wire.WorkerBeat)[-1].credit_lines == 2, "told without waiting for the next beat"
    assert len(rig.of(wire.WorkerBeat)) > beats


def test_a_full_ring_or_a_blocked_outbox_grants_nothing(rig: Any) -> None:
    """Disk full: finished work has nowhere to go, so no more is taken; and again when there is room."""
    rig.up()
    rig.tell(on.StoreBlocked("disk full"))
    rig.tick(1.1)
    assert rig.of(wire.WorkerBeat)[-1].credit_lines == 0
    rig.tell(on.Stored(()))
    rig.tick(1.1)
    assert rig.of(wire.WorkerBeat)[-1].credit_lines > 0
    rig.snapshot = on.Snapshot(free_entries=0, free_bytes=0)
    rig.tick(1.1)
    assert rig.of(wire.WorkerBeat)[-1].credit_lines == 0


def test_a_drain_hands_back_what_was_not_begun_and_finishes_the_rest(rig: Any, line: Line) -> None:
    """SIGTERM: the engine's lines end and are delivered, the others go back unblamed, then BYE."""
    rig.up()
    rig.batch(line(0), line(1), line(2))
    rig.run(line(0))
    rig.tokenize(line(1))
    rig.publish()
    rig.tell(on.Terminate("told to end"))
    assert rig.of(wire.Drain)
    assert [request.ref for request in rig.stopped] == [line(1)]
    rig.finish(line(1), status="cancelled")
    rig.finish(line(0))
    rig.tick()
    assert rig.exit is None, "its result is not acknowledged yet"
    rig.ack(line(0))
    rig.tick()
    bye = rig.of(wire.Bye)[0]
    assert set(bye.handed_back) == {line(1), line(2)}
    assert [result.ref for result in rig.done()] == [line(0)]
    assert rig.exit is not None
    assert rig.exit.code == 0


def test_a_batch_that_crosses_a_drain_is_handed_back(rig: Any, line: Line) -> None:
    """The broker dispatched while DRAIN was on its way: nothing is lost, nothing is run."""
    rig.up()
    rig.batch(line(5))
    rig.run(line(5))
    rig.tell(on.Terminate("told to end"))
    rig.batch(line(0), assignment=2)
    assert rig.held(line(0)) is None
    rig.finish(line(5))
    rig.ack(line(5))
    rig.tick()
    assert rig.of(wire.Bye)[0].handed_back == (line(0),)


def test_a_drain_ends_at_its_deadline(rig: Any, line: Line) -> None:
    """An answer of an hour must not keep a machine from going down: after a minute it is handed back."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.tell(on.Terminate("told to end"))
    for step in range(int(limits.DRAIN_S)):
        rig.tick(1.0, steps=step)
        if rig.exit is None:
            rig.hear(wire.BrokerBeat(rig.fence))
    assert rig.exit is not None
    assert rig.of(wire.Bye)[0].handed_back == (line(0),)


def test_a_second_signal_leaves_at_once(rig: Any, line: Line) -> None:
    """Somebody is impatient: no drain, no BYE; the outbox keeps what is finished."""
    rig.up()
    rig.batch(line(0))
    rig.tell(on.Terminate("told to end"))
    rig.tell(on.Terminate("told again", at_once=True))
    assert rig.exit is not None
    assert rig.exit.code == 143
    assert not rig.of(wire.Bye)


def test_a_drain_without_a_broker_ends_too(rig: Any, line: Line) -> None:
    """SIGTERM during an outage with nothing held: leave at once."""
    rig.tell(on.Terminate("told to end"))
    rig.tick()
    assert rig.exit is not None
    assert rig.exit.code == 0


def test_work_held_without_progress_ends_the_process(rig: Any, line: Line) -> None:
    """S2: a wedged GPU: there is no third state, the process ends and says why."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    for _ in range(int(limits.STALL_S) + 2):
        if rig.exit is None:
            rig.tick(1.0, steps=3)
        if rig.exit is None:
            rig.hear(wire.BrokerBeat(rig.fence))
    assert rig.exit is not None
    assert rig.exit.code == 70
    assert "no progress" in rig.exit.reason


def test_a_stopped_process_is_not_a_stalled_engine(rig: Any, line: Line) -> None:
    """SIGSTOP for ten minutes, then SIGCONT: nothing ran, and nothing was due."""
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    rig.tick(600.0, steps=3)
    assert rig.exit is None
    assert rig.session.counts["suspended"] == 1


def test_the_same_failure_is_not_logged_at_every_try(rig: Any) -> None:
    """A broker that is away for a night: a line in ten seconds, not twenty."""
    for _ in range(40):
        rig.tick(0.5)
        if rig.session.state == State.CONNECTING:
            rig.tell(on.LinkLost("nobody answers"))
    assert 1 <= sum(note.name == "session_gone" for note in rig.notes) <= 4
