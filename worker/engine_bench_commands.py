"""shell: ``haulier bench engine``: the engine's figures on this machine. Knows typer, and not what is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from worker.engine.bench import BenchSettings
    from worker.engine.cells import Row

CELLS_OPTIONS = {"geometry", "device", "dtype", "page_tokens", "cells", "as_json"}
"""What can be said beside ``--cells``."""
DIFFERS = 1


def register(app: typer.Typer) -> None:
    """Add ``engine`` to the ``bench`` commands."""

    @app.command("engine")
    def bench_engine(
        context: typer.Context,
        geometry: Annotated[str, typer.Option(help="d16, l8b, w1 or tiny: random weights of that shape")] = "tiny",
        contexts: Annotated[int, typer.Option(min=1, help="requests that decode together")] = 4,
        length: Annotated[int, typer.Option(min=2, help="tokens of history of each")] = 1024,
        steps: Annotated[int, typer.Option(min=1, help="decode steps measured")] = 16,
        device: Annotated[str, typer.Option(help="auto, cpu or cuda:N")] = "auto",
        dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
        fill: Annotated[str, typer.Option(help="prefill computes the histories, random fills them with numbers")] = (
            "prefill"
        ),
        compare: Annotated[bool, typer.Option(help="compare bits with --residency full")] = True,
        chunk_tokens: Annotated[int, typer.Option(min=1, help="rows of one prefill step")] = 2048,
        host_pool_gib: Annotated[float, typer.Option(min=0, help="0 for what the histories need")] = 0.0,
        device_pages_gib: Annotated[int, typer.Option(min=0, help="0 for what two staging slots need")] = 0,
        retained: Annotated[float, typer.Option(min=0, max=1, help="share of history kept in device pages")] = 0.0,
        page_tokens: Annotated[int, typer.Option(min=2, help="rows of a page")] = 256,
        cells: Annotated[
            bool, typer.Option("--cells", help="only the table of bits: contexts x lengths x routes")
        ] = False,
        shared_tokens: Annotated[
            int, typer.Option(min=0, help="measure --contexts questions of --length tokens on one document of so many")
        ] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Streamed decode beside the link's floor measured in the same run, its device peak, and its bits.

        With --shared-tokens: one question on a document of made-up rows, then all of them, which share it.
        With --cells: logits of every step against --residency full, 16 cells a route; exit 1 if any differs."""
        from common import log
        from worker.engine.bench import BenchSettings, bench
        from worker.engine.shared_bench import shared_bench

        log.setup()
        if cells:
            _refuse_others(context)
            settings = BenchSettings(geometry, device=_device(device), dtype=dtype, page_tokens=page_tokens)
            _cells(settings, as_json)
            return
        settings = BenchSettings(
            geometry=geometry,
            contexts=contexts,
            length=length,
            steps=steps,
            device=_device(device),
            dtype=dtype,
            fill=fill,
            compare=compare,
            chunk_tokens=chunk_tokens,
            host_pool_gib=host_pool_gib,
            device_pages_gib=device_pages_gib,
            retained=retained,
            page_tokens=page_tokens,
        )
        found = shared_bench(settings, shared_tokens) if shared_tokens else bench(settings)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        for name, value in found.items():
            typer.echo(f"{name:<18} {value}")


def _refuse_others(context: typer.Context) -> None:
    """The table has contexts and lengths of its own: an option that it would ignore is refused."""
    from common.errors import UsageError

    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    ignored = sorted(given - CELLS_OPTIONS)
    if ignored:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise UsageError(f"--cells measures contexts and lengths of its own: leave out {names}")


def _cells(settings: BenchSettings, as_json: bool) -> None:
    """Print the table as it comes; raise ``typer.Exit`` 1 if a cell is not equal."""
    from worker.engine.bench import bit_table

    def told(row: Row) -> None:
        for cell in row.cells:
            words = "equal" if cell.passed else "DIFFERS" if cell.equal < cell.steps else "ROUTE NOT TAKEN"
            steps = f"{cell.equal:>3} of {cell.steps:>3} steps"
            typer.echo(f"{cell.company:<18} {cell.length:<15} {cell.route:<16} {steps}  {words}")

    found = bit_table(settings, (lambda row: None) if as_json else told)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for route, passed in found["routes"].items():
            typer.echo(f"{route:<18} {passed} of {found['of']} cells equal --residency full")
        typer.echo(f"{'resident repeats':<18} {found['resident_repeats']} of {found['of']}")
    if not found["passed"]:
        raise typer.Exit(DIFFERS)


def _device(text: str) -> str:
    """``auto`` takes the first GPU if torch sees one, else the CPU."""
    if text != "auto":
        return text
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
