"""shell: ``haulier bench engine``: the engine's figures on this machine. Knows typer, and not what is measured."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add ``engine`` to the ``bench`` commands."""

    @app.command("engine")
    def bench_engine(
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
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Streamed decode beside the link's floor measured in the same run, its device peak, and its bits."""
        from common import log
        from worker.engine.bench import BenchSettings, bench

        log.setup()
        found = bench(
            BenchSettings(
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
            )
        )
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        for name, value in found.items():
            typer.echo(f"{name:<18} {value}")


def _device(text: str) -> str:
    """``auto`` takes the first GPU if torch sees one, else the CPU."""
    if text != "auto":
        return text
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
