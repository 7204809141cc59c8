"""The bounds agree with each other, and the check that says so would notice if they did not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common import limits
from common.errors import InvariantError

UNITS = (
    "_S",
    "_MS",
    "_BYTES",
    "_COUNT",
    "_CHARS",
    "_DEPTH",
    "_LINES",
    "_TOKENS",
    "_TURN",
    "_VERSION",
    "_DEFAULT",
    "_ATTEMPTS",
)


def test_the_bounds_agree() -> None:
    """Import is enough to run the check; this says it by name."""
    limits.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIVENESS_S", 2.0),
        ("LOADING_LIVENESS_S", 1.0),
        ("GRACE_S", 4.0),
        ("BACKOFF_MAX_EARLY_S", 10.0),
        ("PART_MAX_BYTES", 4 * 1024 * 1024),
        ("BATCH_MAX_BYTES", 4 * 1024 * 1024),
        ("RING_ENTRIES_COUNT", 1000),
        ("STEP_TABLES_COUNT", 2),
    ],
)
def test_a_bound_that_breaks_a_relation_is_found(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """Control: someone shortens a grace for a demo, and no process starts."""
    monkeypatch.setattr(limits, name, value)
    with pytest.raises(InvariantError, match="limits disagree"):
        limits.check()


def test_each_bound_ends_in_its_unit() -> None:
    """``GRACE`` in seconds or milliseconds: nobody should have to guess."""
    syntax = ast.parse(Path(limits.__file__).read_text(encoding="utf-8"))
    names = [
        node.targets[0].id
        for node in syntax.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    assert names
    assert [name for name in names if not name.endswith(UNITS)] == []
