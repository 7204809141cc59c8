"""shell: ``haulier doctor``: prints what ``worker.doctor`` finds; exit 4 when something would make haulier refuse."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from common.errors import RefusedError, UsageError
from common.printable import printable
from worker.doctor import BAD, OK, Finding, Wanted, diagnose


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to ``app``."""
    app.command("doctor")(doctor)


def doctor(
    state: Path = typer.Option(
        Path("."), "--state", envvar="HAULIER_STATE", help="Folder for state: its disk is measured."
    ),
    device: str = typer.Option("cpu", "--device", envvar="HAULIER_DEVICE", help="cpu or cuda:N."),
    host_pool_gib: float = typer.Option(
        1.0, "--host-pool-gib", envvar="HAULIER_HOST_POOL_GIB", help="The worker's host pool, GiB."
    ),
    ring_mib: int = typer.Option(64, "--ring-mib", envvar="HAULIER_RING_MIB", help="The worker's ring, MiB."),
    disk_reserve_gib: float = typer.Option(
        1.0, "--disk-reserve-gib", envvar="HAULIER_DISK_RESERVE_GIB", help="Disk the broker keeps, GiB."
    ),
    as_json: bool = typer.Option(False, "--json", envvar="HAULIER_JSON", help="Print one JSON object."),
) -> None:
    """Say what of this machine suits haulier, what to change, what it would refuse.

    Give it the settings that broker or worker shall have.
    Exit 4 when something would make haulier refuse, else 0.
    It writes a little into --state, and deletes it again.
    """
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and device[5:].isdecimal()):
        raise UsageError(f"--device {device!r} is not cpu or cuda:N")
    if ring_mib < 1 or not 0 <= host_pool_gib < 1 << 20 or not 0 <= disk_reserve_gib < 1 << 20:
        raise UsageError("--ring-mib must be 1 or more, --host-pool-gib and --disk-reserve-gib 0 or more")
    from worker.doctor_probe import probe

    wanted = Wanted(device, host_pool_gib, ring_mib, disk_reserve_gib)
    findings = diagnose(probe(wanted, state), wanted)
    bad = [one for one in findings if one.verdict == BAD]
    if as_json:
        typer.echo(json.dumps({"fine": not bad, "findings": [asdict(one) for one in findings]}, indent=2))
    else:
        for one in findings:
            typer.echo("\n".join(lines(one)))
        typer.echo(
            f"{len(bad)} of {len(findings)} would make haulier refuse" if bad else "nothing makes haulier refuse"
        )
    if bad:
        raise typer.Exit(RefusedError.exit_code)


def lines(one: Finding) -> list[str]:
    """A finding for people: what was found, and below it what to change."""
    said = [printable(f"{one.verdict:<6}  {one.name}: {one.found}")]
    return said if one.verdict == OK else [*said, printable(f"        change: {one.change}")]
