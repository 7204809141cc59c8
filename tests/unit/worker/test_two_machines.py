"""The worker's machine and the broker's own rules, joined by a fake link: what each side's tests assume of the other.

The broker here is the real one (``broker.rules``) with a dict for a store; the link delivers whole messages through the
real codec. D1-D4 and S3-S4 are checked where both halves are needed to break them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from broker import rules
from broker.effects import AssignLine, BodyAt, ReturnLine, Send, SendBatch, StoreResult
from broker.inputs import Came, Now, Tick
from broker.state import ASSIGNED, ENDED, WAITING, Fact, Job, Line, State, Window
from common import codec, limits
from common import messages as wire
from common.messages import LineRef
from worker import inputs as on

JOB = "11111111-1111-4111-8111-111111111111"
BODY = b'{"model":"echo"}'


class FakeBroker:
    """The broker's rules over a dict. ``kill`` forgets all but the dict."""

    def __init__(self, lines: int) -> None:
        self.rows: dict[int, dict[str, Any]] = {
            i: {"state": WAITING, "attempt": 0, "result": None} for i in range(lines)
        }
        self.incarnation = 0
        self.epochs = 0
        self.logins: dict[str, Any] = {}
        self.results: Counter[int] = Counter()
        self.wasted = 0
        self.notes: list[Any] = []
        self.outbound: list[tuple[bytes, Any]] = []
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        """What the store knows becomes the state: assigned lines are unclaimed, everything else waits."""
        self.incarnation += 1
        self.state = State("store-a", self.incarnation, next_epoch=self.epochs + 1, known=self.logins)
        job = Job(JOB, 1, "", "job", 1, "", False, 0, 0, "", 0.0, status="in_progress", good=len(self.rows))
        job.completed = sum(row["state"] == ENDED for row in self.rows.values())
        window = job.windows["echo"] = Window("echo", exhausted=True)
        for index, row in self.rows.items():
            line = Line(index, "/v1/chat/completions", "echo", 0, len(BODY), row["attempt"], row.get("held", 0))
            if row["state"] == WAITING:
                window.add(line)
            elif row["state"] == ASSIGNED:
                line.worker = row["worker"]
                job.assigned[index] = line
                self.state.absent.add(line.worker)
                self.state.grace_until = self.now + limits.GRACE_S
        self.state.jobs[JOB] = job
        self.outbound = []

    def tell(self, peer: bytes, message: Any) -> None:
        came = Came(peer, "", True, codec.decode(codec.encode(message)))
        facts = {ref.line: self._fact(ref) for ref in rules.lookups(self.state, came)}
        self._do(rules.handle(self.state, Came(peer, "", True, came.message, facts), self._clock()))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self._do(rules.handle(self.state, Tick(10**12), self._clock()))

    def _clock(self) -> Now:
        return Now(self.now, self.now)

    def _fact(self, ref: LineRef) -> Fact | None:
        row = self.rows.get(ref.index)
        if row is None:
            return None
        line = Line(ref.index, "/v1/chat/completions", "echo", 0, len(BODY), row["attempt"], row.get("held", 0))
        return Fact(1, row["state"], line, row.get("result_attempt", 0))

    def _do(self, step: Any) -> None:
        for write in step.writes:
            if isinstance(write, AssignLine):
                self.rows[write.idx] |= {
                    "state": ASSIGNED, "attempt": write.attempt, "held": write.held, "worker": write.worker
                }  # fmt: skip
            elif isinstance(write, ReturnLine):
                self.rows[write.idx] |= {"state": WAITING}
            elif isinstance(write, StoreResult):
                self.rows[write.idx] |= {"state": ENDED, "result": write.body, "result_attempt": write.attempt}
                self.results[write.idx] += 1
        self.epochs = max(self.epochs, self.state.next_epoch - 1)
        self.notes += step.notes
        self.wasted += sum(note.kind == "line_wasted" for note in step.notes)
        for send in step.sends:
            if isinstance(send, Send):
                self.outbound.append((send.peer, send.message))
            elif isinstance(send, SendBatch):
                lines = tuple(self._line(one) for one in send.lines)
                self.outbound.append((send.peer, wire.Batch(send.fence, send.assignment, lines)))

    @staticmethod
    def _line(one: BodyAt) -> wire.BatchLine:
        return wire.BatchLine(one.ref, one.url, len(BODY), BODY)


class Pair:
    """A rig and a broker with a link between them; ``peer`` changes with each login, as a ROUTER names connections."""

    def __init__(self, rig: Any, broker: FakeBroker) -> None:
        self.rig, self.broker = rig, broker
        self.connections = 0
        self.heard = 0
        self.ran: Counter[int] = Counter()
        self.on_way: Callable[[Any], bool] = lambda message: True

    @property
    def peer(self) -> bytes:
        return b"peer-%d" % self.connections

    def exchange(self, seconds: float = 0.1) -> None:
        """One round: both clocks go on, everything said arrives."""
        self.broker.tick(seconds)
        self.rig.tick(seconds, steps=int(self.rig.now * 10))
        if self.rig.link is not None and self.rig.session.state.name == "CONNECTING":
            self.connections += 1
            self.rig.tell(on.LinkReady())
        for _ in range(20):
            upward, self.heard = self.rig.said[self.heard :], len(self.rig.said)
            for _, message in upward:
                if self.on_way(message):
                    self.broker.tell(self.peer, message)
            self.broker.tick()
            downward, self.broker.outbound = self.broker.outbound, []
            for peer, message in downward:
                if peer == self.peer and self.rig.link is not None and self.on_way(message):
                    self.rig.hear(codec.decode(codec.encode(message)))
            if not upward and not downward:
                break
        self.broker.state.check()

    def cut(self) -> None:
        """The link breaks; what was on it is lost."""
        self.heard = len(self.rig.said)
        self.broker.outbound = []
        self.rig.tell(on.LinkLost("cut"))

    def work(self, most: int = 10**9) -> None:
        """The worker's inside: tokenize, run, finish."""
        jobs, self.rig.jobs = self.rig.jobs[:most], self.rig.jobs[most:]
        for job in jobs:
            self.ran[job.ref.index] += 1
            self.rig.run(job.ref)
            self.rig.finish(job.ref)

    def until_done(self, rounds: int = 400) -> None:
        for _ in range(rounds):
            if len(self.broker.results) == len(self.broker.rows) and not self.rig.disk:
                return
            self.exchange()
            self.work()
        raise AssertionError(f"{len(self.broker.results)} of {len(self.broker.rows)} lines ended")


@pytest.fixture
def pair(rigs: Any) -> Pair:
    rig = rigs()
    rig.load(4)
    return Pair(rig, FakeBroker(20))


def test_a_job_runs_through_both_machines(pair: Pair) -> None:
    """Nothing goes wrong: each line is run once and ends once (D4), within the credit granted."""
    pair.until_done()
    assert pair.broker.results == Counter(range(20)) == pair.ran
    assert pair.rig.session.counts["stale"] == pair.rig.session.counts["duplicate"] == 0


def test_a_broker_killed_and_back_runs_nothing_twice(pair: Pair) -> None:
    """D3: work in the engine and work in the outbox at the kill; all of it is claimed, none is run again."""
    pair.exchange()
    pair.exchange()
    pair.work(2)
    pair.cut()
    pair.broker.start()
    pair.work(2)
    pair.until_done()
    assert pair.broker.results == Counter(range(20)) == pair.ran
    assert pair.broker.wasted == 0


def test_an_ack_cut_off_costs_no_second_run(pair: Pair) -> None:
    """D1: the broker committed, its word was lost with the link."""
    pair.on_way = lambda message: not isinstance(message, wire.Ack)
    pair.exchange()
    pair.exchange()
    pair.work(3)
    pair.exchange()
    assert len(pair.rig.disk) == 3
    pair.on_way = lambda message: True
    pair.cut()
    pair.until_done()
    assert pair.broker.results == Counter(range(20)) == pair.ran
    assert not pair.rig.disk


def test_a_flapping_link_loses_nothing_and_blames_nothing(pair: Pair) -> None:
    """The link breaks in every other round."""
    for number in range(100):
        pair.exchange()
        if number % 2:
            pair.work(1)
            pair.cut()
    pair.until_done()
    assert pair.broker.results == Counter(range(20))


def test_a_worker_that_drains_gives_back_what_it_did_not_begin(pair: Pair) -> None:
    """SIGTERM: another worker gets the rest at once."""
    pair.exchange()
    pair.exchange()
    pair.work(1)
    running = pair.rig.jobs[0].ref
    pair.rig.run(running)
    pair.rig.tell(on.Terminate("told to end"))
    pair.exchange()
    pair.rig.finish(running)
    pair.exchange()
    for _ in range(5):
        if pair.rig.exit is None:
            pair.exchange()
    assert pair.rig.exit is not None
    for _, message in pair.rig.said[pair.heard :]:
        pair.broker.tell(pair.peer, message)
    assert not pair.broker.state.sessions
    assert [i for i, row in pair.broker.rows.items() if row["state"] == ASSIGNED] == []
    assert len(pair.broker.results) == 2


def test_a_long_step_is_no_death(pair: Pair) -> None:
    """S3: a minute without a result: beats go on, on the session that holds the work, and it is not reclaimed."""
    pair.exchange()
    pair.exchange()
    held = len(pair.broker.state.by_worker["w"].lines)
    assert held
    for _ in range(120):
        pair.exchange(0.5)
    assert len(pair.broker.state.by_worker["w"].lines) == held
    assert not any(note.kind == "session_gone" for note in pair.broker.notes)


def test_control_split_registrations_lose_a_working_gpu(pair: Pair) -> None:
    """The control of S3, the published failure: beats on one registration, work on another. The broker declares the one
    with the work dead while its engine runs, and its lines are run again.
    """
    pair.exchange()
    pair.exchange()
    session = pair.broker.state.by_worker["w"]
    assert session.lines
    hello = wire.Hello(limits.SCHEMA_VERSION, "w-beats", 1, 1, "", (), 4, 1, (), 0, False)
    pair.broker.tell(b"second", hello)
    second = pair.broker.state.sessions[b"second"].fence
    for _ in range(12):
        pair.broker.tick(0.5)
        beat = wire.WorkerBeat(second, "ready", 1, 1, 4, 0, 0, (), wire.RingReport())
        pair.broker.tell(b"second", beat)
    assert b"second" in pair.broker.state.sessions
    assert "w" not in pair.broker.state.by_worker, "the session with the work was declared gone"
    assert any(row["state"] == WAITING and row["attempt"] for row in pair.broker.rows.values())


def test_a_recreated_store_gets_none_of_the_old_ones_results(pair: Pair, rigs: Any) -> None:
    """The broker starts on an empty volume: what the worker keeps belongs to another store and is not offered."""
    pair.exchange()
    pair.exchange()
    pair.work(2)
    pair.cut()
    kept = set(pair.rig.disk)
    assert kept
    fresh = FakeBroker(0)
    fresh.state.store_id = "store-b"
    pair.broker = fresh
    for _ in range(20):
        pair.exchange()
    assert pair.rig.session.store_id == "store-b"
    assert set(pair.rig.disk) == kept
    assert not fresh.results
