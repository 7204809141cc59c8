"""shell: the broker's store (D1, D3, D4): writes of a turn in one synced commit, and what is read back at a start.

Every commit checks the incarnation row: another broker that took over makes this one stop with nothing said. A line
ends once: the store's own unique index refuses a second end. Knows no rule: it does as its writes say. One thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlite_utils

from broker import effects as do
from broker.inputs import ClosedJob, Now
from broker.jobs import cut_short
from broker.schema import MIGRATIONS
from broker.state import ENDED, OPEN, WAITING, Fact, Job, KnownWorker, Line, State, Window
from common import limits
from common.database import is_full, open_database, transaction, wal_bytes
from common.errors import DiskFullError, InvariantError, RefusedError
from common.ids import LineId, new_id
from common.messages import LineRef
from common.openai_lines import URLS

WHAT = "the broker's store"
WORKED = "endpoint"
"""A file that lies beside a store that was in use: without it an empty file is a start that was cut off."""
LINE = "idx, url, model, offset, size, attempt, held, worker, deaths, prefix"
"""Columns of a ``Line``, in the order ``_line`` reads them."""
JOB = (
    "id", "number", "owner", "name", "size", "sha256", "lenient", "priority", "window_s", "model", "created_at",
    "status", "started_at", "ended_at", "checked_bytes", "lines_read", "good", "problems", "completed", "failed",
    "bad_stored", "prompt_tokens", "completion_tokens", "reason", "shift_s", "url",
)  # fmt: skip
"""Columns of a job's row, named as the fields of ``Job``."""
_SQL: dict[type, str] = {
    do.AssignLine: "UPDATE lines SET state=1, attempt=?, held=?, worker=? WHERE job=? AND idx BETWEEN ? AND ? "
    "AND state<2",
    do.ReturnLine: "UPDATE lines SET state=0, held=0, worker='', deaths=? WHERE job=? AND idx=? AND state=1",
    do.CountDeath: "UPDATE lines SET deaths=? WHERE job=? AND idx=?",
    do.EndAttempt: "INSERT OR REPLACE INTO attempts (job, idx, attempt, worker, how, at) VALUES (?,?,?,?,?,?)",
    do.StoreResult: "INSERT INTO results (job, idx, kind, seq, attempt, status_code, code, message, prompt_tokens, "
    "completion_tokens, worker, body, stored_at, notes) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
    do.SaveSession: "INSERT OR REPLACE INTO sessions (worker, user, incarnation, login, epoch, state, at) "
    "VALUES (?,?,?,?,?,?,?)",
    do.ForgetWorker: "DELETE FROM sessions WHERE worker=?",
    do.History: "INSERT INTO history (at, kind, job, worker, detail) VALUES (?,?,?,?,?)",
}
_NEXT_JOB = "SELECT max((SELECT coalesce(max(number), 0) FROM jobs), (SELECT coalesce(max(number), 0) FROM doomed)) + 1"
_END_LINES = "UPDATE lines SET state=2 WHERE job=? AND idx BETWEEN ? AND ? AND state<2"


class Store:
    """One open store. ``incarnation`` is this broker's run, given by ``take_over``."""

    def __init__(self, database: sqlite_utils.Database, path: Path = Path()) -> None:
        self.database, self.path = database, path
        self.connection: sqlite3.Connection = database.conn
        self.store_id = ""
        self.incarnation = 0
        self._models: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._end_from: dict[int, int] = {}

    @classmethod
    def open(cls, path: Path) -> Store:
        """Raises ``RefusedError``, or ``DiskFullError`` when there is no room to write."""
        if path.exists() and path.stat().st_size == 0 and not wal_bytes(path) and any(path.parent.glob(WORKED)):
            raise damaged(path, "the file is empty, and a broker has worked in this folder")
        return cls(open_database(path, MIGRATIONS, WHAT), path)

    def take_over(self, chance: Callable[[], str] = new_id) -> None:
        """Become the broker of this store: any other that still writes to it stops at its next commit."""
        with self.failing(), transaction(self.database) as connection:
            connection.execute("INSERT OR IGNORE INTO broker VALUES (1, ?, 0)", (chance(),))
            connection.execute("UPDATE broker SET incarnation = incarnation + 1")
            row = connection.execute("SELECT store_id, incarnation FROM broker").fetchone()
        self.store_id, self.incarnation = row

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """All writes of the block in one synced commit, or none.

        Raises ``DiskFullError`` when there was no room, and ``RefusedError`` if another broker took over or the file
        cannot be used: what the rules decided in this turn is then in memory alone, and must not be said to anybody.
        """
        with self.failing(), transaction(self.database):
            yield
            self.check_incarnation()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Failures of the block's statements, reads too, as the errors that say what to do about them (D6)."""
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise InvariantError(f"the store refuses a write: {error}") from error
        except sqlite3.Error as error:
            raise unusable(self.path, error) from error

    def check_incarnation(self) -> None:
        found = self.connection.execute("SELECT incarnation FROM broker").fetchone()[0]
        if found != self.incarnation:
            raise RefusedError(f"another broker took this store over (run {found}; this was run {self.incarnation})")

    # -- writes -------------------------------------------------------------------------------------------------

    def apply(self, writes: Sequence[do.Write]) -> None:
        """Within ``turn``: do as the rules decided. Files are the spool's, the rest is here."""
        for kind, run in groupby(writes, key=type):
            rows: list[Any] = list(run)
            if kind is do.NewJob or kind is do.SaveJob:
                for row in rows:
                    self._save_job(row.job)
            elif kind is do.StoreResult:
                self.connection.executemany(_SQL[kind], rows)
                ended = self.connection.executemany(_END_LINES, runs([(row.job, row.idx) for row in rows]))
                if ended.rowcount != len(rows):
                    raise InvariantError(f"{len(rows)} results for {ended.rowcount} lines that had none")
            elif kind is do.DropJob:
                for row in rows:
                    drop_job(self.connection, row.job, row.at)
            elif kind is do.AssignLine:
                self.connection.executemany(_SQL[kind], runs(rows))
            elif kind in _SQL:
                self.connection.executemany(_SQL[kind], rows)

    def _save_job(self, job: Job) -> None:
        values = [getattr(job, name) for name in JOB]
        marks = ",".join("?" * len(JOB))
        updates = ", ".join(f"{name}=excluded.{name}" for name in JOB[2:])
        self.connection.execute(
            f"INSERT INTO jobs ({','.join(JOB)}) VALUES ({marks}) ON CONFLICT (number) DO UPDATE SET {updates}", values
        )

    def end_waiting(self, job: Job, code: str, words: str, count: int, at: float) -> tuple[int, bool]:
        """Up to ``count`` waiting lines of ``job`` get their error line: how many, and whether more wait.

        ``words``: what ended (``jobs.cut_short``)."""
        start = self._end_from.get(job.number, 0)
        rows = self.connection.execute(
            "SELECT idx, attempt FROM lines WHERE job=? AND idx>=? AND state=? ORDER BY idx LIMIT ?",
            (job.number, start, WAITING, count),
        ).fetchall()
        results = [
            (job.number, idx, 1, job.failed + place, attempt, 0, code, cut_short(words, attempt), 0, 0, "", b"", at, "")
            for place, (idx, attempt) in enumerate(rows)
        ]
        self.connection.executemany(_SQL[do.StoreResult], results)
        self.connection.executemany(_END_LINES, runs([(job.number, idx) for idx, _ in rows]))
        full = len(rows) == count
        if full:
            self._end_from[job.number] = rows[-1][0] + 1
        else:
            self._end_from.pop(job.number, None)
        return len(rows), full or start > 0

    # -- reads --------------------------------------------------------------------------------------------------

    def load(self, now: Now, grace_s: float) -> State:
        """What a broker must know at its start: open jobs, lines that somebody may still hold, workers' last logins."""
        state = State(self.store_id, self.incarnation)
        one = self.connection.execute
        state.next_job = one(_NEXT_JOB).fetchone()[0]
        for row in one("SELECT worker, user, incarnation, login, epoch FROM sessions ORDER BY at, worker"):
            state.known[row[0]] = KnownWorker(*row[1:])
        state.next_epoch = 1 + max((known.epoch for known in state.known.values()), default=0)
        marks = ",".join("?" * len(OPEN))
        for row in one(f"SELECT {','.join(JOB)} FROM jobs WHERE status IN ({marks}) ORDER BY number", OPEN):
            job = job_of(row)
            job.heard_at = now.mono
            if job.window_s:
                job.deadline = max(now.mono + 1e-9, now.mono + job.expires_at - now.wall)
            if job.status in ("validating", "in_progress"):
                for model in self.models(job.number):
                    job.windows[model] = Window(model)
            state.jobs[job.id] = job
            for found in one(f"SELECT {LINE} FROM lines WHERE job=? AND state=1", (job.number,)):
                line = _line(list(self.models(job.number)), found)
                job.assigned[line.index] = line
                state.absent.add(line.worker)
        state.grace_until = now.mono + grace_s if state.absent else 0.0
        return state

    def models(self, job: int) -> dict[str, int]:
        """Names of the models a job's lines ask for, with their numbers in its rows: 0, 1, 2... in order."""
        found = self._models.get(job)
        if found is None:
            rows = self.connection.execute("SELECT name, number FROM models WHERE job=? ORDER BY number", (job,))
            found = self._models[job] = dict(rows.fetchall())
            if len(self._models) > limits.MODEL_LISTS_KEPT_MAX_COUNT:
                self._models.popitem(last=False)
        return found

    def window(self, job: int, model: str, cursor: int, count: int) -> tuple[tuple[Line, ...], int, bool]:
        """Waiting lines from index ``cursor`` on, where the next ones begin, and whether these were the last."""
        rows = self.connection.execute(
            f"SELECT {LINE} FROM lines WHERE job=? AND idx>=? AND state=? AND model=? ORDER BY idx LIMIT ?",
            (job, cursor, WAITING, self.models(job)[model], count),
        ).fetchall()
        names = list(self.models(job))
        lines = tuple(_line(names, row) for row in rows)
        return lines, lines[-1].index + 1 if lines else cursor, len(lines) < count

    def facts(self, refs: Sequence[LineRef], state: State) -> dict[LineId, Fact | None]:
        """What is stored about these lines, writes of this turn included."""
        numbers: dict[str, int | None] = {}
        found: dict[LineId, Fact | None] = {}
        for ref in refs:
            if ref.job not in numbers:
                job = state.jobs.get(ref.job)
                numbers[ref.job] = job.number if job is not None else self._number(ref.job)
            found[ref.line] = self._fact(numbers[ref.job], ref.index)
        return found

    def _number(self, job: str) -> int | None:
        row = self.connection.execute("SELECT number FROM jobs WHERE id=?", (job,)).fetchone()
        return None if row is None else int(row[0])

    def _fact(self, number: int | None, index: int) -> Fact | None:
        if number is None:
            return None
        row = self.connection.execute(
            f"SELECT {LINE}, state FROM lines WHERE job=? AND idx=?", (number, index)
        ).fetchone()
        if row is None:
            return None
        result = None
        if row[-1] == ENDED:
            result = self.connection.execute(
                "SELECT attempt FROM results WHERE job=? AND idx=? AND code=''", (number, index)
            ).fetchone()
        return Fact(number, row[-1], _line(list(self.models(number)), row), result[0] if result else 0)

    def closed_job(self, job: str) -> ClosedJob | None:
        """What a repeated submit must agree with."""
        row = self.connection.execute(
            "SELECT owner, size, sha256, good + problems FROM jobs WHERE id=?", (job,)
        ).fetchone()
        if row is not None:
            return ClosedJob(*row)
        row = self.connection.execute("SELECT owner FROM deleted WHERE id=?", (job,)).fetchone()
        return None if row is None else ClosedJob(row[0], 0, "", deleted=True)

    def close(self) -> None:
        self.connection.close()


def unusable(path: Path, error: sqlite3.Error) -> RefusedError:
    """What to do about a store that fails."""
    said = f"{WHAT} at {path} cannot be written: {error}; nothing of this turn was acknowledged"
    if is_full(error, path.parent):
        return DiskFullError(f"{said}. Free some space on its disk")
    if isinstance(error, sqlite3.OperationalError):
        return RefusedError(f"{said}. Look after the disk of --state, and start the broker again")
    return damaged(path, str(error))


def damaged(path: Path, found: str) -> RefusedError:
    """What to do about a store that is not whole."""
    return RefusedError(
        f"{WHAT} at {path} is damaged: {' '.join(found.split())[:500]}; nothing more is acknowledged. Restore the "
        "whole --state folder from a copy, or rescue what can be read with sqlite3's .recover, or start with an empty "
        "--state: workers keep what they finished until a broker takes it"
    )


def runs(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows that end with a line's index, with neighbours that differ in it alone, by one, made one: first and last.

    Lines mostly go out and come back in order, and one statement for many costs a third of one each.
    """
    found: list[tuple[Any, ...]] = []
    first = last = -1
    head: tuple[Any, ...] = ()
    for row in rows:
        index = row[-1]
        if index == last + 1 and row[:-1] == head and found:
            found[-1] = (*head, first, index)
        else:
            head, first = row[:-1], index
            found.append((*head, index, index))
        last = index
    return found


def _line(models: Sequence[str], row: Sequence[Any]) -> Line:
    index, url, model, offset, size, attempt, held, worker, deaths, prefix = row[:10]
    return Line(index, URLS[url], models[model], offset, size, attempt, held, worker, None, deaths, prefix=prefix)


def drop_job(connection: sqlite3.Connection, job: str, at: float) -> None:
    """A closed job is gone for everybody; its rows are left for ``upkeep``, its id is never used again."""
    connection.execute("INSERT INTO deleted SELECT id, owner, ? FROM jobs WHERE id=?", (at, job))
    connection.execute("INSERT INTO doomed SELECT number FROM jobs WHERE id=?", (job,))
    connection.execute("DELETE FROM jobs WHERE id=?", (job,))


def job_of(row: Sequence[Any]) -> Job:
    """A job from the columns ``JOB``."""
    values = dict(zip(JOB, row, strict=True))
    values["lenient"] = bool(values["lenient"])
    return Job(**values)
