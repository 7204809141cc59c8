"""``haulier bench engine`` as typed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from common.errors import UsageError
from worker.engine.routes import StagedRoute
from worker.engine_bench_commands import register

CELLS = ["engine", "--cells", "--geometry", "tiny", "--device", "cpu", "--page-tokens", "4"]


def _app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


def test_it_prints_one_json_object() -> None:
    """In life: ``haulier bench engine --geometry tiny --json`` in a script."""
    app = _app()
    asked = ["engine", "--geometry", "tiny", "--contexts", "2", "--length", "20", "--steps", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{\n") :])
    for name in ("link_gbps", "floor_tokens_s", "tokens_s", "of_floor", "ms_step", "peak_gb", "bitwise", "device"):
        assert name in found
    assert CliRunner().invoke(app, asked).exit_code == 0


def test_the_table_of_bits_is_16_of_16_on_every_route() -> None:
    """H4, in life: ``haulier bench engine --cells`` before a machine is trusted with a run."""
    result = CliRunner().invoke(_app(), [*CELLS, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert (found["passed"], found["of"], found["resident_repeats"]) == (True, 16, 16)
    assert found["routes"] == {"streamed": 16, "retained": 16, "retained in part": 16, "headroom": 16, "H1+H2": 16}
    assert len(found["cells"]) == 80
    assert all(cell["equal"] == cell["steps"] > 0 for cell in found["cells"])


def test_a_row_that_is_never_written_back_turns_the_table_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the streamed route forgets one layer's rows; the words say where, the exit status that."""
    original = StagedRoute._write_back

    def write_back(self, live, layer, where):  # type: ignore[no-untyped-def]
        work = original(self, live, layer, where)
        return replace(work, fn=lambda: None) if layer == 1 else work

    monkeypatch.setattr(StagedRoute, "_write_back", write_back)
    result = CliRunner().invoke(_app(), CELLS)
    assert result.exit_code == 1, result.output
    assert "DIFFERS" in result.stdout
    assert re.search(r"streamed +0 of 16 cells", result.stdout)
    assert re.search(r"retained +16 of 16 cells", result.stdout)
    assert re.search(r"resident repeats +16 of 16", result.stdout)


def test_an_option_that_the_table_would_ignore_is_refused() -> None:
    """In life: ``--cells --contexts 64`` measures four whatever was asked."""
    result = CliRunner().invoke(_app(), [*CELLS, "--contexts", "64", "--fill", "random"])
    assert isinstance(result.exception, UsageError)
    assert "--contexts, --fill" in str(result.exception)


@pytest.mark.parametrize("lengths", ["5", "9:3", "0:4", "a:b", "3:"])
def test_a_wrong_range_is_named(lengths: str) -> None:
    """What was asked, and the option to change."""
    done = CliRunner().invoke(_app(), ["engine", "--requests", "2", "--lengths", lengths])
    assert isinstance(done.exception, UsageError)
    assert "--lengths" in str(done.exception)


def test_only_what_can_be_run_is_compared_with() -> None:
    """A word that nobody knows measures nothing."""
    done = CliRunner().invoke(_app(), ["engine", "--compare", "vllm"])
    assert isinstance(done.exception, UsageError)


def test_requests_beside_transformers_are_one_json_object() -> None:
    """`haulier bench engine --requests N --compare transformers --json`."""
    command = ["engine", "--requests", "3", "--lengths", "3:9", "--answers", "2:4", "--page-tokens", "16"]
    done = CliRunner().invoke(_app(), [*command, "--compare", "transformers", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["of_generate"] > 0


@pytest.mark.parametrize(
    "extra",
    [
        ["--requests", "2", "--steps", "3"],
        ["--lengths", "3:4"],
        ["--requests", "2", "--model", "m", "--geometry", "tiny"],
        ["--requests", "2", "--series"],
        ["--shared-tokens", "64", "--retained", "0.5"],
        ["--shared-tokens", "64", "--draft-tokens", "3"],
        ["--shared-tokens", "64", "--headroom-gib", "1"],
        ["--shared-tokens", "64", "--fill", "random"],
        ["--shared-tokens", "64", "--compare", "transformers"],
        ["--shared-tokens", "64", "--series"],
    ],
)
def test_an_option_that_would_be_ignored_is_refused(extra: list[str]) -> None:
    """Nobody waits for a figure that is not of what was asked."""
    done = CliRunner().invoke(_app(), ["engine", *extra])
    assert isinstance(done.exception, UsageError)
    option = extra[-1] if extra[-1].startswith("--") else extra[-2]
    assert option in str(done.exception)


def test_a_series_says_which_options_belong_to_it() -> None:
    """In life: --series with one of the two: the other is named."""
    for given, lacks in ((["--retained", "0.5"], "--headroom-gib N"), (["--headroom-gib", "1"], "--retained SHARE")):
        done = CliRunner().invoke(_app(), ["engine", "--series", "--length", "8", *given])
        assert isinstance(done.exception, UsageError)
        assert f"say {lacks}" in str(done.exception)


def test_a_series_goes_on_behind_a_row_that_is_refused() -> None:
    """In life: two pages of history each, of which a third is kept: H1 has no room for its floors, and H2 has."""
    asked = ["engine", "--series", "--length", "20", "--steps", "2", "--device", "cpu", "--contexts", "2", "--no-bits"]
    asked += ["--page-tokens", "32", "--retained", "0.3", "--headroom-gib", "1", "--headroom-reserve-gib", "0"]
    done = CliRunner().invoke(_app(), [*asked, "--json"])
    assert done.exit_code == 4, done.output
    rows = json.loads(done.stdout[done.stdout.index("{\n") :])["series"]
    assert [(row["series"], "refused" in row) for row in rows] == [
        ("streamed", False),
        ("H1", True),
        ("H2", False),
        ("H1+H2", True),
    ]
    assert "--retained" in rows[1]["refused"]
    assert "series H1  refused --retained" in CliRunner().invoke(_app(), asked).stdout
