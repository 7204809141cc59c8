"""The fleet as its users launch it: containers, a key volume, a job from the host, and a broker killed on purpose."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LINES = 32
"""Twice what two workers run at once, so that a broker killed early has lines waiting, running and done."""
UP_S = 600.0
"""Two workers fetch and load the model on few cores."""
JOB_S = 900.0


def run(*command: str, env: dict[str, str] | None = None, timeout: float = 900.0) -> str:
    """A command's standard output; a failure shows all that it said."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll; the time is a bound on a hang, no measurement."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds:g} s for: {what}")
        time.sleep(0.5)


@dataclass
class Fleet:
    """One compose project of this test alone, and the client on the host."""

    command: list[str]
    project: str
    port: int
    standby_port: int
    keys: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ, "HAULIER_PORT": str(self.port), "HAULIER_STANDBY_PORT": str(self.standby_port),
            "COMPOSE_PROJECT_NAME": self.project,
        }  # fmt: skip

    def compose(self, *arguments: str) -> str:
        return run(*self.command, "-f", "compose.yaml", *arguments, env=self.environment)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str, template: str) -> str:
        return run("docker", "inspect", "--format", template, container)

    def healthy(self, service: str, count: int) -> bool:
        states = [self.inspect(found, "{{.State.Health.Status}}") for found in self.containers(service)]
        return states == ["healthy"] * count

    def client(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The installed client, on the host, with the keys from the volume."""
        endpoints = f"tcp://127.0.0.1:{self.port},tcp://127.0.0.1:{self.standby_port}"
        reach = ["--broker", endpoints, "--keys", str(self.keys)]
        command = [sys.executable, "-P", "-m", "common.cli", *arguments, *reach]
        return subprocess.run(command, capture_output=True, text=True, timeout=JOB_S, check=False)

    def ask(self, *arguments: str) -> Any:
        done = self.client(*arguments, "--json")
        if done.returncode != 0:
            pytest.fail(f"haulier {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    def over(self, job: str) -> bool:
        """Whether a job completed; any end but a good one fails the test with its words."""
        done = self.client("status", job, "--check")
        if done.returncode not in (0, 6):
            pytest.fail(f"haulier status --check ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.returncode == 0


def compose_command() -> list[str]:
    """Compose v2 where it is, else docker-compose 1.29."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return pytest.fail("neither docker compose nor docker-compose is installed")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A broker, its standby and two workers, up and healthy; gone with their volumes afterwards."""
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.fail("no Docker engine answers: start one, or leave the compose tests out")
    torch = ["--build-arg", f"TORCH={os.environ['TORCH']}"] if os.environ.get("TORCH") else []
    for target in ("broker", "worker"):  # the host's network: an engine on a build machine may have no other
        extra = torch if target == "worker" else []
        run("docker", "build", "--network", "host", "--target", target, "-t", f"haulier-{target}:local", *extra, ".")
    keys = tmp_path_factory.mktemp("fleet") / "keys"
    fleet = Fleet(compose_command(), f"haulier-test-{os.getpid()}", free_port(), free_port(), keys)
    try:
        fleet.compose("up", "-d", "--no-build")
        wait_until(lambda: fleet.healthy("broker", 1), UP_S, "a healthy broker")
        (broker,) = fleet.containers("broker")
        run("docker", "cp", f"{broker}:/var/lib/haulier/keys", str(keys))
        wait_until(lambda: fleet.healthy("standby", 1), UP_S, "a healthy standby")
        wait_until(lambda: fleet.healthy("worker", 2), UP_S, "two healthy workers")
        yield fleet
    finally:
        print(fleet.compose("logs", "--no-color", "--tail=200"))  # pytest shows it when a test fails
        fleet.compose("down", "-v", "--timeout", "20")


def questions(path: Path) -> list[str]:
    """A file of small requests; its custom_ids."""
    names = [f"line-{number}" for number in range(LINES)]
    with path.open("w", encoding="utf-8") as file:
        for number, name in enumerate(names):
            message = {"role": "user", "content": f"Count upwards from {number}, one number after another."}
            body = {"model": "smollm2-135m", "messages": [message], "temperature": 0}
            body["max_tokens"] = 8 + number % 24  # lines of many lengths end at many moments
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return names


def test_the_active_broker_killed_in_the_middle_costs_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """The machine room pulls the active broker's plug while a job runs, and leaves it out: the standby takes over, each
    line is there and ran once; plugged in again, the old one stands by."""
    names = questions(tmp_path / "in.jsonl")
    job = fleet.client("submit", str(tmp_path / "in.jsonl"))
    assert job.returncode == 0, job.stderr
    name = job.stdout.strip()
    wait_until(lambda: fleet.ask("status", name)["completed"] >= 3, JOB_S, "the first results")
    (broker,) = fleet.containers("broker")
    before = fleet.ask("status", name)["completed"]
    run("docker", "kill", broker)
    assert before < LINES, "the job was over before the broker was killed: give it more lines"
    assert fleet.inspect(broker, "{{.State.Running}}") == "false"
    wait_until(lambda: fleet.over(name), JOB_S, "the job's end")
    done = fleet.client("fetch", name, "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(names)
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    audit = fleet.ask("audit", name)
    assert audit["holds"] is True
    assert (audit["output_lines"], audit["error_lines"], audit["duplicates"], audit["missing"]) == (LINES, 0, 0, 0)
    assert (audit["wasted"], audit["runs"]) == (0, LINES)
    assert "taking_over" in fleet.compose("logs", "--no-color", "standby")
    run("docker", "start", broker)
    wait_until(lambda: fleet.healthy("broker", 1), UP_S, "the old one, standing by")
    wait_until(lambda: fleet.compose("logs", "--no-color", "broker").count("standing_by") >= 1, UP_S, "it stands by")


def test_both_workers_share_the_volumes_and_stay_apart(fleet: Fleet) -> None:
    """--scale worker=N shares one state volume: each worker has a slot, an identity and a session of its own."""
    wait_until(lambda: len(fleet.ask("workers")["workers"]) == 2, UP_S, "two sessions")


def test_what_prometheus_is_told_to_scrape_answers(fleet: Fleet) -> None:
    """docs/grafana/prometheus.yml names services and a port: from within the network each serves its metrics, a worker
    at every address that its name has. Control: nothing of it is published to the host."""
    config = (ROOT / "docs/grafana/prometheus.yml").read_text(encoding="utf-8")
    assert '"broker:9700", "standby:9700"' in config
    assert 'names: ["worker", "worker-gpu"]' in config
    read = (
        "import socket, sys, urllib.request as u\n"
        "found = {one[4][0] for one in socket.getaddrinfo(sys.argv[1], 9700, type=socket.SOCK_STREAM)}\n"
        "print(len(found), all(b'haulier_ring_taken_bytes_total' in u.urlopen(f'http://{at}:9700/metrics').read() "
        "for at in found))"
    )
    (broker,) = fleet.containers("broker")
    for service, count in (("broker", 1), ("standby", 1), ("worker", 2)):
        assert run("docker", "exec", broker, "python", "-c", read, service) == f"{count} True"
    assert "9700/tcp" not in json.loads(fleet.inspect(broker, "{{json .NetworkSettings.Ports}}"))


def test_no_process_in_the_containers_is_root(fleet: Fleet) -> None:
    """A fault in a parser of strangers' requests must not meet root."""
    for service in ("broker", "worker"):
        for container in fleet.containers(service):
            assert run("docker", "exec", container, "python", "-c", "import os; print(os.getuid())") != "0"


def test_the_broker_is_reached_from_this_machine_only(fleet: Fleet) -> None:
    """A port published on all interfaces would be open past the host's firewall: Docker writes its own rules."""
    (broker,) = fleet.containers("broker")
    ports = json.loads(fleet.inspect(broker, "{{json .NetworkSettings.Ports}}"))
    assert [found["HostIp"] for found in ports["7700/tcp"]] == ["127.0.0.1"]


def test_a_client_without_the_keys_is_told_so(fleet: Fleet, tmp_path: Path) -> None:
    """S5 holds in containers too: other keys get a clear refusal, not silence for ever."""
    made = [sys.executable, "-P", "-m", "common.cli", "keys", "init", str(tmp_path / "other")]
    run(*made)
    stranger = Fleet(fleet.command, fleet.project, fleet.port, fleet.standby_port, tmp_path / "other")
    done = stranger.client("jobs", "--timeout", "10")
    assert done.returncode == 4, done.stderr
    assert "key" in done.stderr


def test_images_hold_what_they_should(fleet: Fleet) -> None:
    """The broker's image stays small: no torch in it; ``haulier worker`` there says what is missing in one line."""
    done = subprocess.run(
        ["docker", "run", "--rm", "--entrypoint", "python", "haulier-broker:local", "-c", "import torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'torch'" in done.stderr
