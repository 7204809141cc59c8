"""``make kill-table``: kills a real fleet at every named point and writes what it cost to docs/kill-table.md.

Each row starts from nothing: a broker and an echo worker on loopback with keys, one job; somebody is killed (SIGKILL,
by pid) at a point of its work and started again at once. ``lost`` is lines without output or error, from the fetched
files; ``run again`` is counted by a witness at the engine; ``back`` is from the process seen dead to the next line
stored. Every row ends with the job's audit; a row that loses a line ends the script.
"""

from __future__ import annotations

import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.fleet_kit import IN_FLIGHT, Fleet
from tests.integration.hooked import BROKER_POINTS, WORKER_POINTS

LINES = 120
DELAY_MS = 40
OUT = Path(__file__).resolve().parents[2] / "docs" / "kill-table.md"
WORDS = {
    "broker.started": "as it comes up",
    "broker.receiving": "a piece of the input written, not committed",
    "broker.checking": "in the middle of checking the input",
    "broker.before_assign_commit": "lines given out, not committed",
    "broker.after_assign_commit": "lines given out and committed, not sent",
    "broker.batch_sent": "lines sent",
    "broker.before_result_commit": "results taken in, not committed",
    "broker.after_result_commit": "results committed, not acknowledged",
    "broker.ack_sent": "results acknowledged",
    "broker.before_welcome": "a login judged, not answered",
    "worker.started": "as it comes up",
    "worker.hello_sent": "login sent",
    "worker.first_beat": "logged in",
    "worker.tokenized": "lines tokenized",
    "worker.running": "lines begun by the engine",
    "worker.before_result_commit": "results there, not committed",
    "worker.after_result_commit": "results committed, not said",
    "worker.done_sent": "results said, not acknowledged",
    "worker.before_discard": "acknowledged, rows not deleted",
    "worker.after_discard": "acknowledged, rows deleted",
}


@dataclass(frozen=True)
class Row:
    who: str
    where: str
    lost: int
    again: int
    most: int
    back_s: float


def measured(who: str, where: str, most: int, play: Callable[[Fleet], str]) -> Row:
    """One row. ``play`` starts the fleet, has the kill happen and returns the job."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            job = play(fleet)
            fleet.until(lambda: bool(fleet.died_at), f"{who} dies {where}")
            died_at = fleet.died_at[0]
            before = -1
            while (info := fleet.status(job)).status not in ("completed", "failed"):
                if before >= 0 and info.completed > before:
                    break
                before = info.completed if before < 0 else before
                time.sleep(0.01)
            back_s = time.monotonic() - died_at
            fleet.ended(job, 120)
            audit = fleet.audit(job)
            found = len(fleet.answers(job)) + len(fleet.fetched(job, "error"))
            row = Row(who, where, LINES - found, fleet.again(), most, back_s)
            if row.lost or not audit.holds or row.again > most:
                raise SystemExit(f"{row}: {audit}")
            return row
        finally:
            fleet.close()


def at_point(point: str) -> Row:
    room = point.partition(".")[0]
    early = point.endswith(("started", "hello_sent", "first_beat", "receiving", "checking", "welcome"))
    hooks = {"HAULIER_CRASH_AT": point if early else f"{point}:{'20' if point == 'worker.running' else '4'}"}

    def play(fleet: Fleet) -> str:
        if room == "broker":
            fleet.watch(fleet.broker(wait=False, **hooks), lambda: fleet.broker(wait=False))
            fleet.worker(delay_ms=DELAY_MS)
        else:
            fleet.broker()
            fleet.watch(fleet.worker(delay_ms=DELAY_MS, **hooks), lambda: fleet.worker(delay_ms=DELAY_MS))
        return fleet.submit(LINES)

    return measured(room, WORDS[point], 0 if room == "broker" else IN_FLIGHT, play)


def by_signal(who: str, where: str, most: int, *victims: str, standby: bool = False, stop_s: float = 0.0) -> Row:
    """Somebody is killed, or stopped for a while, a third into the job."""

    def play(fleet: Fleet) -> str:
        start = {
            "broker": lambda: fleet.broker(wait=False), "worker": lambda: fleet.worker(delay_ms=DELAY_MS),
            "second": lambda: fleet.worker(delay_ms=DELAY_MS, name="second"),
        }  # fmt: skip
        running = {"broker": fleet.broker()}
        if standby:
            fleet.standby()
        running["worker"] = start["worker"]()
        if "second" in victims or who.startswith("one of"):
            running["second"] = start["second"]()
        job = fleet.submit(LINES)
        fleet.until_run(LINES // 3)
        for victim in victims:
            running[victim].send_signal(signal.SIGSTOP if stop_s else signal.SIGKILL)
            if not stop_s and not standby and victim != "second":
                fleet.watch(running[victim], start[victim])
        if stop_s:
            time.sleep(stop_s)
            for victim in victims:
                running[victim].send_signal(signal.SIGCONT)
        for victim in victims if not stop_s else ():
            running[victim].wait()  # a process that dies may still answer for some milliseconds
        if victims == ("second",) or standby or stop_s:
            fleet.died_at.append(time.monotonic())
        return job

    return measured(who, where, most, play)


SIGNALS: tuple[Callable[[], Row], ...] = (
    lambda: by_signal("broker and worker", "both at once, a third into the job", IN_FLIGHT, "broker", "worker"),
    lambda: by_signal("one of two workers", "a third into the job, and not started again", IN_FLIGHT, "second"),
    lambda: by_signal("active broker", "a third into the job, a standby takes over", 0, "broker", standby=True),
    lambda: by_signal("worker", "stopped for 7 s (SIGSTOP, SIGCONT)", 0, "worker", stop_s=7.0),
    lambda: by_signal("broker", "stopped for 7 s (SIGSTOP, SIGCONT)", 0, "broker", stop_s=7.0),
)  # fmt: skip


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores (load {load:.1f} as it began), {platform.system()}, " \
           f"Python {platform.python_version()}"  # fmt: skip


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    began = machine()
    rows = []
    for play in [lambda point=point: at_point(point) for point in BROKER_POINTS + WORKER_POINTS] + list(SIGNALS):
        row = play()
        rows.append(row)
        print(f"{row.who}, {row.where}: lost {row.lost}, again {row.again} <= {row.most}, back {row.back_s:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
    table = "\n".join(
        f"| {one.who} | {one.where} | {one.lost} | {one.again} (at most {one.most}) | {one.back_s:.1f} s |"
        for one in rows
    )
    OUT.write_text(
        f"""# What a kill costs

Made by `make kill-table` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, commit {commit()}, on {began}.

A broker and an echo worker on loopback, keys on, synchronous FULL; a job of {LINES} lines of {DELAY_MS} ms, 8 at once.
Killed is SIGKILL, by the process's own hand at the named point or from outside; whoever ran the fleet starts the dead
process again at once, except where the row says otherwise. *Lost* counts lines without output or error in the fetched
files. *Run again* is counted by a witness at the engine; a worker holds at most {IN_FLIGHT} lines unfinished, so no
kill of one can cost more. *Back* is from the process seen dead (or let go on) to the next line stored, its start
included. Every row ends with `haulier audit`: each custom_id once.

| killed | where | lost | run again | back in |
| --- | --- | --- | --- | --- |
{table}
"""
    )


if __name__ == "__main__":
    main()
