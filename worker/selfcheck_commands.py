"""shell: ``haulier selfcheck``: prints the table of ``worker.selfcheck``; exit 0 only if every check passes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

FAILED = 1


def register(app: typer.Typer) -> None:
    """Add ``selfcheck`` to ``app``."""
    app.command("selfcheck")(selfcheck)


def selfcheck(
    device: str = typer.Option("cpu", "--device", envvar="HAULIER_DEVICE", help="cpu or cuda:N: what to check."),
    state: Path | None = typer.Option(
        None, "--state", envvar="HAULIER_STATE", help="Where storage is checked; a temporary folder if left out."
    ),
    as_json: bool = typer.Option(False, "--json", envvar="HAULIER_JSON", help="Print one JSON object."),
) -> None:
    """Check new hardware: bits, race controls, ring, events, storage. Exit 0 only if all pass."""
    from common import log
    from worker.selfcheck import Check, run

    log.setup()
    checks: list[Check] = []
    for check in run(device, state):
        checks.append(check)
        if not as_json:
            typer.echo(
                f"{'pass' if check.passed else 'FAIL'}  {check.name:<72}  {check.seconds:6.2f} s  {check.detail}"
            )
    failed = [check.name for check in checks if not check.passed]
    if as_json:
        found = {"device": device, "passed": not failed, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"{len(checks) - len(failed)} of {len(checks)} checks pass on {device}")
    if failed:
        raise typer.Exit(FAILED)
