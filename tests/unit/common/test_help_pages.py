"""The pages of ``--help`` in 80 columns: nothing torn, long lists in panels, variables told once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from common.cli import build_app
from common.help_pages import COMMANDS, FEW, PANELS, arrange


def _commands(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*name, word))


def _tree() -> dict[tuple[str, ...], Any]:
    command = typer.main.get_command(build_app()[0])
    arrange(command)
    return dict(_commands(command))


TREE = _tree()


@pytest.mark.parametrize("name", ["run", "worker", "bench engine", "broker", "submit", "keys add", "top", "doctor"])
def test_a_page_fits_80_columns(name: str) -> None:
    """In life: a terminal of 80 columns: no option's name is cut, and no line is longer."""
    words, command = [sys.executable, "-m", "common.cli", *name.split(), "--help"], TREE[tuple(name.split())]
    done = subprocess.run(words, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    options = [param for param in command.params if param.param_type_name == "option"]
    assert all(max(param.opts, key=len) in done.stdout for param in options)
    beside = sum(bool(param.show_envvar and param.envvar) for param in command.params)
    assert done.stdout.count("HAULIER_") == beside + (command.epilog is not None), "each variable once, or the rule"


@pytest.mark.parametrize("name", TREE, ids=" ".join)
def test_long_lists_are_in_panels(name: tuple[str, ...]) -> None:
    """No panel of a command is longer than what is read at a glance, and none is made for a few."""
    options = [param for param in TREE[name].params if param.param_type_name == "option"]
    panels = [param.rich_help_panel for param in options]
    assert all(panels.count(panel) <= FEW for panel in panels)
    assert bool({*panels} - {None}) == (len(options) > FEW)
    order = [None, *PANELS]
    assert panels == sorted(panels, key=order.index)


def test_every_name_in_a_panel_is_a_parameter() -> None:
    """A renamed option would silently fall out of its panel."""
    known = {param.name for command in TREE.values() if len(command.params) > FEW for param in command.params}
    assert [name for names in PANELS.values() for name in names if name not in known] == []


def test_every_command_has_its_place_on_the_first_page() -> None:
    """In one panel, in the order that is declared; none is missing."""
    below = TREE[()].commands
    assert list(below) == [name for names in COMMANDS.values() for name in names]
    words = [sys.executable, "-m", "common.cli", "--help"]
    done = subprocess.run(words, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    places = [done.stdout.index(f"─ {panel} ─") for panel in COMMANDS]
    assert places == sorted(places)
    assert "Exit codes: 0 done" in done.stdout
