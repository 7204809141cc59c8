"""The broker's real store over SQLite in memory, with what the simulator asks of any store."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import sqlite_utils

from broker.schema import MIGRATIONS
from broker.state import Job
from broker.store import JOB, Store
from common.openai_lines import URLS
from tests.simulation.memory_store import Row


def new_connection() -> sqlite3.Connection:
    """An empty store's database; as a disk does, it outlives the broker."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for migration in MIGRATIONS:
        migration(connection)
    return connection


def insert_job(connection: sqlite3.Connection, job: Job, rows: Sequence[Row]) -> None:
    """A job that has passed its checks, with its lines waiting."""
    marks = ",".join("?" * len(JOB))
    connection.execute(f"INSERT INTO jobs ({','.join(JOB)}) VALUES ({marks})", [getattr(job, name) for name in JOB])
    names = list(dict.fromkeys(row.model for row in rows))
    for number, name in enumerate(names):
        connection.execute("INSERT INTO models VALUES (?,?,?)", (job.number, number, name))
    for row in rows:
        connection.execute(
            "INSERT INTO lines (job, idx, line, custom_id, model, url, offset, size, prefix) "
            "VALUES (?,?,?,?,?,?,?,?,?)",
            (job.number, row.idx, row.idx + 1, f"c{row.idx}", names.index(row.model), URLS.index(row.url), row.offset,
             row.size, row.prefix),
        )  # fmt: skip


class SqliteStore(Store):
    """The real one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(sqlite_utils.Database(connection))

    def has_result(self, job: str, index: int) -> bool:
        query = "SELECT 1 FROM results r JOIN jobs j ON j.number=r.job WHERE j.id=? AND r.idx=?"
        return self.connection.execute(query, (job, index)).fetchone() is not None

    def dump(self) -> dict[str, Any]:
        one = self.connection.execute
        jobs = [(*row[: JOB.index("lenient")], bool(row[JOB.index("lenient")]), *row[JOB.index("lenient") + 1 :])
                for row in one(f"SELECT {','.join(JOB)} FROM jobs")]  # fmt: skip
        lines = [
            (row[0], row[1], URLS[row[2]], *row[3:])
            for row in one(
                "SELECT l.job, idx, url, m.name, offset, size, attempt, held, worker, deaths, prefix, state "
                "FROM lines l JOIN models m ON m.job=l.job AND m.number=l.model"
            )
        ]
        return {
            "jobs": sorted(jobs),
            "lines": sorted(lines),
            "results": sorted(one(
                "SELECT job, idx, kind, seq, attempt, status_code, code, message, prompt_tokens, completion_tokens, "
                "worker, body, stored_at, notes FROM results"
            ).fetchall()),
            "attempts": sorted(one("SELECT job, idx, attempt, worker, how, at FROM attempts").fetchall()),
            "sessions": sorted(
                one("SELECT worker, user, incarnation, login, epoch, state, at FROM sessions").fetchall()
            ),
        }  # fmt: skip
