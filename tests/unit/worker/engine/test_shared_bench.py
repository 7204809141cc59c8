"""The bench of questions on one document: what it measures adds up, its bits are the reference's, misuse is refused."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from common.errors import UsageError
from worker.engine_bench_commands import register

ASKED = ["engine", "--geometry", "tiny", "--device", "cpu", "--page-tokens", "16", "--steps", "3"]


def _app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


def test_questions_on_one_document_stage_it_once() -> None:
    """In life: ``haulier bench engine --shared-tokens 131072 --contexts 128``; here a document of 64 rows."""
    result = CliRunner().invoke(_app(), [*ASKED, "--contexts", "4", "--length", "5", "--shared-tokens", "64", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert (found["questions"], found["steps"], found["bitwise"]) == (4, 3, True)
    assert found["ratio"] == pytest.approx(found["all_tokens_s"] / found["one_tokens_s"], rel=0.02)
    row_gb = found["bytes_per_token"] / 1e9
    assert found["spared_gb_step"] == pytest.approx(3 * 64 * row_gb, abs=1e-4)
    assert found["all_staged_gb_step"] < found["unshared_gb_step"]
    assert found["all_staged_gb_step"] - found["one_staged_gb_step"] < 4 * 32 * row_gb


def test_what_it_cannot_measure_is_refused() -> None:
    """In life: a document of half a page; a share of history kept on the device."""
    for more in (["--shared-tokens", "60"], ["--shared-tokens", "64", "--retained", "0.5"]):
        result = CliRunner().invoke(_app(), [*ASKED, *more])
        assert isinstance(result.exception, UsageError)
        assert "--shared-tokens" in str(result.exception)
