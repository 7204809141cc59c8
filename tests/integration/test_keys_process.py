"""Keys between real processes (S5): who is not let in hears why, so does the broker's log, and a revoked key is out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, limits, messages, wire
from common import keys as key_files
from common.config import KeySettings
from common.ids import new_id

DEADLINE_S = 60.0


class House:
    """A broker with keys, and whoever knocks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.state = folder, folder / "keys", folder / "state"
        key_files.init(self.keys)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.spawn(
            "broker", "broker", "--bind", "tcp://127.0.0.1:*", "--state", str(self.state), "--keys", str(self.keys),
            "--disk-reserve-gib", "0",
        )  # fmt: skip
        self.until(lambda: (self.state / "endpoint").exists(), "the broker listens")
        self.endpoint = (self.state / "endpoint").read_text().strip()

    def spawn(self, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HAULIER_LOG": "json", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=log, env=environment)
        self.processes.append(process)
        return process

    def worker(self, name: str, keys: Path) -> subprocess.Popen[bytes]:
        return self.spawn("worker", name, "--echo", "--broker", self.endpoint, "--state", str(self.folder / name),
                          "--keys", str(keys), "--ring-mib", "1")  # fmt: skip

    def said(self, name: str, event: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.log"
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def until(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def client(self, keys: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        reach = ["--broker", self.endpoint, "--keys", str(keys)]
        return subprocess.run([sys.executable, "-m", "common.cli", *arguments, *reach], capture_output=True, text=True,
                              timeout=DEADLINE_S, check=False)  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    one = House(tmp_path)
    yield one
    for process in one.processes:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("stranger", ["other server", "not added"])
def test_a_wrong_key_is_told_on_both_sides(house: House, tmp_path: Path, stranger: str) -> None:
    """The keys of another fleet are mounted, or a key that was never added: one line for the worker's operator, one for
    the client's, one for the broker's, each with what to look at."""
    wrong = tmp_path / "wrong"
    key_files.init(wrong)
    if stranger == "not added":
        shutil.copy(house.keys / "server.key", wrong / "server.key")
    house.worker("worker", wrong)
    house.until(lambda: "--keys" in (house.folder / "worker.log").read_text(), "the worker says so")
    assert "check --keys" in house.said("worker", "session_gone")[0]["reason"]
    house.until(lambda: house.said("broker", "not_let_in"), "the broker says so")
    assert "--keys" in house.said("broker", "not_let_in")[0]["advice"]
    done = house.client(wrong, "jobs")
    assert done.returncode == 4
    assert "--keys" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not house.said("broker", "session_open")


def test_a_revoked_keys_open_session_ends_and_the_others_go_on(house: House) -> None:
    """Somebody leaves the company: no restart, and what they are connected with is out within a beat or two."""
    bob = key_files.add(house.keys, "bob")
    kept = house.folder / "kept"
    shutil.copytree(bob, kept)
    house.worker("bobs", kept)
    house.worker("ours", house.keys)
    house.until(lambda: len(house.said("broker", "session_open")) == 2, "both are in")
    key_files.revoke(house.keys, "bob")
    house.until(lambda: house.said("broker", "session_gone"), "bob's worker is out")
    (gone,) = house.said("broker", "session_gone")
    assert gone["reason"] == "fault"
    house.until(lambda: any("revoked" in line["reason"] for line in house.said("bobs", "session_gone")), "it hears why")
    assert house.client(kept, "jobs").returncode == 4
    time.sleep(limits.BEAT_S)
    workers = json.loads(house.client(house.keys, "workers", "--json").stdout)["workers"]
    assert len(workers) == 1
    assert not house.said("ours", "session_gone")


def test_jobs_are_hidden_from_other_keys_and_shown_to_an_admin(house: House) -> None:
    """Two teams share a fleet: neither learns even that the other's job exists."""
    folders = {name: key_files.add(house.keys, name) for name in ("ann", "bob")}
    context: zmq.Context[Any] = zmq.Context()
    socket = wire.dealer(context, house.endpoint, KeySettings(folders["ann"]))
    wire.connect(socket, house.endpoint)
    assert socket.poll(int(DEADLINE_S * 1000), zmq.POLLOUT)
    job = new_id()
    socket.send(codec.encode(messages.Submit(1, job, "secret", 5, "0" * 64, False, 0, 0, "")))
    assert isinstance(codec.decode(socket.recv()), messages.Need)
    socket.close(0)
    context.term()
    assert job in house.client(folders["ann"], "jobs").stdout
    assert job not in house.client(folders["bob"], "jobs").stdout
    for command in ("status", "cancel", "audit", "delete"):
        refused = house.client(folders["bob"], command, job)
        assert refused.returncode == 4
        assert "no job" in refused.stderr
        assert "secret" not in refused.stderr + refused.stdout
    assert job in house.client(house.keys, "jobs").stdout
