"""The bench's command: what it takes, what it says, and that it stands in a group that several rooms share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from broker import fleet_bench, fleet_bench_commands
from common.cli import build_app
from common.errors import RefusedError, UsageError

FOUND: dict[str, Any] = {
    "fleet": {
        "lines": 100_000,
        "lines_per_s": 12_345.6,
        "in_flight_max_seen": 1000,
        "broker_mib_after_first_lines": 60.0,
        "broker_mib_growth": 3.2,
        "p50_ms": 7.5,
        "p99_ms": 12.0,
        "restart": {"outbox_lines": 10_240, "first_ack_s": 1.1, "wasted": 0},
        "worker_killed": {"noticed_s": 0.5, "lines_still_assigned": 0},
        "worker_silent": {"noticed_s": 5.3, "lines_still_assigned": 0},
    },
    "floor": {"lines_per_s": 30_000.0},
    "of_floor": 0.412,
    "peers": [
        {
            "name": "Some queue",
            "tasks_per_s": 500.0,
            "p50_ms": 3.0,
            "p99_ms": 9.0,
            "worker_killed": {"lost": 1, "run_twice": 2, "next_done_s": None},
        }
    ],
}
"""Made up, in the shape of a measurement."""


class Room(NamedTuple):
    """What an entry point is to the command line."""

    name: str
    register: Callable[[typer.Typer], None]
    value: str = "a room"

    def load(self) -> Callable[[typer.Typer], None]:
        return self.register


def _register_ring(app: typer.Typer) -> None:
    theirs = typer.Typer(name="bench", help="Theirs.", no_args_is_help=True)
    theirs.command("ring")(lambda: None)
    app.add_typer(theirs)


def test_what_is_measured_is_said_in_words() -> None:
    """Someone without --json still sees floor, durability and the peers' losses beside the rate."""
    text = "\n".join(fleet_bench_commands.as_text(FOUND))
    for words in ("12,346 lines/s", "synced", "CURVE on", "0.41 of it", "10,240 finished lines", "5.3 s (silent)"):
        assert words in text
    assert "Some queue: 500 tasks/s" in text
    assert "worker killed: 1 lost, 2 run twice, next done never" in text


@pytest.mark.parametrize("order", [("fleet", "ring"), ("ring", "fleet"), ("fleet",), ("ring",)])
def test_rooms_share_the_group_in_any_order(order: tuple[str, ...]) -> None:
    """`bench ring` comes from the worker's room: both are there whoever registers first, and each without the other."""
    rooms = {"fleet": Room("fleet", fleet_bench_commands.register), "ring": Room("ring", _register_ring)}
    app, left_out = build_app(rooms[name]._replace(name=str(place)) for place, name in enumerate(order))  # type: ignore[misc]
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    assert not left_out
    assert [name for name in ("fleet", "ring") if f" {name} " in shown] == sorted(order)


@pytest.mark.parametrize("flags", [["--lines", "1"], ["--in-flight", "10"], ["--singles", "1"]])
def test_counts_that_measure_nothing_are_a_wrong_use(flags: list[str]) -> None:
    """A rate over one line or a percentile of one is no figure."""
    app, _ = build_app([Room("fleet", fleet_bench_commands.register)])  # type: ignore[list-item]
    found = CliRunner().invoke(app, ["bench", "fleet", *flags])
    assert isinstance(found.exception, UsageError)


def test_peers_are_refused_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The peers' scripts are in no wheel: an installed haulier says so before it measures for minutes."""
    monkeypatch.setattr(fleet_bench_commands, "PEERS", tmp_path)
    app, _ = build_app([Room("fleet", fleet_bench_commands.register)])  # type: ignore[list-item]
    found = CliRunner().invoke(app, ["bench", "fleet", "--peers"])
    assert isinstance(found.exception, RefusedError)


def test_the_peers_scripts_are_where_the_command_looks() -> None:
    """Moved scripts would show only in a run of minutes."""
    assert (fleet_bench_commands.PEERS / "__main__.py").is_file()


def test_the_input_is_a_batch_file_of_bodies_of_the_size_said(tmp_path: Path) -> None:
    """Each line is one request of its own id; its body is what travels, 200 bytes of it."""
    path = fleet_bench.write_input(tmp_path / "input.jsonl", 50)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({line["custom_id"] for line in lines}) == 50
    assert {len(json.dumps(line["body"])) for line in lines} == {fleet_bench.BODY_BYTES}
