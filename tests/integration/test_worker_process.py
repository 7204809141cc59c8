"""Real worker processes with a real broker: killed, drained, shut out. Runs are counted at the engine (S2, D1-D3)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, limits, messages, wire
from common import keys as key_files
from common.config import KeySettings
from common.ids import new_id
from worker.lines import target

DEADLINE_S = 60.0
CONCURRENCY = 8


class Fleet:
    """One broker, any workers, one client; every process ends with the test."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        self.folder, self.context = folder, context
        self.keys = folder / "keys"
        key_files.init(self.keys)
        self.endpoint = "tcp://127.0.0.1:*"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.client: zmq.Socket[bytes] | None = None

    def spawn(self, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HAULIER_LOG": "json", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=log, env=environment)
        self.processes.append(process)
        return process

    def broker(self) -> subprocess.Popen[bytes]:
        state = self.folder / "broker"
        (state / "endpoint").unlink(missing_ok=True)
        process = self.spawn(
            "broker", "broker", "--bind", self.endpoint, "--state", str(state), "--keys", str(self.keys),
            "--disk-reserve-gib", "0",
        )  # fmt: skip
        self.until(lambda: (state / "endpoint").exists(), "the broker listens")
        self.endpoint = (state / "endpoint").read_text().strip()
        return process

    def worker(self, name: str = "worker", *more: str) -> subprocess.Popen[bytes]:
        return self.spawn(
            "worker", name, "--echo", "--broker", self.endpoint, "--state", str(self.folder / "workers"),
            "--keys", str(self.keys), "--concurrency", str(CONCURRENCY), "--ring-mib", "1",
            "--echo-witness", str(self.folder / "witness"), *more,
        )  # fmt: skip

    def ask(self, message: Any, kind: type) -> Any:
        """Ask until somebody answers: a killed broker comes back."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.client is None:
                self.client = wire.dealer(self.context, self.endpoint, KeySettings(self.keys))
                wire.connect(self.client, self.endpoint)
            try:
                self.client.send(codec.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.02)
                if self.client.poll(200, zmq.POLLOUT):
                    continue
            else:
                if self.client.poll(2000):
                    answer = codec.decode(self.client.recv())
                    assert isinstance(answer, kind), answer
                    return answer
            self.client.close(0)
            self.client = None
        raise TimeoutError(type(message).__name__)

    def submit(self, lines: int) -> str:
        entries = [
            {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "echo", "messages": [{"role": "user", "content": f"say {number}"}]}}
            for number in range(lines)
        ]  # fmt: skip
        data = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        job, sha = new_id(), hashlib.sha256(data).hexdigest()
        self.ask(messages.Submit(1, job, "test", len(data), sha, False, 0, 0, "echo"), messages.Need)
        self.ask(messages.Chunk(2, job, 0, data), messages.Need)
        self.ask(messages.Seal(3, job), messages.JobInfo)
        return job

    def status(self, job: str) -> messages.JobInfo:
        found: messages.JobInfo = self.ask(messages.AskStatus(4, job), messages.JobInfo)
        return found

    def answers(self, job: str) -> Counter[str]:
        """custom_ids of the output once the job has ended, each answer checked against its question."""
        self.until(lambda: self.status(job).status in ("completed", "failed"), "the job ends")
        found: Counter[str] = Counter()
        offset, ended = 0, False
        while not ended:
            page = self.ask(messages.Fetch(5, job, "output", offset), messages.Lines)
            for raw in page.lines:
                line = json.loads(raw)
                found[line["custom_id"]] += 1
                said = line["response"]["body"]["choices"][0]["message"]["content"]
                assert said == f"say {line['custom_id'].removeprefix('id-')}"
            offset, ended = page.next_offset, page.ended
        return found

    def runs(self) -> Counter[int]:
        """How often the engine began each line."""
        path = self.folder / "witness"
        text = path.read_text() if path.exists() else ""
        return Counter(int(line.split()[1]) for line in text.splitlines())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, holds: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.02)

    def close(self) -> None:
        if self.client is not None:
            self.client.close(0)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    context: zmq.Context[Any] = zmq.Context()
    made = Fleet(tmp_path, context)
    yield made
    made.close()
    context.destroy(0)


def once(lines: int) -> Counter[str]:
    return Counter(f"id-{number}" for number in range(lines))


def test_a_killed_broker_costs_no_line_and_no_second_run(fleet: Fleet) -> None:
    """SIGKILL of the broker in the middle of a job: every custom_id once, and the engine ran each line once (D3)."""
    broker = fleet.broker()
    fleet.worker("worker", "--echo-delay-ms", "50")
    job = fleet.submit(120)
    fleet.until(lambda: sum(fleet.runs().values()) >= 40, "a third is run")
    broker.kill()
    broker.wait(DEADLINE_S)
    fleet.broker()
    assert fleet.answers(job) == once(120)
    assert set(fleet.runs().values()) == {1}
    assert fleet.status(job).wasted == 0


def test_a_killed_worker_costs_only_what_its_engine_held(fleet: Fleet) -> None:
    """SIGKILL of the worker in the middle of a job, then started again: what it had finished is handed over."""
    fleet.broker()
    worker = fleet.worker("worker", "--echo-delay-ms", "50")
    job = fleet.submit(120)
    fleet.until(lambda: sum(fleet.runs().values()) >= 40, "a third is run")
    worker.kill()
    worker.wait(DEADLINE_S)
    before = sum(fleet.runs().values())
    fleet.worker("worker", "--echo-delay-ms", "5")
    assert fleet.answers(job) == once(120)
    assert sum(fleet.runs().values()) - 120 <= target(CONCURRENCY)
    assert before < 120


def test_a_drained_worker_leaves_nothing_half_done(fleet: Fleet) -> None:
    """SIGTERM in the middle of a job: it ends with 0, and another worker finishes the rest; no line is run twice."""
    fleet.broker()
    worker = fleet.worker("first", "--echo-delay-ms", "50")
    job = fleet.submit(120)
    fleet.until(lambda: sum(fleet.runs().values()) >= 40, "a third is run")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(DEADLINE_S) == 0
    assert '"code": 0' in fleet.log("first")
    fleet.worker("second", "--echo-delay-ms", "5")
    assert fleet.answers(job) == once(120)
    assert set(fleet.runs().values()) == {1}


def test_two_workers_share_a_state_folder_and_a_job(fleet: Fleet) -> None:
    """--scale worker=2 on one volume: a slot each, and a session each."""
    fleet.broker()
    for name in ("one", "two"):
        fleet.worker(name, "--echo-delay-ms", "20")
    fleet.until(lambda: all('"model_ready"' in fleet.log(name) for name in ("one", "two")), "both are ready")
    job = fleet.submit(100)
    assert fleet.answers(job) == once(100)
    slots = {json.loads(fleet.log(name).splitlines()[0])["slot"] for name in ("one", "two")}
    assert slots == {0, 1}
    pids = {line.split()[3] for line in (fleet.folder / "witness").read_text().splitlines()}
    assert len(pids) == 2, "both ran some of it"


def test_finished_work_outlives_an_outage_of_both(fleet: Fleet) -> None:
    """The broker dies; the worker finishes what it holds, is killed too; both come back: nothing is run again (D2)."""
    broker = fleet.broker()
    worker = fleet.worker("worker", "--echo-delay-ms", "100")
    job = fleet.submit(CONCURRENCY)
    fleet.until(lambda: len(fleet.runs()) == CONCURRENCY, "all are begun")
    broker.kill()
    broker.wait(DEADLINE_S)
    fleet.until(lambda: '"session_gone"' in fleet.log("worker"), "the worker noticed")
    time.sleep(0.5)  # the engine ends what it runs
    worker.kill()
    worker.wait(DEADLINE_S)
    fleet.broker()
    fleet.worker("again")
    assert fleet.answers(job) == once(CONCURRENCY)
    assert set(fleet.runs().values()) == {1}
    assert json.loads(fleet.log("again").splitlines()[0])["results_kept"] == CONCURRENCY


def test_a_wrong_key_is_said_within_seconds(fleet: Fleet) -> None:
    """S5: the worker's folder holds the keys of another fleet."""
    fleet.broker()
    key_files.init(fleet.folder / "other")
    began = time.monotonic()
    fleet.spawn(
        "worker", "worker", "--echo", "--broker", fleet.endpoint, "--state", str(fleet.folder / "workers"),
        "--keys", str(fleet.folder / "other"),
    )  # fmt: skip
    fleet.until(lambda: "check --keys" in fleet.log("worker"), "the worker says so", limits.HANDSHAKE_S + 10)
    started = json.loads(fleet.log("worker").splitlines()[0])
    assert started["event"] == "worker_starts"
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--broker", "nonsense", "--state", "s", "--echo"), 2, "--broker"),
        (("--broker", "127.0.0.1:1", "--state", "s", "--echo"), 2, "--keys"),
        (("--broker", "127.0.0.1:1", "--state", "s", "--insecure"), 2, "--model"),
        (("--broker", "[::1]:1", "--state", "s", "--insecure", "--echo", "--concurrency", "0"), 2, "--concurrency"),
        (("--broker", "127.0.0.1:1", "--state", "f", "--insecure", "--echo"), 4, "--state"),
        (("--broker", "a:1", "--state", "s", "--insecure", "--echo", "--context-tokens", "99999999"), 4, "--ring-mib"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_what_to_change(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """Each wrong use: its exit code, and no traceback."""
    (tmp_path / "f").write_text("a file")
    ran = subprocess.run(
        [sys.executable, "-m", "worker", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "HAULIER_LOG": "console"}, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
