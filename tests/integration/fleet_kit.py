"""A real fleet on loopback: brokers, standbys and echo workers as processes, each ended by its own pid with the test.

The witness is a file the engine writes to as it begins a line: what was run, counted where it cannot be hidden.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker import client as fleet_client
from broker.children import free_endpoint
from common import keys as key_files
from common import messages
from common.config import ClientSettings, KeySettings
from common.ids import new_id
from worker.lines import target

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
CONCURRENCY = 8
IN_FLIGHT = target(CONCURRENCY)
"""Lines one worker holds unfinished at most: what a kill of it can cost."""


def chat(number: int, text: str | None = None, **more: Any) -> dict[str, Any]:
    """One input line."""
    said = f"say {number}" if text is None else text
    body = {"model": "echo", "messages": [{"role": "user", "content": said}], **more}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Fleet:
    """Brokers and workers below ``folder``. One thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        key_files.init(self.keys)
        self._kept, self.endpoint = free_endpoint()
        self._kept_too: list[Any] = []
        self.endpoints = [self.endpoint]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._client: fleet_client.Client | None = None
        self._watched: list[tuple[subprocess.Popen[bytes], Callable[[], subprocess.Popen[bytes]]]] = []
        self.died_at: list[float] = []
        """When each of the watched processes was seen dead (monotonic seconds)."""

    # -- processes ------------------------------------------------------------------------------------------------

    def spawn(self, room: str, name: str, arguments: Sequence[str], **hooks: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HAULIER_LOG": "json", "OMP_NUM_THREADS": "1", **hooks}
        module = ["tests.integration.hooked", room] if hooks else [room]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=REPOSITORY,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def broker(self, *more: str, name: str = "broker", wait: bool = True, **hooks: str) -> subprocess.Popen[bytes]:
        """A broker over the fleet's one store."""
        state = self.folder / "state"
        (state / "endpoint").unlink(missing_ok=True)
        process = self.spawn(
            "broker", name,
            ["--bind", self.endpoint, "--state", str(state), "--keys", str(self.keys), "--disk-reserve-gib", "0",
             *more],
            **hooks,
        )  # fmt: skip
        if wait:
            self.until(lambda: process.poll() is not None or (state / "endpoint").exists(), "the broker listens")
        return process

    def standby(self) -> subprocess.Popen[bytes]:
        """A second broker on the same store, at an endpoint of its own; workers and clients are told both."""
        kept, endpoint = free_endpoint()
        self._kept_too.append(kept)
        self.endpoints.append(endpoint)
        state = self.folder / "state"
        return self.spawn(
            "broker", "standby",
            ["--bind", endpoint, "--state", str(state), "--keys", str(self.keys), "--disk-reserve-gib", "0",
             "--standby"],
        )  # fmt: skip

    def worker(
        self, *more: str, name: str = "worker", delay_ms: int = 20, at: str = "", state: str = "workers", **hooks: str
    ) -> subprocess.Popen[bytes]:
        return self.spawn(
            "worker", name,
            ["--echo", "--broker", at or ",".join(self.endpoints), "--state", str(self.folder / state),
             "--keys", str(self.keys), "--concurrency", str(CONCURRENCY), "--ring-mib", "1",
             "--echo-delay-ms", str(delay_ms), "--echo-witness", str(self.folder / "witness"), *more],
            **hooks,
        )  # fmt: skip

    def end(self, process: subprocess.Popen[bytes], how: int = signal.SIGKILL) -> int:
        process.send_signal(how)
        return process.wait(DEADLINE_S)

    def watch(self, process: subprocess.Popen[bytes], again: Callable[[], subprocess.Popen[bytes]]) -> None:
        """Start it ``again`` when it ends, as whoever runs a fleet would; seen to whenever the client waits."""
        self._watched.append((process, again))

    def revive(self) -> None:
        for one in list(self._watched):
            if one[0].poll() is not None:
                self.died_at.append(time.monotonic())
                self._watched.remove(one)
                one[1]()

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def client(self) -> fleet_client.Client:
        if self._client is None:
            settings = ClientSettings(tuple(self.endpoints), KeySettings(self.keys), DEADLINE_S)
            self._client = fleet_client.Client(settings, self.revive)
        return self._client

    def submit(self, lines: int | list[dict[str, Any]] | bytes, **order: Any) -> str:
        """Submit so many lines, these lines, or these bytes; the job's id."""
        if isinstance(lines, int):
            lines = [chat(number) for number in range(lines)]
        data = lines if isinstance(lines, bytes) else b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        path = self.folder / f"input-{new_id()[:8]}.jsonl"
        path.write_bytes(data)
        return self.submit_file(path, **order)

    def submit_file(self, path: Path, **order: Any) -> str:
        source = fleet_client.hash_file(path, lambda *_: None)
        wanted = fleet_client.Order(order.pop("job", None) or new_id(), path.name, **order)
        return fleet_client.submit(self.client, source, wanted, lambda *_: None).job

    def status(self, job: str) -> messages.JobInfo:
        return self.client.ask(messages.AskStatus(0, job), messages.JobInfo)

    def workers(self) -> tuple[messages.WorkerInfo, ...]:
        return self.client.ask(messages.AskWorkers(0), messages.Workers).workers

    def ended(self, job: str, seconds: float = DEADLINE_S) -> messages.JobInfo:
        self.until(lambda: self.status(job).status in ("completed", "failed", "cancelled", "expired"), "the job ends",
                   seconds)  # fmt: skip
        return self.status(job)

    def fetched(self, job: str, which: str = "output") -> list[dict[str, Any]]:
        """All lines of one of the job's two files."""
        download = fleet_client.Download(self.client, job, which)
        data = bytearray()
        fleet_client.drain(download, data.extend)
        return [json.loads(line) for line in data.splitlines()]

    def answers(self, job: str) -> Counter[str]:
        """The custom_ids of the output, each answer checked against its question."""
        found: Counter[str] = Counter()
        for line in self.fetched(job):
            found[line["custom_id"]] += 1
            said = line["response"]["body"]["choices"][0]["message"]["content"]
            assert said == f"say {line['custom_id'].removeprefix('id-')}"
        return found

    def audit(self, job: str) -> messages.Audit:
        return self.client.ask(messages.AskAudit(0, job), messages.Audit)

    def whole(self, job: str, lines: int, seconds: float = DEADLINE_S) -> messages.Audit:
        """The job completes with every line answered once; the audit agrees."""
        info = self.ended(job, seconds)
        assert (info.status, info.total, info.completed, info.failed) == ("completed", lines, lines, 0), info
        assert self.answers(job) == Counter(f"id-{number}" for number in range(lines))
        audit = self.audit(job)
        assert audit.holds, audit
        return audit

    # -- witnesses ------------------------------------------------------------------------------------------------

    def runs(self) -> Counter[tuple[str, int]]:
        """How often an engine began each line."""
        path = self.folder / "witness"
        text = path.read_text() if path.exists() else ""
        return Counter((line.split()[0], int(line.split()[1])) for line in text.splitlines())

    def again(self) -> int:
        """Runs beyond the first of each line."""
        runs = self.runs()
        return runs.total() - len(runs)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, holds: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            self.revive()
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; {self.tails()}"
            time.sleep(0.02)

    def until_run(self, lines: int) -> None:
        self.until(lambda: len(self.runs()) >= lines, f"{lines} lines are run")

    def tails(self) -> dict[str, str]:
        """The end of every log, for a failure's message."""
        return {path.stem: path.read_text()[-600:] for path in self.folder.glob("*.log")}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE_S)
        for kept in (self._kept, *self._kept_too):
            kept.close()
