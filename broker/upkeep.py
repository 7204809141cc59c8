"""shell: what a store needs to stay healthy and small: retention, deletion in slices, vacuum, checkpoints, a check.

Home of retention: a job that was deleted, or that ended longer ago than ``--keep``, is gone for everybody at once, and
its rows go in slices of a turn; old logins go too. The check for damage (D6) runs beside the work. Knows no message.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import structlog

from broker.inputs import Now
from broker.reader import Question, Reader
from broker.state import CLOSED
from broker.store import damaged, drop_job
from common import limits
from common.database import vacuum, wal_bytes

log = structlog.get_logger(room="broker.upkeep")
_TABLES = "SELECT name FROM sqlite_schema WHERE type='table' AND name NOT LIKE 'sqlite_%'"
_RESULTS = "SELECT id, length(body) FROM results WHERE job=? LIMIT ?"
_OLD_LOGINS = (
    "DELETE FROM history WHERE id IN (SELECT id FROM history WHERE job='' AND id <= "
    "(SELECT max(id) FROM history) - ? ORDER BY id LIMIT ?)"
)
_SLICES = (
    "DELETE FROM attempts WHERE job=?1 AND (idx, attempt) IN "
    "(SELECT idx, attempt FROM attempts WHERE job=?1 ORDER BY idx, attempt LIMIT ?2)",
    "DELETE FROM problems WHERE job=?1 AND line IN (SELECT line FROM problems WHERE job=?1 ORDER BY line LIMIT ?2)",
    "DELETE FROM lines WHERE job=?1 AND idx IN (SELECT idx FROM lines WHERE job=?1 ORDER BY idx LIMIT ?2)",
    "DELETE FROM models WHERE job=?1 AND number IN (SELECT number FROM models WHERE job=?1 LIMIT ?2)",
)


class Upkeep:
    """The broker's housekeeping. ``checker`` reads the whole file once; its thread ends with it. One thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path, keep_s: int, checker: Reader | None = None) -> None:
        self._db, self._path, self._keep_s, self._checker = connection, path, keep_s, checker
        self._look_at = self._offset = 0.0
        self._doomed = self._next_doomed()
        self._quiet_since: float | None = None
        self._tidied = False
        if checker is not None:
            checker.ask("tables", lambda db: [row[0] for row in db.execute(_TABLES)])

    @property
    def busy(self) -> bool:
        """Whether rows of deleted jobs are left."""
        return self._doomed is not None

    # -- within the turn's transaction --------------------------------------------------------------------------

    def within_turn(self, now: Now) -> None:
        """Jobs that are kept no longer, and a slice of the rows of deleted ones."""
        if now.mono >= self._look_at:
            self._look_at = now.mono + limits.RETENTION_LOOK_S
            if self._keep_s and self._trusts(now):
                self._retire(now)
            self._db.execute(_OLD_LOGINS, (limits.HISTORY_KEPT_MAX_COUNT, limits.DELETE_ROWS_A_TURN))
            self._doomed = self._doomed or self._next_doomed()
        if self._doomed is not None and self._slice(self._doomed):
            self._db.execute("DELETE FROM doomed WHERE number=?", (self._doomed,))
            log.info("job_rows_deleted", job_number=self._doomed)
            self._doomed = self._next_doomed()

    def deleted(self) -> None:
        """A job was deleted in this turn."""
        self._look_at = 0.0

    def _trusts(self, now: Now) -> bool:
        """Whether the wall clock went with the other one since the start: nothing is deleted for a clock's jump."""
        jump = now.wall - now.mono - self._offset if self._offset else 0.0
        self._offset = self._offset or now.wall - now.mono
        if abs(jump) >= limits.CLOCK_JUMP_S:
            log.warning("retention_waits", clock_jumped_s=round(jump), until="the next start of this broker")
        return abs(jump) < limits.CLOCK_JUMP_S

    def _retire(self, now: Now) -> None:
        marks = ",".join("?" * len(CLOSED))
        rows = self._db.execute(
            f"SELECT id FROM jobs WHERE status IN ({marks}) AND ended_at > 0 AND ended_at < ? LIMIT ?",
            (*CLOSED, now.wall - self._keep_s, limits.PAGE_MAX_COUNT),
        ).fetchall()
        for (job,) in rows:
            drop_job(self._db, job, now.wall)
            self._db.execute(
                "INSERT INTO history (at, kind, job, worker, detail) VALUES (?, 'retired', ?, '', ?)",
                (now.wall, job, f"ended more than {self._keep_s} s ago"),
            )
            log.info("job_retired", job=job, keep_s=self._keep_s)

    def _next_doomed(self) -> int | None:
        row = self._db.execute("SELECT min(number) FROM doomed").fetchone()
        return None if row[0] is None else int(row[0])

    def _slice(self, number: int) -> bool:
        """Delete some rows of a job; whether these were the last."""
        left = limits.DELETE_ROWS_A_TURN
        size = 0
        rows = []
        for row, length in self._db.execute(_RESULTS, (number, left)):
            rows.append((row,))
            size += length
            if size > limits.DELETE_BYTES_A_TURN:
                break
        self._db.executemany("DELETE FROM results WHERE id=?", rows)
        left = 0 if size > limits.DELETE_BYTES_A_TURN else left - len(rows)
        for statement in _SLICES:
            if left <= 0:
                return False
            left -= self._db.execute(statement, (number, left)).rowcount
        return left > 0

    # -- between turns ------------------------------------------------------------------------------------------

    def between_turns(self, now: Now, quiet: bool) -> None:
        """Look at the check's findings; when nothing else happens, give pages back and fold the log into the file.

        Raises ``RefusedError`` when the file is damaged.
        """
        self._look_at_findings()
        if not quiet or self.busy:
            self._quiet_since, self._tidied = None, False
        elif self._quiet_since is None:
            self._quiet_since = now.mono
        elif now.mono - self._quiet_since >= limits.TIDY_AFTER_S and not self._tidied:
            self._tidied = not self._tidy()

    def _tidy(self) -> bool:
        """Whether there is more to do. Waits for nobody: who reads the store now is left alone."""
        self._db.execute("PRAGMA busy_timeout=0")
        try:
            if self._db.execute("PRAGMA freelist_count").fetchone()[0]:
                vacuum(self._db, limits.VACUUM_PAGES_A_TURN)
                return True
            if wal_bytes(self._path):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.OperationalError as error:  # a full disk, or a reader in the way: nothing depends on it
            log.info("upkeep_put_off", reason=str(error))
        except sqlite3.DatabaseError as error:
            raise damaged(self._path, str(error)) from error
        finally:
            self._db.execute(f"PRAGMA busy_timeout={limits.STORE_BUSY_MS}")
        return False

    def _look_at_findings(self) -> None:
        if self._checker is None:
            return
        for tag, found in self._checker.answers():
            if isinstance(found, sqlite3.Error):
                raise damaged(self._path, str(found))
            if tag == "tables":
                for table in found:
                    self._checker.ask(table, _check(table))
            elif found != "ok":
                raise damaged(self._path, f"table {tag}: {found}")
        if not self._checker.open:
            log.info("store_checked", found="ok")
            self._checker.close()
            self._checker = None

    def close(self) -> None:
        """End the check, if it still runs."""
        if self._checker is not None:
            self._checker.close()
            self._checker = None


def _check(table: str) -> Question:
    return lambda db: db.execute(f"PRAGMA quick_check('{table}')").fetchone()[0]
