"""D6: a database that cannot keep its word is refused at start; one that can commits all or nothing, synced."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from common import database
from common.errors import RefusedError


def first(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE things (name TEXT PRIMARY KEY) STRICT")


def second(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 0")


def broken(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE half (x INTEGER) STRICT")
    connection.execute("SELECT * FROM no_such_table")


def test_it_is_durable_by_default(tmp_path: Path) -> None:
    """Every connection syncs every commit (D1), in WAL, with room given back later."""
    made = database.open_database(tmp_path / "a.db", [first], "the store")
    assert made.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert made.execute("PRAGMA synchronous").fetchone() == (2,)
    assert made.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    made.close()


def test_an_older_file_migrates_and_keeps_its_rows(tmp_path: Path) -> None:
    """An upgrade of haulier finds last year's store."""
    path = tmp_path / "a.db"
    old = database.open_database(path, [first], "the store")
    with database.transaction(old) as connection:
        connection.execute("INSERT INTO things VALUES ('kept')")
    old.close()
    new = database.open_database(path, [first, second], "the store")
    assert new.execute("SELECT name, size FROM things").fetchall() == [("kept", 0)]
    new.close()


def test_a_newer_file_is_refused_by_name(tmp_path: Path) -> None:
    """A downgrade must not guess at columns it does not know."""
    path = tmp_path / "a.db"
    database.open_database(path, [first, second], "the store").close()
    with pytest.raises(RefusedError, match=r"version 2.*knows up to 1"):
        database.open_database(path, [first], "the store")


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Half a migration would be neither version."""
    path = tmp_path / "a.db"
    with pytest.raises(RefusedError, match="no_such_table"):
        database.open_database(path, [first, broken], "the store")
    again = database.open_database(path, [first], "the store")
    assert "half" not in again.table_names()
    again.close()


def test_a_block_that_raises_writes_nothing(tmp_path: Path) -> None:
    """A bug between two writes must not leave one of them."""
    made = database.open_database(tmp_path / "a.db", [first], "the store")
    with pytest.raises(sqlite3.IntegrityError), database.transaction(made) as connection:
        connection.executemany("INSERT INTO things VALUES (?)", [("gone",), ("gone",)])
    assert made.execute("SELECT count(*) FROM things").fetchone() == (0,)
    with database.transaction(made) as connection:
        connection.execute("INSERT INTO things VALUES ('there')")
    assert made.execute("SELECT count(*) FROM things").fetchone() == (1,), "control: a whole block stays"
    made.close()


def test_a_damaged_file_is_refused_with_advice(tmp_path: Path) -> None:
    """A disk fault or a stray editor: say it, do not start over silently."""
    path = tmp_path / "a.db"
    path.write_bytes(b"this is not a database at all, by any means" * 100)
    with pytest.raises(RefusedError, match="damaged"):
        database.open_database(path, [first], "the store")
    assert path.read_bytes().startswith(b"this is not"), "nothing was overwritten"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """--state below a file."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="--state"):
        database.open_database(tmp_path / "file" / "deeper" / "a.db", [first], "the store")


def test_a_network_mount_is_refused_unless_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WAL on a shared host mount corrupts within minutes."""
    monkeypatch.setattr(database, "filesystem", lambda folder: "nfs4")
    with pytest.raises(RefusedError, match="nfs4"):
        database.open_database(tmp_path / "a.db", [first], "the store")
    monkeypatch.setenv(database.ALLOW_UNSAFE, "1")
    database.open_database(tmp_path / "a.db", [first], "the store").close()


def test_the_file_system_of_a_folder_is_found() -> None:
    """The check above rests on it."""
    assert database.filesystem(Path("/proc/self")) == "proc"
    assert database.free_bytes(Path("/")) > 0
