"""shell: ``haulier bench fleet``: the fleet's figures, the floor beside them and, if asked, the peers. Decides nothing.

Works without the worker's extra as long as the worker can be started: it is a process like any other. Results go to
standard output, progress to stderr.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import zmq

from broker import fleet_bench, fleet_floor
from broker.show import Show, show
from common import keys
from common.cli import installed_version
from common.config import KeySettings
from common.errors import RefusedError, UsageError
from common.folders import made

PEERS = Path(__file__).resolve().parent.parent / "tests" / "benchmarks" / "peers"
PEERS_MAX_S = 1800
LINES_MAX_COUNT = 10_000_000


def register(app: typer.Typer) -> None:
    """Add ``bench fleet``; other rooms add to ``bench`` too."""
    bench = typer.Typer(no_args_is_help=True, help="Measure ring, engine and fleet on this machine.")
    bench.command("fleet")(bench_fleet)
    app.add_typer(bench, name="bench")


def bench_fleet(
    lines: Annotated[int, typer.Option(envvar="HAULIER_LINES", help="Lines of the job.")] = 100_000,
    in_flight: Annotated[
        int, typer.Option(envvar="HAULIER_IN_FLIGHT", help="Lines dispatched and not stored, at most.")
    ] = 1000,
    singles: Annotated[
        int, typer.Option(envvar="HAULIER_SINGLES", help="Single lines timed one by one; 0 for none.")
    ] = 200,
    recovery: Annotated[
        bool, typer.Option(envvar="HAULIER_RECOVERY", help="Time a broker's restart and a worker's death too.")
    ] = True,
    peers: Annotated[
        bool, typer.Option("--peers", envvar="HAULIER_PEERS", help="Measure other task queues too (in a checkout).")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(envvar="HAULIER_STATE", help="Disk to measure on: a folder; default: the temporary one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="HAULIER_JSON", help="Print JSON on standard output.")
    ] = False,
) -> None:
    """Echo lines through a broker and a worker of this machine: dispatched, answered, stored, acked; all synced."""
    if not 2 <= lines <= LINES_MAX_COUNT or in_flight < fleet_floor.LINES_A_MESSAGE or singles == 1 or singles < 0:
        raise UsageError(
            f"--lines is 2 to {LINES_MAX_COUNT}, --in-flight {fleet_floor.LINES_A_MESSAGE} or more, "
            "--singles 0 or 2 and more"
        )
    if peers and not (PEERS / "__main__.py").exists():
        raise RefusedError(f"--peers works in a checkout of haulier, where {PEERS} is")
    if state is not None:
        made(state, "the measurement")
    with show(announce=True) as bar, tempfile.TemporaryDirectory(prefix="bench-fleet-", dir=state) as folder:
        found = _measure(Path(folder), fleet_bench.Wanted(lines, in_flight, singles, recovery), peers, bar)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in as_text(found):
            typer.echo(line)


def _measure(folder: Path, wanted: fleet_bench.Wanted, peers: bool, bar: Show) -> dict[str, Any]:
    load = [os.getloadavg()[0]]  # others at work on the machine at the same time: a figure without it says little
    bar.phase("floor")
    keys.init(folder / "keys")
    body = fleet_floor.body_of(fleet_bench.BODY_BYTES)
    floor = fleet_floor.measure(wanted.lines, wanted.in_flight, body, folder / "floor", KeySettings(folder / "keys"))
    found: dict[str, Any] = {
        "command": shlex.join(["haulier", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()},
        "fleet": fleet_bench.measure(folder / "fleet", wanted, _Progress(bar)),
        "floor": {
            "lines": floor.lines,
            "in_flight": floor.in_flight,
            "seconds": round(floor.seconds, 3),
            "lines_per_s": round(floor.lines_per_s, 1),
        },
    }
    load.append(os.getloadavg()[0])
    found["of_floor"] = round(found["fleet"]["lines_per_s"] / floor.lines_per_s, 3)
    if peers:
        bar.phase("peers")
        found["peers"] = _peers()
        load.append(os.getloadavg()[0])
    found["machine"]["load_average"] = [round(one, 2) for one in load]
    return found


class _Progress:
    """Shows each measurement as a phase of its own."""

    def __init__(self, bar: Show) -> None:
        self._bar = bar
        self._name = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self._name:
            self._name = name
            self._bar.phase(name, total)
        self._bar.update(done, total)


def _versions() -> dict[str, str]:
    return {
        "haulier": installed_version(),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def _peers() -> list[dict[str, Any]]:
    """The peers' figures, measured by their own scripts in a process of their own; its progress goes to stderr."""
    try:
        done = subprocess.run(
            [sys.executable, str(PEERS)], stdout=subprocess.PIPE, text=True, timeout=PEERS_MAX_S, check=False
        )
    except subprocess.TimeoutExpired as failure:
        raise RefusedError(f"the peers were not measured within {PEERS_MAX_S} s") from failure
    if done.returncode != 0:
        raise RefusedError(f"the peers could not be measured (exit {done.returncode}); what they said is above")
    found: list[dict[str, Any]] = json.loads(done.stdout)["peers"]
    return found


def as_text(found: dict[str, Any]) -> list[str]:
    """The figures as people read them."""
    fleet, floor = found["fleet"], found["floor"]
    lines = [
        f"fleet   {fleet['lines_per_s']:,.0f} lines/s over {fleet['lines']:,} lines, "
        f"{fleet['in_flight_max_seen']:,} in flight at most, synced on both sides, CURVE on",
        f"floor   {floor['lines_per_s']:,.0f} lines/s: the same messages and commits without rules; "
        f"the fleet reaches {found['of_floor']:.2f} of it",
        f"memory  the broker grew by {fleet['broker_mib_growth']:.1f} MiB after the first "
        f"{min(fleet_bench.MEMORY_FROM_LINES, fleet['lines'] // 2):,} lines, "
        f"from {fleet['broker_mib_after_first_lines']:.1f} MiB",
    ]
    if "p50_ms" in fleet:
        lines.append(
            f"single  p50 {fleet['p50_ms']} ms, p99 {fleet['p99_ms']} ms: one job of one line, submitted to stored"
        )
    if "restart" in fleet:
        restart = fleet["restart"]
        lines.append(
            f"restart first new ack {restart['first_ack_s']} s after a broker's start, "
            f"with {restart['outbox_lines']:,} finished lines in an outbox"
        )
        lines.append(
            f"death   noticed after {fleet['worker_killed']['noticed_s']} s (killed), "
            f"{fleet['worker_silent']['noticed_s']} s (silent)"
        )
    for peer in found.get("peers", []):
        lines.append(
            f"peer    {peer['name']}: {peer['tasks_per_s']:,.0f} tasks/s, "
            f"p50 {peer['p50_ms']} ms, p99 {peer['p99_ms']} ms"
        )
        for which in ("broker_killed", "worker_killed"):
            if which in peer:
                row = peer[which]
                lines.append(
                    f"          {which.replace('_', ' ')}: {row['lost']} lost, {row['run_twice']} run twice, next done "
                    f"{'never' if row['next_done_s'] is None else str(row['next_done_s']) + ' s'}"
                )
    return lines
