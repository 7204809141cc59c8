"""Two real brokers over one store: the standby waits, takes over at a kill, and reports an active one that hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import keys as key_files

DEADLINE_S = 60.0
LINES = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Pair:
    """An active broker, its standby, and clients that know both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.keys = folder, folder / "state", folder / "keys"
        key_files.init(self.keys)
        self.endpoints = [f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"]
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def reach(self) -> list[str]:
        return ["--broker", ",".join(self.endpoints), "--keys", str(self.keys)]

    def spawn(self, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HAULIER_LOG": "json", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=log, env=environment)
        self.processes.append(process)
        return process

    def broker(self, number: int) -> subprocess.Popen[bytes]:
        return self.spawn(
            "broker", f"broker-{number}", "--bind", self.endpoints[number], "--state", str(self.state),
            "--keys", str(self.keys), "--disk-reserve-gib", "0", "--standby",
        )  # fmt: skip

    def worker(self) -> subprocess.Popen[bytes]:
        return self.spawn(
            "worker", "worker", "--echo", "--state", str(self.folder / "workers"), "--concurrency", "4",
            "--ring-mib", "1", "--echo-delay-ms", "20", "--echo-witness", str(self.folder / "witness"), *self.reach,
        )  # fmt: skip

    def said(self, number: int) -> list[dict[str, Any]]:
        path = self.folder / f"broker-{number}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def until_said(self, number: int, event: str) -> None:
        self.until(lambda: any(line["event"] == event for line in self.said(number)), f"broker {number}: {event}")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def client(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "common.cli", *arguments, *self.reach],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def input(self) -> Path:
        path = self.folder / "in.jsonl"
        path.write_text(
            "".join(
                json.dumps({
                    "custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions",
                    "body": {"model": "echo", "messages": [{"role": "user", "content": f"say {number}"}]},
                }) + "\n"
                for number in range(LINES)
            )
        )  # fmt: skip
        return path

    def witnessed(self) -> int:
        path = self.folder / "witness"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    one = Pair(tmp_path)
    yield one
    for process in one.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(DEADLINE_S)


def test_the_standby_takes_over_and_nobody_asks_twice(pair: Pair) -> None:
    """The active broker's machine dies in the middle of a watched job: the standby listens, the worker hands over what
    it finished meanwhile, the client that watches goes on watching, and no line is run a second time."""
    active = pair.broker(0)
    pair.until_said(0, "listening")
    pair.broker(1)
    pair.until_said(1, "standing_by")
    pair.worker()
    client = pair.client("submit", str(pair.input()), "--wait", "--json")
    pair.until(lambda: pair.witnessed() >= LINES // 4, "a quarter of the lines ran")
    active.kill()
    active.wait(DEADLINE_S)
    output, words = client.communicate(timeout=DEADLINE_S)
    assert client.returncode == 0, words
    info = json.loads(output.splitlines()[-1])
    assert (info["status"], info["completed"], info["failed"], info["wasted"]) == ("completed", LINES, 0, 0)
    assert any(line["event"] == "taking_over" for line in pair.said(1))
    listening = [line for number in (0, 1) for line in pair.said(number) if line["event"] == "listening"]
    assert [line["incarnation"] for line in listening] == [1, 2]
    runs = Counter((pair.folder / "witness").read_text().splitlines())
    assert len(runs) == LINES
    assert set(runs.values()) == {1}


def test_a_stopped_active_broker_is_reported_and_keeps_its_store(pair: Pair) -> None:
    """SIGSTOP on the active one (a hung disk looks alike): the standby says so and does not take over, since a process
    that wakes up would write; after SIGCONT all goes on, and SIGTERM ends both in good order."""
    active = pair.broker(0)
    pair.until_said(0, "listening")
    standby = pair.broker(1)
    pair.until_said(1, "standing_by")
    active.send_signal(signal.SIGSTOP)
    pair.until_said(1, "active_hung")
    assert not any(line["event"] == "taking_over" for line in pair.said(1))
    active.send_signal(signal.SIGCONT)
    pair.until_said(1, "active_beats_again")
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(DEADLINE_S) == 0
    assert not any(line["event"] == "listening" for line in pair.said(1))
    active.send_signal(signal.SIGTERM)
    assert active.wait(DEADLINE_S) == 0
