"""shell: reads sealed input files slice by slice, has each line checked, and puts lines and problems into the store.

A slice is one turn's work, so that beats go on while a large file is read, and no file is ever held in memory. The
file's sha256 is taken along. Knows the store's tables of lines; the rules for one line are ``common.openai_lines``'.
"""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any

from broker.inputs import Checked
from broker.spool import RawLine, Spool
from broker.state import ENDED, WAITING, Job
from broker.store import Store
from common import limits
from common.messages import Problem
from common.openai_lines import BOM, URLS, Bad, Entry, check, is_blank, too_long
from common.prefixes import NO_KEY

_INSERT = (
    "INSERT OR IGNORE INTO lines (job, idx, line, custom_id, model, url, offset, size, state, prefix) "
    "VALUES (?,?,?,?,?,?,?,?,?,?)"
)
_RESULT = (
    "INSERT INTO results (job, idx, kind, seq, attempt, status_code, code, message, prompt_tokens, completion_tokens, "
    "worker, body, stored_at) VALUES (?,?,1,?,0,0,?,?,0,0,'',x'',?)"
)


class _Count:
    """What one slice adds to its job."""

    def __init__(self) -> None:
        self.lines = self.good = self.problems = self.bad_stored = 0
        self.models: list[str] = []
        self.first: Problem | None = None


class Intake:
    """Checks the input of jobs that are ``validating``. One thread, within the store's ``turn``."""

    def __init__(self, store: Store, spool: Spool) -> None:
        self._store = store
        self._spool = spool
        self._hashes: dict[str, tuple[Any, int]] = {}

    def step(self, job: Job, wall: float) -> Checked | None:
        """Check the next slice of a job. None when the turn went into hashing what was checked before a restart."""
        digest, hashed = self._hashes.get(job.id, (hashlib.sha256(), 0))
        if hashed < job.checked_bytes:
            size = min(limits.VALIDATE_BYTES_A_TURN, job.checked_bytes - hashed)
            digest.update(self._spool.read(job.id, hashed, size))
            self._hashes[job.id] = (digest, hashed + size)
            return None
        piece = self._spool.slice(
            job.id, job.checked_bytes, job.size, limits.VALIDATE_LINES_A_TURN, limits.VALIDATE_BYTES_A_TURN
        )
        for at in range(job.checked_bytes, piece.end, limits.VALIDATE_BYTES_A_TURN):
            size = min(limits.VALIDATE_BYTES_A_TURN, piece.end - at)
            digest.update(self._spool.read(job.id, at, size))
        self._hashes[job.id] = (digest, piece.end)
        count = _Count()
        for line in piece.lines:
            self._line(job, line, count, wall)
        if piece.last:
            del self._hashes[job.id]
        return Checked(
            job.id, count.lines, count.good, count.problems, count.bad_stored, tuple(count.models), piece.end,
            piece.last, digest.hexdigest() == job.sha256, count.first,
        )  # fmt: skip

    def forget(self, job: str) -> None:
        """The job ended before its file was read whole."""
        self._hashes.pop(job, None)

    def _line(self, job: Job, line: RawLine, count: _Count, wall: float) -> None:
        count.lines += 1
        number = job.lines_read + count.lines
        if line.raw is None:
            self._bad(job, number, too_long(line.size), count, wall)
            return
        raw, offset = line.raw, line.offset
        if offset == 0 and raw.startswith(BOM):
            raw, offset = raw[len(BOM) :], len(BOM)
        if is_blank(raw):
            return
        found = check(raw, job.model, job.url)
        if isinstance(found, Entry):
            found = self._good(job, number, offset, found, count)
        if isinstance(found, Bad):
            self._bad(job, number, found, count, wall)

    def _good(self, job: Job, number: int, offset: int, entry: Entry, count: _Count) -> Entry | Bad:
        """Take a good line into the store, unless only the whole file shows what is wrong with it."""
        models = self._store.models(job.number)
        model = models.get(entry.model)
        if model is None:
            if len(models) >= limits.MODELS_A_JOB_MAX_COUNT:
                most = limits.MODELS_A_JOB_MAX_COUNT
                return Bad("too_many_models", f"the file names more than {most} models", entry.custom_id)
            model = models[entry.model] = len(models)
            self._db.execute("INSERT INTO models VALUES (?,?,?)", (job.number, model, entry.model))
            count.models.append(entry.model)
        row = (
            job.number, job.good + count.good, number, entry.custom_id, model, URLS.index(entry.url),
            offset + entry.start, entry.end - entry.start, WAITING, entry.prefix,
        )  # fmt: skip
        if self._db.execute(_INSERT, row).rowcount == 0:
            return self._duplicate(job, entry.custom_id)
        count.good += 1
        return entry

    def _duplicate(self, job: Job, custom_id: str) -> Bad:
        former = self._db.execute(
            "SELECT line FROM lines WHERE job=? AND custom_id=?", (job.number, custom_id)
        ).fetchone()[0]
        return Bad("duplicate_custom_id", f"custom_id {custom_id!r} stands in line {former} already")

    def _bad(self, job: Job, number: int, bad: Bad, count: _Count, wall: float) -> None:
        """Keep a problem. Its custom_id, where it can be read, is taken: each appears once in what comes out (D4)."""
        message = bad.message[: limits.REASON_MAX_CHARS]
        count.problems += 1
        if count.first is None:
            count.first = Problem(number, bad.code, message)
        if job.problems + count.problems <= limits.PROBLEMS_LISTED_MAX_COUNT:
            self._db.execute("INSERT INTO problems VALUES (?,?,?,?)", (job.number, number, bad.code, message))
        row = (job.number, -number, number, bad.custom_id or None, 0, 0, 0, 0, ENDED, NO_KEY)
        if self._db.execute(_INSERT, row).rowcount == 0:  # the custom_id belongs to another line
            self._db.execute(_INSERT, (*row[:3], None, *row[4:]))
        if job.lenient:
            place = job.failed + count.bad_stored
            self._db.execute(_RESULT, (job.number, -number, place, bad.code, f"line {number}: {message}", wall))
            count.bad_stored += 1

    @property
    def _db(self) -> sqlite3.Connection:
        return self._store.connection
