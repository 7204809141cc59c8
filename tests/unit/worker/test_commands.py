"""``haulier worker``: flags, environment and what is missing, each said in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from common.config import WorkerSettings
from common.errors import RefusedError
from worker import commands, process


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    commands.register(made)
    return made


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[WorkerSettings]:
    """What would have been served."""
    got: list[WorkerSettings] = []

    def serve(settings: WorkerSettings) -> None:
        got.append(settings)

    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr("common.log.setup", lambda: None)
    return got


def test_flags_and_environment_say_the_same(app: typer.Typer, served: list[WorkerSettings], tmp_path: Path) -> None:
    """A container is set up by variables, a shell by flags."""
    flags = {
        "--broker": "a:1,b:2", "--state": str(tmp_path), "--model": "m", "--device": "cuda:1",
        "--device-pages-gib": "3",
        "--host-pool-gib": "2.5", "--concurrency": "5", "--context-tokens": "99", "--fit": "shrink",
        "--residency": "full", "--page-tokens": "16", "--chunk-tokens": "64", "--slot-gib": "0.5",
        "--dtype": "float32",
        "--retain": "off", "--target-pages": "4", "--burst-pages": "2", "--headroom-reserve-gib": "3.5",
        "--own-tokens": "48", "--shared-histories": "2",
        "--ring-mib": "2", "--metrics-port": "9", "--echo-delay-ms": "7",
    }  # fmt: skip
    arguments = [part for pair in flags.items() for part in pair]
    by_flag = CliRunner().invoke(app, ["worker", *arguments, "--insecure", "--echo"])
    variables = {f"HAULIER_{name[2:].upper().replace('-', '_')}": value for name, value in flags.items()}
    by_variable = CliRunner().invoke(app, ["worker"], env={**variables, "HAULIER_INSECURE": "1", "HAULIER_ECHO": "1"})
    assert (by_flag.exit_code, by_variable.exit_code) == (0, 0), (by_flag.output, by_variable.output)
    assert served[0] == served[1]
    assert served[0].brokers == ("tcp://a:1", "tcp://b:2")
    engine = served[0].engine
    assert (engine.retain, engine.headroom_gib, engine.headroom_reserve_gib) == ("off", "0", 3.5)
    assert (engine.device, engine.device_pages_gib, engine.slot_gib, engine.residency) == ("cuda:1", 3, 0.5, "full")


def test_every_flag_has_a_variable_of_its_name(app: typer.Typer) -> None:
    """HAULIER_<FLAG>, one rule without exceptions but the witness, which tests share with other engines."""
    command: Any = typer.main.get_command(app)
    for option in command.commands["worker"].params:
        flag = option.opts[0]
        if flag in ("--help", "--echo-witness"):
            continue
        assert option.envvar == f"HAULIER_{flag[2:].upper().replace('-', '_')}"


def test_without_the_worker_extra_an_echo_runs_and_a_model_says_what_to_install(
    app: typer.Typer, served: list[WorkerSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A broker's image: small, and clear about what it lacks."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else real(name, *a))
    arguments = ["worker", "--broker", "a:1", "--state", str(tmp_path), "--insecure"]
    assert CliRunner().invoke(app, [*arguments, "--echo"]).exit_code == 0
    refused = CliRunner().invoke(app, [*arguments, "--model", "m"])
    assert isinstance(refused.exception, RefusedError)
    assert "haulier[worker]" in str(refused.exception)
    assert len(served) == 1


def test_the_benches_are_there(app: typer.Typer) -> None:
    """Ring and engine are measured under one command."""
    command: Any = typer.main.get_command(app)
    assert {"ring", "engine"} <= set(command.commands["bench"].commands)
    assert "model" in command.commands


def test_a_bench_of_another_room_is_kept() -> None:
    """The fleet's bench is registered first where both are installed."""
    app, fleet = typer.Typer(), typer.Typer()
    fleet.command("fleet")(lambda: None)
    app.add_typer(fleet, name="bench")
    commands.register(app)
    command: Any = typer.main.get_command(app)
    assert {"fleet", "ring", "engine"} <= set(command.commands["bench"].commands)
