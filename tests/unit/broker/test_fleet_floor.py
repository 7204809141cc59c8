"""The floor does what the fleet is compared with: every line is dispatched, stored, acked and leaves the outbox."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from broker import fleet_floor
from common import keys
from common.config import KeySettings


@pytest.mark.parametrize("lines", [1, 64, 300])
def test_every_line_is_stored_with_its_own_text(tmp_path: Path, lines: int) -> None:
    """A floor that drops work would be a floor of nothing: one line, one message full, and several with a rest."""
    keys.init(tmp_path / "keys")
    body = fleet_floor.body_of(200)
    found = fleet_floor.measure(lines, 64, body, tmp_path / "floor", KeySettings(tmp_path / "keys"))
    assert found.lines == lines
    assert found.lines_per_s > 0
    connection = sqlite3.connect(tmp_path / "floor" / "store.db")
    try:
        stored = connection.execute("SELECT line, status, body FROM results ORDER BY line").fetchall()
        states = connection.execute("SELECT DISTINCT state FROM lines").fetchall()
    finally:
        connection.close()
    assert stored == [(index, "ok", body) for index in range(lines)]
    assert states == [(2,)]


def test_both_sides_sync_every_commit(tmp_path: Path) -> None:
    """The floor has the fleet's durability, or the ratio to it would mean nothing."""
    from common.database import open_database

    database = open_database(tmp_path / "store.db", [fleet_floor._make_lines, fleet_floor._make_outbox], "a store")
    try:
        assert database.conn.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert database.conn.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    finally:
        database.conn.close()


@pytest.mark.parametrize("size", [80, 200, 4096])
def test_bodies_have_the_size_asked_for(size: int) -> None:
    """Figures say 200 B in: so it must be."""
    assert len(fleet_floor.body_of(size)) == size
