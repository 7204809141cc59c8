"""shell: ``haulier bench ring``: the ring's figures on this machine. Knows typer and nothing of what is measured."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from common.errors import HaulierError


def register_bench(app: typer.Typer) -> None:
    """Add ``ring`` to the ``bench`` commands."""

    @app.command("ring")
    def bench_ring(
        batches: Annotated[
            int, typer.Option(metavar="N", min=1, envvar="HAULIER_BATCHES", help="Batches of the wrap soak.")
        ] = 1_000_000,
        rate_batches: Annotated[
            int, typer.Option(metavar="N", min=1_000, envvar="HAULIER_RATE_BATCHES", help="Batches of each rate.")
        ] = 100_000,
        device: Annotated[
            str, typer.Option(envvar="HAULIER_DEVICE", help="auto, cpu or cuda:N: where latency is measured.")
        ] = "auto",
        as_json: Annotated[bool, typer.Option("--json", envvar="HAULIER_JSON", help="Print one JSON object.")] = False,
    ) -> None:
        """The ring beside queue.Queue and multiprocessing.Queue, its wrap soak, and doorbell latency on a GPU."""
        from ring.bench import bench

        try:
            found = bench(batches=rate_batches, soak_batches=batches, device=_device(device))
        except HaulierError as error:
            typer.echo(f"haulier bench ring: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        typer.echo(json.dumps(found, indent=2) if as_json else _table(found))


def _device(text: str) -> int | None:
    """The GPU's number, or None for none; ``auto`` takes the first GPU if torch sees one."""
    if text == "cpu":
        return None
    if text == "auto":
        try:
            import torch
        except ImportError:
            return None
        return 0 if torch.cuda.is_available() else None
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise typer.BadParameter(f"{text!r} is none of auto, cpu, cuda:N", param_hint="--device")
    return int(number or "0")


def _table(found: dict[str, Any]) -> str:
    """Sections and their figures, one a line."""
    lines = []
    for section, figures in found.items():
        if figures is None:
            lines.append(f"{section}: not measured")
            continue
        lines.append(section)
        lines.extend(
            f"  {name:<28} {value:,}" if isinstance(value, int) else f"  {name:<28} {value}"
            for name, value in figures.items()
        )
    return "\n".join(lines)
