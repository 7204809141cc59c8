"""shell: measures the fleet: a real broker and a real worker with an echo engine on loopback, CURVE on, nothing mocked.

Each ``measure_*`` starts from an empty state folder and returns plain values. Times are taken from outside, by asking
for the job's state as any client does, so a figure contains the asking. Knows no rule. Linux, for the broker's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from broker import client as fleet
from broker import run_rules
from broker.children import free_endpoint
from broker.client_rules import ENDED
from broker.fleet_floor import body_of
from common import keys, messages, parent
from common.config import ClientSettings, EngineSettings, KeySettings
from common.errors import InvariantError, UnreachableError
from common.ids import new_id

BODY_BYTES = 200
POLL_S = 0.01
SINGLE_POLL_S = 0.001
WARM_SINGLES_COUNT = 20
PATIENCE_S = 60.0
"""Without one more finished line for this long a measurement is given up."""
MEMORY_FROM_LINES = 10_000
"""The broker's memory is compared from here on: by then every pool and cache has its size."""
OUTBOX_LINES = 10_000
SPARE_LINES = 8_000
"""More than a slow machine ends between a look at the job and the end of its broker, in all rounds together."""
OUTBOX_ROUNDS_MAX_COUNT = 40
"""Brokers killed to fill outboxes; one leaves as many lines as were in flight, more or less."""
SETTLE_S = 1.0
"""A worker whose broker is gone finishes what it holds well within this: its engine only echoes."""
MIB = 1024 * 1024
Tell = Callable[[str, int, int], None]
"""Takes the name of what is measured, how far it is, and how far it goes."""


class Fleet:
    """A broker and workers on this machine, below ``folder``. One thread. Leaving the ``with`` block kills them."""

    def __init__(self, folder: Path, in_flight: int) -> None:
        self.folder = folder
        self._kept, self.endpoint = free_endpoint()
        keys.init(folder / "keys", if_absent=True)
        # a worker asks for a quarter more than its engine runs
        self._engine = EngineSettings(model="echo", concurrency=max(1, in_flight * 4 // 5))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._struck: list[subprocess.Popen[bytes]] = []
        self._pipe = os.pipe()
        settings = ClientSettings((self.endpoint,), KeySettings(folder / "keys"), PATIENCE_S)
        self.client = fleet.Client(settings, self.check)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        for name in list(self._processes):
            self.kill(name)
        for process in self._struck:
            process.kill()
            process.wait()
        for end in self._pipe:
            os.close(end)
        self._kept.close()

    def start_broker(self) -> None:
        """Start ``broker``; over the same store if it ran before."""
        keys_folder = str(self.folder / "keys")
        self._start("broker", run_rules.broker_arguments(self.endpoint, str(self.folder / "broker"), keys_folder))

    def start_worker(self, state: str = "worker") -> None:
        """Start ``worker`` with its outbox in the folder ``state``."""
        self._start("worker", run_rules.worker_arguments(
            self.endpoint, str(self.folder / state), str(self.folder / "keys"), self._engine, echo=True))  # fmt: skip

    def _start(self, name: str, arguments: list[str]) -> None:
        environment = run_rules.environment(os.environ)
        environment[parent.VARIABLE] = str(self._pipe[0])
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(self._pipe[0],),
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def strike(self, name: str, number: int) -> None:
        """Send a signal that stops or ends it, and go on at once; from now on nobody minds its end."""
        process = self._processes.pop(name)
        self._struck.append(process)
        process.send_signal(number)

    def memory_mib(self, name: str) -> float:
        """Resident memory of a process."""
        pages = int(Path(f"/proc/{self._processes[name].pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    def check(self) -> None:
        """Raise ``UnreachableError``, with the end of its log, when a process ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                words = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-1500:]
                raise UnreachableError(f"the {name} ended by itself ({process.returncode}): {words}")

    # -- asking -------------------------------------------------------------------------------------------------

    def submit(self, path: Path) -> str:
        """Submit a file; returns the job's id once the broker has it all."""
        source = fleet.hash_file(path, _tell_nobody)
        return fleet.submit(self.client, source, fleet.Order(new_id(), path.name), _tell_nobody).job

    def job(self, job: str) -> messages.JobInfo:
        """The job as it stands."""
        return self.client.ask(messages.AskStatus(0, job), messages.JobInfo)

    def until(self, job: str, holds: Callable[[messages.JobInfo], bool], pause_s: float = POLL_S) -> messages.JobInfo:
        """The job's state once ``holds``. Raises ``UnreachableError`` when it ends or stands still without that."""
        moved, seen = time.monotonic(), (-1, -1)
        while not holds(info := self.job(job)):
            self.check()
            if info.status in ENDED:
                raise UnreachableError(f"job {job} ended before what was waited for: {info}")
            if seen != (info.completed, info.lines_read):
                seen, moved = (info.completed, info.lines_read), time.monotonic()
            if time.monotonic() - moved > PATIENCE_S:
                raise UnreachableError(f"job {job} stands still: {info}")
            time.sleep(pause_s)
        return info

    def wait_for_worker(self) -> None:
        """Until a worker is logged in and ready to take lines."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.check()
            workers = self.client.ask(messages.AskWorkers(0), messages.Workers).workers
            if any(worker.phase == "ready" and worker.credit_lines > 0 for worker in workers):
                return
            time.sleep(POLL_S)
        raise UnreachableError(f"no worker became ready within {PATIENCE_S:g} s; see {self.folder / 'worker.log'}")


def _tell_nobody(done: int, total: int) -> None:
    """A measurement shows its own progress."""


def write_input(path: Path, lines: int) -> Path:
    """A file of ``lines`` requests whose bodies are ``BODY_BYTES`` long."""
    body = body_of(BODY_BYTES).decode()
    with path.open("w", encoding="utf-8") as file:
        for index in range(lines):
            file.write(f'{{"custom_id": "{index}", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n')
    return path


def measure_speed(folder: Path, lines: int, in_flight: int, tell: Tell) -> dict[str, Any]:
    """Lines a second from the first dispatch seen to the last line stored, and the broker's memory meanwhile.

    The job is submitted and checked before the worker starts: neither that nor the worker's start is counted.
    """
    with _fleet(folder, in_flight) as running:
        job = running.submit(write_input(folder / "input.jsonl", lines))
        running.until(job, lambda info: info.status == "in_progress")
        running.start_worker()
        info = running.until(job, lambda info: info.running + info.completed > 0, SINGLE_POLL_S)
        started, early = time.perf_counter(), info.completed
        watch = _Watch(running, lines, tell)
        info = running.until(job, watch)
        seconds = time.perf_counter() - started
        _all_completed(info, lines)
        running.until(job, lambda info: info.status in ENDED)
        return {
            "lines": lines,
            "seconds": round(seconds, 3),
            "lines_per_s": round((lines - early) / seconds, 1),
            "in_flight_max_seen": watch.in_flight,
            "output_line_bytes": _output_line_bytes(running, job),
            "broker_mib_after_first_lines": round(watch.base_mib, 1),
            "broker_mib_growth": round(watch.peak_mib - watch.base_mib, 1),
        }


class _Watch:
    """Looks at a job on its way: lines in flight, and the broker's memory once the first lines are done."""

    def __init__(self, running: Fleet, lines: int, tell: Tell) -> None:
        self._running, self._lines, self._tell = running, lines, tell
        self.in_flight, self.base_mib, self.peak_mib = 0, 0.0, 0.0

    def __call__(self, info: messages.JobInfo) -> bool:
        """Whether all lines are done."""
        self.in_flight = max(self.in_flight, info.running)
        if info.completed >= min(MEMORY_FROM_LINES, self._lines // 2):
            now_mib = self._running.memory_mib("broker")
            self.base_mib = self.base_mib or now_mib
            self.peak_mib = max(self.peak_mib, now_mib)
        self._tell("speed", info.completed, self._lines)
        return info.completed >= self._lines or info.status in ENDED


def measure_latency(folder: Path, count: int, tell: Tell) -> dict[str, Any]:
    """Single lines, one after the other: from before SUBMIT until the job's state says that its line is stored.

    Each is a job of its own: announced, sent, sealed, checked, dispatched, run, stored and asked for.
    """
    took = []
    with _fleet(folder, 10) as running:
        running.start_worker()
        running.wait_for_worker()
        path = write_input(folder / "input.jsonl", 1)
        for number in range(WARM_SINGLES_COUNT + count):
            started = time.perf_counter()
            job = running.submit(path)
            running.until(job, lambda info: info.completed == 1, SINGLE_POLL_S)
            took.append((time.perf_counter() - started) * 1e3)
            tell("single lines", number, WARM_SINGLES_COUNT + count)
    cuts = statistics.quantiles(took[WARM_SINGLES_COUNT:], n=100, method="inclusive")
    return {"singles": count, "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def measure_restart(folder: Path, in_flight: int, tell: Tell) -> dict[str, Any]:
    """Seconds from a broker's start to its first new ack when a worker waits with ``OUTBOX_LINES`` finished lines.

    The outbox is filled the hard way: a broker is killed at work, its worker finishes what it holds and is killed too,
    again and again with a fresh state folder; then one worker adopts all those outboxes, as on a shared volume.
    """
    with _fleet(folder, in_flight) as running:
        lines = 4 * OUTBOX_LINES + SPARE_LINES
        job = running.submit(write_input(folder / "input.jsonl", lines))
        running.until(job, lambda info: info.status == "in_progress")
        held = 0
        slots: list[Path] = []
        while held < OUTBOX_LINES and len(slots) < OUTBOX_ROUNDS_MAX_COUNT:
            state = f"worker-{len(slots)}"
            before = running.job(job).completed
            running.start_worker(state)
            running.until(job, lambda info, before=before: info.completed > before, SINGLE_POLL_S)  # type: ignore[misc]
            running.kill("broker")
            time.sleep(SETTLE_S)
            running.kill("worker")
            slots.append(folder / state / "0")
            held += _outbox_lines(slots[-1])
            tell("filling outboxes", held, OUTBOX_LINES)
            running.start_broker()
        before = running.job(job).completed
        running.kill("broker")
        (folder / "worker").mkdir()
        for number, slot in enumerate(slots):
            shutil.move(slot, folder / "worker" / str(number))
        running.start_worker()
        until = time.monotonic() + PATIENCE_S
        while _outbox_lines(folder / "worker" / "0") < held and time.monotonic() < until:
            running.check()
            time.sleep(POLL_S)
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        running.start_broker()
        running.until(job, lambda info: info.completed > before, SINGLE_POLL_S)
        first = time.perf_counter() - started
        info = running.until(job, lambda info: info.status in ENDED)
        _all_completed(info, lines)
        return {"outbox_lines": held, "first_ack_s": round(first, 2), "wasted": info.wasted}


def measure_detection(folder: Path, in_flight: int, how: int, tell: Tell) -> dict[str, Any]:
    """Seconds from a signal to a worker at work (SIGKILL: dead; SIGSTOP: silent) until its lines wait again."""
    lines = 20 * max(in_flight, 1000)
    with _fleet(folder, in_flight) as running:
        job = running.submit(write_input(folder / "input.jsonl", lines))
        running.until(job, lambda info: info.status == "in_progress")
        running.start_worker()
        running.until(job, lambda info: info.completed > lines // 20 and info.running > 0, SINGLE_POLL_S)
        tell(f"a worker gets {signal.Signals(how).name}", 0, 0)
        running.strike("worker", how)
        started = time.perf_counter()
        # results that were on their way end lines too: only a look at who is logged in tells the end of the session
        while running.client.ask(messages.AskWorkers(0), messages.Workers).workers:
            if time.perf_counter() - started > PATIENCE_S:
                raise UnreachableError(f"a worker that got {signal.Signals(how).name} still counts as logged in")
            time.sleep(POLL_S)
        noticed = time.perf_counter() - started
        return {"noticed_s": round(noticed, 2), "lines_still_assigned": running.job(job).running}


@contextlib.contextmanager
def _fleet(folder: Path, in_flight: int) -> Iterator[Fleet]:
    folder.mkdir(parents=True)
    with Fleet(folder, in_flight) as running:
        running.start_broker()
        yield running
    shutil.rmtree(folder, ignore_errors=True)  # a hundred thousand lines twice: not until the end of all measurements


def _all_completed(info: messages.JobInfo, lines: int) -> None:
    if (info.total, info.completed, info.failed) != (lines, lines, 0):
        raise InvariantError(f"{lines} lines were submitted and this became of them: {info}")


def _output_line_bytes(running: Fleet, job: str) -> int:
    page = running.client.ask(messages.Fetch(0, job, "output", 0), messages.Lines)
    return len(json.dumps(json.loads(page.lines[0])["response"]["body"])) if page.lines else 0


def _outbox_lines(slot: Path) -> int:
    """Results in the outbox of a dead worker, counted in its file: the broker's side knows no more of it than this."""
    with contextlib.closing(sqlite3.connect(slot / "outbox.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM result").fetchone()[0])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is measured."""

    lines: int
    in_flight: int
    singles: int
    recovery: bool


def measure(folder: Path, wanted: Wanted, tell: Tell) -> dict[str, Any]:
    """All figures of the fleet, each from an empty folder below ``folder``."""
    found: dict[str, Any] = {
        "settings": {"synchronous": "FULL", "curve": True, "workers": 1, "in_flight": wanted.in_flight},
        "body_bytes": BODY_BYTES,
        **measure_speed(folder / "speed", wanted.lines, wanted.in_flight, tell),
    }
    if wanted.singles:
        found |= measure_latency(folder / "latency", wanted.singles, tell)
    if wanted.recovery:
        found["restart"] = measure_restart(folder / "restart", wanted.in_flight, tell)
        for words, how in (("worker_killed", signal.SIGKILL), ("worker_silent", signal.SIGSTOP)):
            found[words] = measure_detection(folder / words, wanted.in_flight, how, tell)
    return found
