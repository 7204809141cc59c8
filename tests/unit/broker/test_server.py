"""The broker's turn: commit before speech, failures of disk and socket as inputs."""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.inputs import Came
from broker.questions import Questions
from broker.reader import Reader
from broker.server import Server, prepare
from common import limits, messages
from common.errors import RefusedError
from common.metrics import Metrics
from tests.unit.broker.kit import JOB, MODEL, beat, done, hello, result
from tests.unit.broker.shell_kit import Disk, good_line


class Clock:
    mono, wall_at = 100.0, 1_700_000_000.0

    def monotonic(self) -> float:
        return self.mono

    def wall(self) -> float:
        return self.wall_at


class TestLink:
    """Messages to hand out and messages said, with the number of commits that were done when they were said."""

    __test__ = False
    busy = False

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.incoming: list[Any] = []
        self.said: list[tuple[bytes, Any]] = []
        self.deaf: set[bytes] = set()

    def wait(self, seconds: float) -> None:
        pass

    def receive(self) -> Iterator[Any]:
        incoming, self.incoming = self.incoming, []
        yield from incoming

    def send(self, peer: bytes, message: Any) -> bool:
        assert not self.disk.store.connection.in_transaction, "said before the commit"
        if peer in self.deaf:
            return False
        self.said.append((peer, message))
        return True

    def send_batch(self, batch: Any) -> bool:
        return self.send(batch.peer, batch)

    def forget(self, job: str) -> None:
        pass

    def send_parts(self, mono: float) -> list[bytes]:
        return []


class Bench:
    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder)
        self.link: Any = TestLink(self.disk)
        self.clock: Any = Clock()
        self.metrics = Metrics()
        state = prepare(self.disk.store, self.disk.spool, self.clock, 30.0, 0)
        self.server = Server(state, self.disk.store, self.disk.spool, self.link, self.clock, folder, self.metrics)

    def turn(self, *received: Any, peer: bytes = b"p") -> list[Any]:
        """One turn with these messages; what was said to ``peer``."""
        self.link.incoming += [Came(peer, "", True, message) for message in received]
        self.link.said.clear()
        self.server.turn()
        self.server.state.check()
        return [message for whom, message in self.link.said if whom == peer]

    def ended(self, outcome: str) -> float:
        """The metric of lines that ended so."""
        return self.metrics.lines.labels(outcome=outcome)._value.get()

    def submit(self, data: bytes, lenient: bool = False) -> None:
        digest = hashlib.sha256(data).hexdigest()
        self.turn(messages.Submit(1, JOB, "n", len(data), digest, lenient, 0, 0, "m"))
        self.turn(messages.Chunk(2, JOB, 0, data), messages.Seal(3, JOB))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.disk.close()


def test_a_job_end_to_end_and_nothing_is_said_before_its_commit(bench: Bench) -> None:
    """Submit, log in, work, ack, answer: each word after its write (the link checks it at every send)."""
    bench.submit(b"".join(good_line(number) for number in range(3)))
    assert bench.server.state.jobs[JOB].status == "in_progress"
    assert isinstance(bench.turn(hello())[0], messages.Welcome)
    session = bench.server.state.sessions[b"p"]
    (batch,) = bench.turn(beat(session))
    assert len(batch.lines) == 3
    (ack,) = bench.turn(done(session, *[result(line.ref) for line in batch.lines]))
    assert [one.verdict for one in ack.verdicts] == ["stored"] * 3
    (info,) = bench.turn(messages.AskStatus(7, JOB))
    assert (info.status, info.completed) == ("completed", 3)
    assert bench.ended("completed") == 3
    assert bench.disk.spool.size(JOB) == 0


def test_a_result_that_comes_twice_in_one_turn(bench: Bench) -> None:
    """Two messages of one turn: the second is judged by what the first wrote, though nothing is committed yet."""
    bench.submit(good_line(0) + good_line(1))
    bench.turn(hello())
    session = bench.server.state.sessions[b"p"]
    (batch,) = bench.turn(beat(session))
    first = done(session, result(batch.lines[0].ref))
    acks = bench.turn(first, first)
    assert [ack.verdicts[0].verdict for ack in acks] == ["stored", "stored"]


def test_a_full_disk_for_an_input_is_told_to_its_client(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while a chunk is written: the client hears it, everything else goes on (D6)."""
    bench.turn(messages.Submit(1, JOB, "n", 5, "a" * 64, False, 0, 0, "m"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench.disk.spool, "append", full)
    said = bench.turn(messages.Chunk(2, JOB, 0, b"12345")) + bench.turn()
    assert [type(one) for one in said] == [messages.Failure]
    assert "No space left" in said[0].message
    monkeypatch.undo()
    (need,) = bench.turn(messages.Chunk(3, JOB, 0, b"12345"))
    assert need.offset == 5


def test_who_does_not_take_what_is_said_loses_its_session(bench: Bench) -> None:
    """A ROUTER that would block: the session ends in the next turn, its lines wait again."""
    bench.submit(good_line(0))
    bench.turn(hello())
    session = bench.server.state.sessions[b"p"]
    bench.link.deaf.add(b"p")
    bench.turn(beat(session))
    assert len(bench.server.state.jobs[JOB].assigned) == 1
    bench.turn()
    assert not bench.server.state.sessions
    assert bench.server.state.jobs[JOB].waiting == 1
    assert bench.metrics.sessions_gone_working.labels(reason="unsendable")._value.get() == 1


def test_a_cancelled_job_ends_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long job cancelled: a slice of its waiting lines a turn, and beats go on between."""
    monkeypatch.setattr(limits, "END_LINES_A_TURN", 2)
    bench.submit(b"".join(good_line(number) for number in range(5)))
    (info,) = bench.turn(messages.CancelJob(1, JOB))
    assert info.status == "cancelling"
    for _ in range(4):
        bench.turn()
    (info,) = bench.turn(messages.AskStatus(1, JOB))
    assert (info.status, info.failed) == ("cancelled", 5)
    audit = bench.turn(messages.AskAudit(1, JOB))[0]
    assert (audit.holds, audit.error_lines) == (True, 5)
    assert bench.ended("cancelled") == 5
    assert bench.ended("completed") == bench.ended("failed") == bench.ended("expired") == 0


def test_a_line_that_ends_without_a_run_is_counted_too(bench: Bench) -> None:
    """A bad line of a lenient job: the metric of ended lines adds up to the lines of the job."""
    bench.submit(good_line(0) + b"no json\n", lenient=True)
    bench.turn(hello())
    session = bench.server.state.sessions[b"p"]
    (batch,) = bench.turn(beat(session))
    bench.turn(done(session, result(batch.lines[0].ref)))
    assert (bench.ended("completed"), bench.ended("failed")) == (1, 1)


def test_a_broker_that_was_replaced_stops_with_nothing_said(bench: Bench) -> None:
    """A standby took the store over: this turn's words are never said."""
    bench.turn(hello())
    bench.disk.store.connection.execute("UPDATE broker SET incarnation = incarnation + 1")
    with pytest.raises(RefusedError, match="took this store over"):
        bench.turn(messages.AskWorkers(1))
    assert not bench.link.said


def test_stopping_is_a_last_turn(bench: Bench) -> None:
    """SIGTERM: workers hear it, and what was decided is committed."""
    bench.turn(hello())
    bench.server.stopping = True
    bench.link.said.clear()
    bench.server.run()
    assert any(isinstance(message, messages.Unknown) for _, message in bench.link.said)


def test_memory_does_not_grow_with_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """500,000 lines wait in the store, not in memory (cases 14): a window of them, and what is assigned."""
    monkeypatch.setattr(limits, "WAITING_LOADED_MAX_COUNT", 8)
    monkeypatch.setattr(limits, "WAITING_LOADED_MIN_COUNT", 8)
    bench.submit(b"".join(good_line(number) for number in range(200)))
    bench.turn(hello())
    session = bench.server.state.sessions[b"p"]
    most, count, number = 0, 0, 0
    while JOB in bench.server.state.jobs:
        said = bench.turn(beat(session, 4, 10**6, assignment=number, models=(MODEL,)))
        job = bench.server.state.jobs[JOB]
        most = max(most, sum(len(window.lines) for window in job.windows.values()) + len(job.assigned))
        for batch in said:
            number = batch.assignment
            count += len(batch.lines)
            bench.turn(done(session, *[result(line.ref) for line in batch.lines]))
    assert count == 200
    assert most <= 8 + 8 // 4 + 4


def test_a_turn_that_begins_late_says_so_before_anybody_is_judged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP hits the broker while it waits for messages: the workers it finds silent were not (S3)."""
    bench.turn(hello())
    bench.turn(beat(bench.server.state.sessions[b"p"]))
    monkeypatch.setattr(bench.link, "wait", lambda seconds: setattr(bench.clock, "mono", bench.clock.mono + 60.0))
    bench.turn()
    assert list(bench.server.state.sessions) == [b"p"]
    monkeypatch.setattr(bench.link, "wait", lambda seconds: None)
    bench.clock.mono += limits.LIVENESS_S
    bench.turn()
    assert not bench.server.state.sessions


def test_an_audit_is_answered_by_a_later_turn_and_no_turn_waits_for_it(bench: Bench) -> None:
    """The audit of a job of half a million lines: beats go on meanwhile."""
    reader = Reader(bench.disk.folder / "broker.sqlite")
    bench.server.questions = Questions(reader, bench.disk.folder)
    bench.disk.check(bench.disk.sealed(good_line(1)))
    bench.server.state.jobs.update(bench.disk.state.jobs)
    assert bench.turn(messages.AskAudit(5, JOB)) == []
    for _ in range(1000):
        said = bench.turn()
        if said:
            break
        time.sleep(0.005)
    assert [(one.request, one.finished) for one in said] == [(5, False)]
    assert [one.code for one in bench.turn(messages.AskAudit(6, "nobody's"))] == ["no_job"]
    reader.close()


def test_workers_that_are_gone_leave_the_metrics_in_the_end(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers under new names for a year: those that are here and the newest that went are shown."""
    monkeypatch.setattr(limits, "WORKERS_SHOWN_MAX_COUNT", 2)
    here = bench.server.state.by_worker
    here["stays"] = None
    for number in range(5):
        here[f"w{number}"] = None
        bench.server._show_workers()
        del here[f"w{number}"]
        bench.server._show_workers()
    shown = {sample.labels["worker"]: sample.value for metric in bench.metrics.sessions.collect()
             for sample in metric.samples}  # fmt: skip
    assert shown == {"stays": 1.0, "w3": 0.0, "w4": 0.0}
    here.clear()
