"""The real broker process over real sockets: a job end to end, and SIGKILL in the middle of one (D1, D3, D4)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, limits, messages, wire
from common import keys as key_files
from common.config import KeySettings
from common.ids import new_id
from common.messages import HeldLine, LineRef, ModelInfo, Result, Verdict

MODEL = ModelInfo("echo", "none", 4096)
DEADLINE_S = 30.0


class Peer:
    """One DEALER of the test's own."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: KeySettings) -> None:
        self.socket = wire.dealer(context, endpoint, keys)
        wire.connect(self.socket, endpoint)

    def send(self, message: object) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                self.socket.send(codec.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.005)
            else:
                return
        raise TimeoutError("the broker does not take messages")

    def receive(self, seconds: float) -> Any:
        if self.socket.poll(int(seconds * 1000)):
            return codec.decode(self.socket.recv())
        return None

    def ask(self, message: Any, kind: type) -> Any:
        self.send(message)
        answer = self.receive(DEADLINE_S)
        assert isinstance(answer, kind), answer
        return answer

    def close(self) -> None:
        self.socket.close(0)


@dataclass
class EchoWorker:
    """Answers with the request's own text; keeps what is not acknowledged, as an outbox would."""

    context: zmq.Context[Any]
    keys: KeySettings
    endpoint: str
    name: str = "echo-0"
    hold_after: int = 10**9
    """Results sent at most; the rest stays finished and undelivered."""
    login: int = 0
    delivered: int = 0
    fence: messages.Fence | None = None
    store_id: str = ""
    assignment: int = 0
    outbox: dict[LineRef, Result] = field(default_factory=dict)
    runs: Counter[tuple[str, int]] = field(default_factory=Counter)
    peer: Peer | None = None
    beat_at: float = 0.0

    def connect(self) -> None:
        self.close()
        self.login += 1
        self.fence = None
        self.peer = Peer(self.context, self.endpoint, self.keys)
        held = tuple(HeldLine(ref, "finished") for ref in self.outbox)
        self.peer.send(
            messages.Hello(
                limits.SCHEMA_VERSION, self.name, 1, self.login, self.store_id if held else "", (MODEL,), 8, 1 << 20,
                held, 0, False,
            )
        )  # fmt: skip

    def turn(self, seconds: float = 0.01) -> None:
        assert self.peer is not None
        message = self.peer.receive(seconds)
        while message is not None:
            self._handle(message)
            message = self.peer.receive(0)
        if self.fence is not None and time.monotonic() - self.beat_at > 0.1:
            self._beat()

    def _handle(self, message: Any) -> None:
        assert self.peer is not None
        match message:
            case messages.Welcome():
                self.fence, self.store_id = message.fence, message.fence.store_id
                self.assignment = 0
                for verdict in message.verdicts:
                    self._judged(verdict)
                self._deliver(list(self.outbox.values()))
                self._beat()
            case messages.Batch():
                self.assignment = message.assignment
                results = [self._run(line) for line in message.lines]
                self.outbox.update({one.ref: one for one in results})
                self._deliver(results)
                self._beat()
            case messages.Ack():
                for verdict in message.verdicts:
                    self.outbox.pop(verdict.ref, None)
            case messages.Unknown() | messages.Refused():
                self.fence = None

    def _judged(self, verdict: Verdict) -> None:
        if verdict.verdict in ("stored", "cancel"):
            self.outbox.pop(verdict.ref, None)

    def _run(self, line: messages.BatchLine) -> Result:
        self.runs[(line.ref.job, line.ref.index)] += 1
        prompt = json.loads(line.body)["messages"][0]["content"]
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": prompt}}]}).encode()
        return Result(line.ref, "ok", 200, 1, 1, len(body), body)

    def _deliver(self, results: list[Result]) -> None:
        assert self.peer is not None
        assert self.fence is not None
        room = max(0, self.hold_after - self.delivered)
        for one in results[:room]:
            self.peer.send(messages.Done(self.fence, (one,)))
            self.delivered += 1

    def _beat(self) -> None:
        assert self.peer is not None
        assert self.fence is not None
        self.beat_at = time.monotonic()
        self.peer.send(
            messages.WorkerBeat(
                self.fence, "ready", 1, 1, 8, 16, 1 << 20, (), messages.RingReport(), (MODEL,), self.assignment
            )
        )

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()


class Broker:
    """The process under test."""

    def __init__(self, state: Path, keys: Path, port_of: str = "tcp://127.0.0.1:*") -> None:
        self.state, self.keys, self.bind = state, keys, port_of
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def start(self) -> None:
        (self.state / "endpoint").unlink(missing_ok=True)
        environment = {**os.environ, "HAULIER_LOG": "json"}
        with (self.state.parent / "broker.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "broker", "--bind", self.bind, "--state", str(self.state), "--keys",
                 str(self.keys), "--disk-reserve-gib", "0", "--grace", "20"],
                stderr=output, env=environment,
            )  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        while not (self.state / "endpoint").exists():
            assert self.process.poll() is None, (self.state.parent / "broker.log").read_text()
            assert time.monotonic() < deadline, "the broker does not come up"
            time.sleep(0.02)
        self.endpoint = (self.state / "endpoint").read_text().strip()
        self.bind = self.endpoint

    def kill(self, how: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    key_files.init(tmp_path / "keys")
    (tmp_path / "state").mkdir()
    one = Broker(tmp_path / "state", tmp_path / "keys")
    yield one
    if one.process is not None and one.process.poll() is None:
        one.kill()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    one: zmq.Context[Any] = zmq.Context()
    yield one
    one.destroy(0)


def _input(count: int) -> bytes:
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "echo", "messages": [{"role": "user", "content": f"say {number}"}]}}
        for number in range(count)
    ]  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _submit(client: Peer, data: bytes) -> str:
    job = new_id()
    need = client.ask(
        messages.Submit(1, job, "test", len(data), hashlib.sha256(data).hexdigest(), False, 0, 0, "echo"), messages.Need
    )
    while need.offset < len(data):
        chunk = data[need.offset : need.offset + 10_000]
        need = client.ask(messages.Chunk(2, job, need.offset, chunk), messages.Need)
    client.ask(messages.Seal(3, job), messages.JobInfo)
    return job


def _status(client: Peer, job: str) -> messages.JobInfo:
    found: messages.JobInfo = client.ask(messages.AskStatus(4, job), messages.JobInfo)
    return found


def _fetch(client: Peer, job: str, which: str) -> list[dict[str, Any]]:
    offset, lines, ended = 0, [], False
    while not ended:
        page = client.ask(messages.Fetch(5, job, which, offset), messages.Lines)
        lines += [json.loads(line) for line in page.lines]
        offset, ended = page.next_offset, page.ended
    return lines


def test_a_killed_broker_costs_nothing(broker: Broker, context: zmq.Context[Any]) -> None:
    """SIGKILL in the middle of a job: every line once in the output, and no line is run a second time (D1, D3, D4)."""
    broker.start()
    keys = KeySettings(broker.keys)
    client = Peer(context, broker.endpoint, keys)
    worker = EchoWorker(context, keys, broker.endpoint, hold_after=100)
    worker.connect()
    job = _submit(client, _input(400))
    deadline = time.monotonic() + DEADLINE_S
    while worker.delivered < 100 or sum(worker.runs.values()) < 110:
        worker.turn()
        assert time.monotonic() < deadline, _status(client, job)
    broker.kill()
    client.close()
    broker.start()
    client = Peer(context, broker.endpoint, keys)
    assert _status(client, job).status == "in_progress"
    worker.hold_after = 10**9
    worker.connect()
    while _status(client, job).status != "completed":
        worker.turn()
        assert time.monotonic() < deadline, _status(client, job)
    info = _status(client, job)
    lines = _fetch(client, job, "output")
    audit = client.ask(messages.AskAudit(6, job), messages.Audit)
    client.close()
    worker.close()
    assert (info.total, info.completed, info.failed, info.wasted) == (400, 400, 0, 0)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"id-{number}" for number in range(400))
    first = next(line for line in lines if line["custom_id"] == "id-7")
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "say 7"
    assert first["response"]["status_code"] == 200
    assert first["error"] is None
    assert set(worker.runs.values()) == {1}
    assert audit.holds
    assert audit.runs == 400
    assert _ended_by(broker, signal.SIGTERM) == 0


def _ended_by(broker: Broker, how: int) -> int:
    return broker.kill(how)


def test_a_second_broker_on_the_same_state_is_refused(broker: Broker) -> None:
    """The same compose file started twice: one line that names the process to stop, exit code 4."""
    broker.start()
    command = [sys.executable, "-m", "broker", "--bind", "tcp://127.0.0.1:*", "--state", str(broker.state)]
    second = subprocess.run(
        [*command, "--keys", str(broker.keys)], capture_output=True, timeout=DEADLINE_S, check=False, text=True
    )
    assert second.returncode == 4
    assert "in use by another broker" in second.stderr.splitlines()[-1]
    assert broker.kill(signal.SIGTERM) == 0


def test_a_taken_port_is_refused_in_one_line(broker: Broker, tmp_path: Path) -> None:
    """Something else listens there already: exit code 4, and the flag to change is named."""
    broker.start()
    other = tmp_path / "other"
    second = subprocess.run(
        [sys.executable, "-m", "broker", "--bind", broker.endpoint, "--state", str(other), "--keys", str(broker.keys)],
        capture_output=True, timeout=DEADLINE_S, check=False, text=True,
    )  # fmt: skip
    assert second.returncode == 4
    assert "--bind" in second.stderr.splitlines()[-1]
    assert broker.kill(signal.SIGTERM) == 0
