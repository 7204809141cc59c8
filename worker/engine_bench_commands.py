"""shell: ``haulier bench engine``: the engine's figures on this machine. Knows typer, and not what is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.engine_options import DEFAULTS

if TYPE_CHECKING:
    from worker.engine.bench import BenchSettings
    from worker.engine.cells import Row

CELLS_OPTIONS = {"geometry", "device", "dtype", "page_tokens", "cells", "as_json"}
"""What can be said beside ``--cells``."""
_WORK = {"requests", "lengths", "answers", "model", "threads"}
REQUESTS_OPTIONS = _WORK | {
    "geometry",
    "contexts",
    "device",
    "dtype",
    "page_tokens",
    "chunk_tokens",
    "compare",
    "as_json",
}
"""What can be said beside ``--requests``."""
SHARED_OPTIONS = {
    "geometry",
    "contexts",
    "length",
    "steps",
    "device",
    "dtype",
    "bits",
    "chunk_tokens",
    "host_pool_gib",
    "device_pages_gib",
    "shared_tokens",
    "page_tokens",
    "as_json",
}
"""What can be said beside ``--shared-tokens``."""
LONG_OPTIONS = {"geometry", "device", "dtype", "retain", "chunk_tokens", "device_pages_gib", "page_tokens", "as_json"}
"""What can be said beside ``--geometry w3``."""
DIFFERS = 1


def register(app: typer.Typer) -> None:
    """Add ``engine`` to the ``bench`` commands."""
    app.command("engine")(bench_engine)


def bench_engine(
    context: typer.Context,
    geometry: Annotated[str, typer.Option(help="Random weights: d16, l8b, w1, tiny; w3: a workload of d16.")] = "tiny",
    contexts: Annotated[int, typer.Option(min=1, metavar="N", help="Requests that decode together.")] = 4,
    length: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of history of each.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Decode steps measured.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    fill: Annotated[str, typer.Option(help="prefill computes the histories, random makes them up.")] = "prefill",
    bits: Annotated[bool, typer.Option(help="Compare bits with --residency full.")] = True,
    compare: Annotated[str, typer.Option(help="transformers: the same work with it, in the same run.")] = "",
    requests: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="So many requests of mixed length, from first prompt to last token; 0: none."
        ),
    ] = 0,
    lengths: Annotated[str, typer.Option(metavar="LOW:HIGH", help="With --requests: tokens of a prompt.")] = "16:256",
    answers: Annotated[str, typer.Option(metavar="LOW:HIGH", help="With --requests: tokens of an answer.")] = "16:128",
    threads: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --requests: cores of each side; 0: half of them.")
    ] = 0,
    model: Annotated[str, typer.Option(help="With --requests: a real model instead of a geometry.")] = "",
    chunk_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of one prefill step.")] = 2048,
    host_pool_gib: Annotated[
        float, typer.Option(min=0, metavar="GIB", help="Host memory of histories; 0: what they need.")
    ] = 0.0,
    device_pages_gib: Annotated[
        int, typer.Option(min=0, metavar="GIB", help="Device pages; 0: what slots and --retained need.")
    ] = 0,
    retained: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of history kept in device pages (H1); 0: none."),
    ] = 0.0,
    retain: Annotated[str, typer.Option(help="With --geometry w3: whole, on or off.")] = "whole",
    headroom_gib: Annotated[
        str, typer.Option(metavar="GIB", help="Device memory beside the pages that keeps history (H2), or auto.")
    ] = "0",
    headroom_reserve_gib: Annotated[
        float, typer.Option(min=0, metavar="GIB", help="Device memory that headroom leaves free.")
    ] = DEFAULTS.headroom_reserve_gib,
    draft_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Made-up tokens verified in each pass, none of them right.")
    ] = 0,
    shared_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="One document of so many tokens, and --contexts questions on it.")
    ] = 0,
    series: Annotated[
        bool, typer.Option("--series", help="Nothing kept, H1 alone, H2 alone and both, one after another.")
    ] = False,
    page_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Rows of a page.")] = 256,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tell what steps spend time on; write a gzipped trace there.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Note device memory over time.")] = False,
    cells: Annotated[bool, typer.Option("--cells", help="The table of bits: contexts x lengths x routes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode beside the link's floor measured in the same run, its device peak, and its bits.

    H1 is history kept in device pages, H2 history kept in headroom: memory beside the pages, given back when needed.

    --series measures both, alone and together; it needs --retained and --headroom-gib.

    --shared-tokens measures one question on a document of made-up rows, then all of them, which share it.

    --requests measures whole requests, with --compare transformers beside it.

    --geometry w3 measures four long requests of which --device-pages-gib (2) holds one, cold and with their histories
    on the host already.

    --cells compares logits of every step with --residency full, 16 cells a route; exit 1 if any differs."""
    from common import log
    from common.config import EngineSettings
    from common.errors import UsageError
    from worker.engine.bench import BenchSettings, bench
    from worker.engine.long_bench import long_bench
    from worker.engine.shared_bench import shared_bench
    from worker.engine.versus import Requests, of_requests

    log.setup()
    if cells:
        _refuse_others(context, "--cells measures contexts and lengths of its own", CELLS_OPTIONS)
        settings = BenchSettings(geometry, device=_device(device), dtype=dtype, page_tokens=page_tokens)
        _cells(settings, as_json)
        return
    if geometry == "w3":
        _refuse_others(context, "--geometry w3 is a workload of its own", LONG_OPTIONS)
        asked = EngineSettings(
            "d16", _device(device), device_pages_gib=device_pages_gib or 2, dtype=dtype, retain=retain,
            page_tokens=page_tokens, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        _tell(long_bench(asked), as_json)
        return
    if compare not in ("", "transformers"):
        raise UsageError(f"--compare {compare!r}: transformers is what can be run beside")
    if requests:
        _refuse_others(context, "--requests brings prompts and answers of its own", REQUESTS_OPTIONS)
        if model and "geometry" in _given(context):
            raise UsageError("--model and --geometry are two models: leave out one")
        work = Requests(requests, _pair("--lengths", lengths), _pair("--answers", answers))
        asked = EngineSettings(
            model or geometry, _device(device), concurrency=contexts, dtype=dtype, page_tokens=page_tokens,
            chunk_tokens=chunk_tokens, threads=threads,
        )  # fmt: skip
        found = of_requests(asked, work, beside=bool(compare))
    else:
        if shared_tokens:
            _refuse_others(context, "--shared-tokens measures streamed decode over made-up rows", SHARED_OPTIONS)
        if stray := _given(context) & (_WORK - {"requests"}):
            raise UsageError(f"{_options(stray)} go with --requests N, which is not there: add it, or leave them out")
        settings = BenchSettings(
            geometry=geometry, contexts=contexts, length=length, steps=steps, device=_device(device), dtype=dtype,
            fill=fill, bits=bits, transformers=bool(compare), chunk_tokens=chunk_tokens, host_pool_gib=host_pool_gib,
            device_pages_gib=device_pages_gib, retained=retained, headroom_gib=headroom_gib,
            headroom_reserve_gib=headroom_reserve_gib, page_tokens=page_tokens, draft_tokens=draft_tokens,
            profile=profile, memory=memory,
        )  # fmt: skip
        if series:
            _series(settings, as_json)
            return
        found = shared_bench(settings, shared_tokens) if shared_tokens else bench(settings)
    _tell(found, as_json)


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"{name:<18} {value}")


def _series(settings: BenchSettings, as_json: bool) -> None:
    """Print each series as it is measured; raise ``typer.Exit`` 4 if one was refused."""
    from common.errors import RefusedError
    from worker.engine.bench_series import SHOWN, series

    rows = []
    for row in series(settings):
        rows.append(row)
        if not as_json:
            shown = ("series", "refused") if "refused" in row else SHOWN
            typer.echo("  ".join(f"{name} {row[name]}" for name in shown))
    if as_json:
        typer.echo(json.dumps({"series": rows}, indent=2))
    if any("refused" in row for row in rows):
        raise typer.Exit(RefusedError.exit_code)


def _pair(option: str, text: str) -> tuple[int, int]:
    """LOW:HIGH as two numbers."""
    from common.errors import UsageError

    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()) or len(text) > 20:
        raise UsageError(f"{option} {text!r} is not LOW:HIGH, two numbers of tokens")
    return int(low), int(high)


def _refuse_others(context: typer.Context, why: str, heard: set[str]) -> None:
    """An option that would be ignored is refused: ``heard`` are the others."""
    from common.errors import UsageError

    ignored = _given(context) - heard
    if ignored:
        raise UsageError(f"{why}: leave out {_options(ignored)}; with the rest go {_options(heard)}")


def _given(context: typer.Context) -> set[str]:
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def _options(names: set[str]) -> str:
    return ", ".join(sorted("--json" if name == "as_json" else f"--{name.replace('_', '-')}" for name in names))


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
