"""shell: measures every peer in one run, one after the other, and prints one JSON object. Runs in the peers' own venv.

Speed: all tasks are submitted before the worker starts; the rate is taken from the first result seen to the last, so
that neither submission nor the worker's start is counted, as for haulier. Single tasks: submission to result, one at a
time. Kills: SIGKILL when half of the tasks have run; a broker is back 3 s later, a worker's replacement at once; lost
is what has no result once nothing has happened for ``QUIET_S``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import witness
from home import Home

PEERS = {"celery": "CeleryPeer", "jetstream": "JetStreamPeer", "dask": "DaskPeer"}
"""Each in a module named after it; loaded when it is its turn, since they import what only their venv holds."""
BODY_BYTES = 200
BROKER_AWAY_S = 3.0
QUIET_S = 45.0
"""Longer than JetStream's ack_wait (30 s) and Dask's patience with a silent worker."""
SPEED_MAX_S = 150.0
POLL_S = 0.02


class Peer(Protocol):
    """What every peer can do; see ``CeleryPeer`` for what each means."""

    def start_broker(self) -> None: ...
    def start_worker(self) -> None: ...
    def kill(self, which: str) -> None: ...
    def submit(self, bodies: Sequence[str]) -> None: ...
    def results(self) -> int | None: ...
    def singles(self, bodies: Sequence[str]) -> list[float]: ...
    def close(self) -> None: ...


def main() -> int:
    """Measure the peers asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", required=True, help="a Home, as JSON")
    parser.add_argument("--only", default=",".join(PEERS), help="names, separated by commas")
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--singles", type=int, default=200)
    parser.add_argument("--kill-tasks", type=int, default=2000, help="0 leaves the kills out")
    asked = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    raw = json.loads(asked.home)
    home = Home(Path(raw["python"]), Path(raw["nats_server"]), raw["redis_server"], raw["redis_libraries"])
    rows = []
    for key in asked.only.split(","):
        rows.append(
            measure(
                getattr(importlib.import_module(f"{key}_peer"), PEERS[key]),
                home,
                asked.tasks,
                asked.singles,
                asked.kill_tasks,
            )
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "peers": rows}))
    return 0


def measure(kind: Any, home: Home, tasks: int, singles: int, kill_tasks: int) -> dict[str, Any]:
    """All figures of one peer."""
    row: dict[str, Any] = {
        "name": kind.name,
        "versions": {package: version(package) for package in kind.packages},
        "settings": kind.settings,
        "body_bytes": BODY_BYTES,
    }
    row |= _with(kind, home, False, lambda peer, _: speed(peer, tasks))
    row |= _with(kind, home, False, lambda peer, _: latency(peer, singles))
    if kill_tasks:
        for which in ("broker", "worker"):
            row[f"{which}_killed"] = _with(
                kind, home, True, lambda peer, seen, which=which: kill(peer, seen, which, kill_tasks)
            )
    return row


def _with(kind: Any, home: Home, watched: bool, use: Callable[[Peer, Path], dict[str, Any]]) -> dict[str, Any]:
    """What ``use`` finds with a fresh broker; ``watched`` has the work write its witness, which costs time."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        seen = Path(folder) / "witness"
        peer = kind(home, Path(folder), {witness.VARIABLE: str(seen)} if watched else {})
        try:
            peer.start_broker()
            return use(peer, seen)
        finally:
            peer.close()


def speed(peer: Peer, tasks: int) -> dict[str, Any]:
    """Tasks a second from the first result to the last."""
    peer.submit(witness.bodies(tasks, BODY_BYTES))
    peer.start_worker()
    until = time.monotonic() + SPEED_MAX_S
    first: tuple[float, int] | None = None
    while time.monotonic() < until:
        found, now = peer.results() or 0, time.perf_counter()
        if first is None and found:
            first = (now, found)
        if first is not None and found >= tasks:
            return {"tasks": tasks, "tasks_per_s": round((tasks - first[1]) / max(now - first[0], 1e-9), 1)}
        time.sleep(POLL_S)
    raise RuntimeError(f"{tasks} tasks were not done within {SPEED_MAX_S:g} s")


def latency(peer: Peer, count: int) -> dict[str, Any]:
    """Milliseconds of single tasks, after some to warm up."""
    peer.start_worker()
    took = peer.singles(witness.bodies(20 + count, BODY_BYTES))[20:]
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    return {"singles": count, "p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2)}


def kill(peer: Peer, seen: Path, which: str, tasks: int) -> dict[str, Any]:
    """Kill ``which`` half way, bring it back, and count what became of the tasks."""
    peer.submit(witness.bodies(tasks, BODY_BYTES))
    peer.start_worker()
    until = time.monotonic() + SPEED_MAX_S
    while witness.total(seen) < tasks // 2:
        if time.monotonic() > until:
            raise RuntimeError(f"half of {tasks} tasks did not run within {SPEED_MAX_S:g} s")
        time.sleep(0.001)
    peer.kill(which)
    ran = witness.total(seen)
    time.sleep(BROKER_AWAY_S if which == "broker" else 0)
    back = time.monotonic()
    peer.start_broker() if which == "broker" else peer.start_worker()
    return _aftermath(peer, seen, tasks, ran, back)


def _aftermath(peer: Peer, seen: Path, tasks: int, ran: int, back: float) -> dict[str, Any]:
    base: int | None = None
    next_done: float | None = None
    found, all_done, last, moved = 0, None, (0, 0), time.monotonic()
    while time.monotonic() - moved < QUIET_S:
        answer = peer.results()
        now = time.monotonic()
        found = answer if answer is not None else found
        base = answer if base is None else base
        # a result that was on its way when its worker died is none of the replacement's: something must have run, too
        if next_done is None and base is not None and found > base and witness.total(seen) > ran:
            next_done = round(now - back, 2)
        if found >= tasks:
            all_done = round(now - back, 2)
            break
        if last != (found, witness.total(seen)):
            last, moved = (found, witness.total(seen)), now
        time.sleep(POLL_S)
    runs = witness.runs(seen)
    return {
        "tasks": tasks,
        "ran_before_kill": ran,
        "lost": tasks - found,
        "run_twice": sum(runs.values()) - len(runs),
        "next_done_s": next_done,
        "all_done_s": all_done,
        "waited_quiet_s": None if all_done is not None else QUIET_S,
    }


if __name__ == "__main__":
    sys.exit(main())
