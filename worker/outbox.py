"""shell: the worker's outbox (D1): finished results in SQLite, synced before anyone is told. Decides nothing.

Rows carry their store's id and leave only when the session says that the broker has them. The durable incarnation
counter and the running set (D5's evidence, unsynced) live here too. One connection, one thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import limits
from common.database import open_database, transaction, vacuum, wal_bytes
from common.errors import HaulierError, InvariantError, RefusedError
from common.ids import new_id
from common.messages import LineRef
from worker import effects as do
from worker.structures import Outcome, carried_bytes

FILE = "outbox.db"
VACUUM_PAGES = 64
WHAT = "the worker's outbox"


def _first(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE self (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID")
    connection.execute(
        "CREATE TABLE result (number INTEGER PRIMARY KEY, store TEXT NOT NULL, job TEXT NOT NULL,"
        " line INTEGER NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL, status_code INTEGER NOT NULL,"
        " prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, aside TEXT, body BLOB NOT NULL,"
        " UNIQUE (job, line, attempt)) STRICT"
    )
    connection.execute(
        "CREATE TABLE running (incarnation INTEGER NOT NULL, job TEXT NOT NULL, line INTEGER NOT NULL,"
        " attempt INTEGER NOT NULL, PRIMARY KEY (job, line, attempt)) STRICT, WITHOUT ROWID"
    )


def _aside_in_nobodys_way(connection: sqlite3.Connection) -> None:
    """A row set aside no longer stands in the way of a later answer to the same line (from another store)."""
    connection.execute("ALTER TABLE result RENAME TO former")
    connection.execute(
        "CREATE TABLE result (number INTEGER PRIMARY KEY, store TEXT NOT NULL, job TEXT NOT NULL,"
        " line INTEGER NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL, status_code INTEGER NOT NULL,"
        " prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, aside TEXT, body BLOB NOT NULL) STRICT"
    )
    connection.execute("INSERT INTO result SELECT * FROM former")
    connection.execute("DROP TABLE former")
    connection.execute("CREATE UNIQUE INDEX result_by_line ON result (job, line, attempt) WHERE aside IS NULL")


def _notes(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE result ADD COLUMN notes TEXT NOT NULL DEFAULT ''")


MIGRATIONS = (_first, _aside_in_nobodys_way, _notes)
_COLUMNS = "store, job, line, attempt, status, status_code, prompt_tokens, completion_tokens, body, notes"
_MARKS = ", ".join("?" * len(_COLUMNS.split(",")))
_WHERE = " WHERE job = ? AND line = ? AND attempt = ?"
_RESULT = _WHERE + " AND aside IS NULL"
Write = do.Save | do.Discard | do.SetAside | do.NoteRunning | do.NoteStopped
Row = tuple[LineRef, str, int]
"""A result waiting to be delivered: its line, its store, bytes on its way (``carried_bytes``)."""


class OutboxBlocked(HaulierError):
    """A commit failed for a reason of the world's (disk full, locked, input or output error): nothing was written."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an outbox holds at its start."""

    worker: str
    incarnation: int
    rows: tuple[Row, ...]
    aside: int
    """Results a broker refused: kept, never sent."""
    ran: tuple[LineRef, ...]
    """What the engine ran when the process before this one ended without saying so."""


class Outbox:
    """The outbox in ``folder``. Raises ``RefusedError`` when it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._database = open_database(self._path, MIGRATIONS, WHAT)
        self._connection = self._database.conn
        self._cache: OrderedDict[LineRef, Outcome] = OrderedDict()
        self._cached_bytes = 0
        self._noted: set[LineRef] = set()
        """What stands in the table of running lines."""
        self.commits = 0

    def begin(self) -> Found:
        """Start a new run of this worker: its incarnation is one above the last, durably, before anyone hears of it."""
        with self._failing(RefusedError):
            return self._begin()

    def _begin(self) -> Found:
        with transaction(self._database) as connection:
            known = dict(connection.execute("SELECT name, value FROM self").fetchall())
            worker = known.get("worker") or f"worker-{new_id()[:8]}"
            incarnation = int(known.get("incarnation", "0")) + 1
            pairs = [("worker", worker), ("incarnation", str(incarnation))]
            connection.executemany("INSERT OR REPLACE INTO self VALUES (?, ?)", pairs)
            ran = [LineRef(*row) for row in connection.execute("SELECT job, line, attempt FROM running")]
            connection.execute("DELETE FROM running")
        aside = self._connection.execute("SELECT count(*) FROM result WHERE aside IS NOT NULL").fetchone()[0]
        return Found(worker, incarnation, tuple(self.rows()), aside, tuple(ran))

    def rows(self) -> list[Row]:
        """All results to be delivered, oldest first."""
        query = "SELECT job, line, attempt, store, length(body), length(notes) FROM result"
        with self._failing(RefusedError):
            found = self._connection.execute(query + " WHERE aside IS NULL ORDER BY number")
            return [(LineRef(row[0], row[1], row[2]), row[3], carried_bytes(row[4], row[5])) for row in found]

    def write(self, effects: Sequence[Write], incarnation: int) -> None:
        """All of a turn's writes in one commit, synced if a result is among them. All or nothing.

        Raises ``OutboxBlocked`` when the disk does not take it; the caller keeps the effects and tries again.
        """
        synced = any(isinstance(effect, do.Save) for effect in effects)
        with self._failing(OutboxBlocked):
            self._connection.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
            with transaction(self._database) as connection:
                begun, over, gone = self._write(connection, effects, incarnation)
        self.commits += 1
        self._noted.difference_update(over)
        self._noted.update(begun)
        for ref in gone:
            self._forget(ref)
        for effect in effects:
            if type(effect) is do.Save:
                self._remember(effect.outcome)

    def _write(
        self, connection: sqlite3.Connection, batch: Sequence[Write], incarnation: int
    ) -> tuple[list[LineRef], set[LineRef], list[LineRef]]:
        """Within a transaction: what it adds to the running set, takes from it, and takes out of the results."""
        saves: list[tuple[Any, ...]] = []
        gone: list[LineRef] = []
        running: list[LineRef] = []
        over: set[LineRef] = set()
        aside: list[LineRef] = []
        for effect in batch:
            if isinstance(effect, do.Save):
                ref, *rest = effect.outcome  # the columns in order
                saves.append((effect.store_id, *ref, *rest))
                over.add(ref)
            elif isinstance(effect, do.Discard):
                gone += effect.refs
            elif isinstance(effect, do.NoteRunning):
                running += effect.refs
            elif isinstance(effect, do.NoteStopped):
                over.update(effect.refs)
            elif isinstance(effect, do.SetAside):
                connection.execute("UPDATE result SET aside = ?" + _RESULT, (effect.reason, *effect.ref))
                aside.append(effect.ref)
        begun = [ref for ref in running if ref not in over]
        connection.executemany("INSERT OR REPLACE INTO running VALUES (?, ?, ?, ?)", [(incarnation, *r) for r in begun])
        connection.executemany(f"INSERT OR IGNORE INTO result ({_COLUMNS}) VALUES ({_MARKS})", saves)
        _delete(connection, "running", over & self._noted)
        _delete(connection, "result", gone, " AND aside IS NULL")
        return begun, over, gone + aside

    def read(self, refs: Iterable[LineRef]) -> list[Outcome]:
        """These results, in order. Raises ``InvariantError`` for one that is not there."""
        return [self._cache.get(ref) or self._load(ref) for ref in refs]

    def _load(self, ref: LineRef) -> Outcome:
        query = "SELECT status, status_code, prompt_tokens, completion_tokens, body, notes FROM result"
        with self._failing(RefusedError):
            row = self._connection.execute(query + _RESULT, ref).fetchone()
        if row is None:
            raise InvariantError(f"the outbox has no result of {ref.line}, attempt {ref.attempt}")
        outcome = Outcome(ref, *row)
        self._remember(outcome)
        return outcome

    def adopt(self, other: Outbox) -> int:
        """Move the results of a dead worker's outbox here: durable here before they go there. How many.

        A line answered here already for another store keeps both answers: the orphan's stays where it is, set aside.
        """
        with other._failing(RefusedError):
            return self._adopt(other)

    def _adopt(self, other: Outbox) -> int:
        query = f"SELECT {_COLUMNS} FROM result WHERE aside IS NULL ORDER BY number"
        rows = other._connection.execute(query).fetchall()
        if not rows:
            return 0
        self._connection.execute("PRAGMA synchronous=FULL")
        with transaction(self._database) as connection:
            connection.executemany(f"INSERT OR IGNORE INTO result ({_COLUMNS}) VALUES ({_MARKS})", rows)
        here = {(store, *ref) for ref, store, _ in self.rows()}
        moved = [row[1:4] for row in rows if row[:4] in here]
        staying = [row[1:4] for row in rows if row[:4] not in here]
        with transaction(other._database) as connection:
            connection.executemany("DELETE FROM result" + _RESULT, moved)
            connection.executemany("UPDATE result SET aside = 'answered for another store'" + _RESULT, staying)
        return len(moved)

    def tidy(self) -> None:
        """When there is nothing else to do: fold the log into the file and give free pages back."""
        with self._failing(OutboxBlocked):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            vacuum(self._connection, VACUUM_PAGES)

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        return wal_bytes(self._path)

    def leave(self) -> None:
        """This run ends in order: whatever it still ran is nobody's fault (D5). Raises ``OutboxBlocked``."""
        try:
            with transaction(self._database) as connection:
                connection.execute("DELETE FROM running")
        except sqlite3.Error as failure:
            raise OutboxBlocked(f"{WHAT} at {self._path} cannot be written: {failure}") from failure

    def close(self) -> None:
        """Close the file; what was committed stays."""
        self._connection.close()

    @contextlib.contextmanager
    def _failing(self, may_pass: type[HaulierError]) -> Iterator[None]:
        """What the block's statements fail with, as errors of ours: ``may_pass`` for what the disk or a lock did to
        them, ``RefusedError`` for damage, with what to do."""
        try:
            yield
        except sqlite3.OperationalError as failure:
            words = f"{WHAT} at {self._path} cannot be used: {failure}; look after the disk of --state"
            raise may_pass(words) from failure
        except sqlite3.Error as failure:
            words = f"{WHAT} at {self._path} is damaged: {failure}; restore it, or move --state"
            raise RefusedError(words) from failure

    # -- cache --------------------------------------------------------------------------------------------------

    def _remember(self, outcome: Outcome) -> None:
        size = outcome.size
        if outcome.ref in self._cache or size > limits.OUTBOX_CACHE_MAX_BYTES:
            return
        self._cache[outcome.ref] = outcome
        self._cached_bytes += size
        while self._cached_bytes > limits.OUTBOX_CACHE_MAX_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.size

    def _forget(self, ref: LineRef) -> None:
        dropped = self._cache.pop(ref, None)
        if dropped is not None:
            self._cached_bytes -= dropped.size


def _delete(connection: sqlite3.Connection, table: str, refs: Iterable[LineRef], but: str = "") -> None:
    """The rows of these: one statement for all of one job and attempt, which is nearly always all of them."""
    groups: dict[tuple[str, int], list[str]] = {}
    for job, line, attempt in refs:
        groups.setdefault((job, attempt), []).append(str(line))
    for (job, attempt), lines in groups.items():
        connection.execute(
            f"DELETE FROM {table} WHERE job = ? AND attempt = ? AND line IN (SELECT value FROM json_each(?)){but}",
            (job, attempt, f"[{','.join(lines)}]"),
        )
