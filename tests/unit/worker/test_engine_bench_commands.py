"""``haulier bench engine`` as typed."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from worker.engine_bench_commands import register


def test_it_prints_one_json_object() -> None:
    """In life: ``haulier bench engine --geometry tiny --json`` in a script."""
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    asked = ["engine", "--geometry", "tiny", "--contexts", "2", "--length", "20", "--steps", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{\n") :])
    for name in ("link_gbps", "floor_tokens_s", "tokens_s", "of_floor", "ms_step", "peak_gb", "bitwise", "device"):
        assert name in found
    assert CliRunner().invoke(app, asked).exit_code == 0
