"""values: the store's tables as numbered migrations: what is in this list is fixed, changes are appended to it.

STRICT tables, explicit indexes. ``results_by_line`` is D4 in the store: one end for each line. ``job`` is a job's
number, ``idx`` a line's index among its job's good lines; bad lines have minus their line number.
"""

from __future__ import annotations

import sqlite3

FIRST = """
CREATE TABLE broker (
    one INTEGER PRIMARY KEY CHECK (one = 1), store_id TEXT NOT NULL, incarnation INTEGER NOT NULL
) STRICT;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, name TEXT NOT NULL, status TEXT NOT NULL,
    size INTEGER NOT NULL, sha256 TEXT NOT NULL, lenient INTEGER NOT NULL, priority INTEGER NOT NULL,
    window_s INTEGER NOT NULL, model TEXT NOT NULL, created_at REAL NOT NULL, started_at REAL NOT NULL DEFAULT 0,
    ended_at REAL NOT NULL DEFAULT 0, checked_bytes INTEGER NOT NULL DEFAULT 0, lines_read INTEGER NOT NULL DEFAULT 0,
    good INTEGER NOT NULL DEFAULT 0, problems INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, bad_stored INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0, completion_tokens INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX jobs_by_status ON jobs (status);
CREATE TABLE models (
    job INTEGER NOT NULL, number INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (job, number), UNIQUE (job, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE lines (
    job INTEGER NOT NULL, idx INTEGER NOT NULL, line INTEGER NOT NULL, custom_id TEXT, model INTEGER NOT NULL,
    url INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0, held INTEGER NOT NULL DEFAULT 0, worker TEXT NOT NULL DEFAULT '',
    deaths INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (job, idx)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX lines_by_custom_id ON lines (job, custom_id) WHERE custom_id IS NOT NULL;
CREATE INDEX lines_assigned ON lines (job, idx) WHERE state = 1;
CREATE TABLE results (
    id INTEGER PRIMARY KEY, job INTEGER NOT NULL, idx INTEGER NOT NULL, kind INTEGER NOT NULL, seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL, status_code INTEGER NOT NULL, code TEXT NOT NULL, message TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, worker TEXT NOT NULL, stored_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX results_by_line ON results (job, idx);
CREATE UNIQUE INDEX results_in_order ON results (job, kind, seq);
CREATE TABLE attempts (
    job INTEGER NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL, worker TEXT NOT NULL, how TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (job, idx, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE problems (
    job INTEGER NOT NULL, line INTEGER NOT NULL, code TEXT NOT NULL, message TEXT NOT NULL, PRIMARY KEY (job, line)
) STRICT, WITHOUT ROWID;
CREATE TABLE sessions (
    worker TEXT PRIMARY KEY, user TEXT NOT NULL, incarnation INTEGER NOT NULL, login INTEGER NOT NULL,
    epoch INTEGER NOT NULL, state TEXT NOT NULL, at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE history (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, job TEXT NOT NULL, worker TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
CREATE INDEX history_by_job ON history (job);
"""


def _first(connection: sqlite3.Connection) -> None:
    for statement in FIRST.split(";"):
        if statement.strip():
            connection.execute(statement)


SECOND = """
CREATE TABLE doomed (number INTEGER PRIMARY KEY) STRICT;
CREATE TABLE deleted (id TEXT PRIMARY KEY, owner TEXT NOT NULL, at REAL NOT NULL) STRICT, WITHOUT ROWID;
"""
"""``deleted`` keeps the ids for good: a result of the old job must never be taken for one of a new job of that id.
``doomed`` are those whose rows are not all gone yet."""


def _second(connection: sqlite3.Connection) -> None:
    for statement in SECOND.split(";"):
        if statement.strip():
            connection.execute(statement)


def _third(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE jobs ADD COLUMN shift_s REAL NOT NULL DEFAULT 0")


def _fourth(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE results ADD COLUMN notes TEXT NOT NULL DEFAULT ''")


def _fifth(connection: sqlite3.Connection) -> None:
    """Lines of older stores have no key: they go where there is room, as they did."""
    connection.execute("ALTER TABLE lines ADD COLUMN prefix INTEGER NOT NULL DEFAULT 0")
    connection.execute("CREATE INDEX lines_by_prefix ON lines (job, prefix) WHERE prefix <> 0")


def _sixth(connection: sqlite3.Connection) -> None:
    """Jobs of older stores are for any url, as they were."""
    connection.execute("ALTER TABLE jobs ADD COLUMN url TEXT NOT NULL DEFAULT ''")


MIGRATIONS = (_first, _second, _third, _fourth, _fifth, _sixth)
"""Version N of the store is what the first N of these make."""
