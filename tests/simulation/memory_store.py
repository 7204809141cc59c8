"""The broker's store as dicts: the same writes, the same reads, the same refusals, and a roll-back, without SQLite.

So that ten thousand schedules fit into a CI run. ``dump`` gives every table as plain values: the simulator plays a
sample of its schedules on this and on SQLite, and both must hold the same rows at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker import effects as do
from broker.inputs import ClosedJob, Now
from broker.jobs import cut_short
from broker.state import ENDED, OPEN, WAITING, Fact, Job, KnownWorker, Line, State, Window
from broker.store import JOB, job_of
from common.errors import InvariantError, RefusedError
from common.ids import LineId
from common.messages import LineRef

_ABSENT = object()


class Row(NamedTuple):
    """A line's row."""

    idx: int
    url: str
    model: str
    offset: int
    size: int
    attempt: int = 0
    held: int = 0
    worker: str = ""
    deaths: int = 0
    prefix: int = 0
    state: int = WAITING


@dataclass
class MemoryDisk:
    """What outlives a broker."""

    store_id: str = ""
    incarnation: int = 0
    jobs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    models: dict[int, dict[str, int]] = field(default_factory=dict)
    lines: dict[int, dict[int, Row]] = field(default_factory=dict)
    results: dict[tuple[int, int], do.StoreResult] = field(default_factory=dict)
    places: dict[tuple[int, int, int], int] = field(default_factory=dict)
    attempts: dict[tuple[int, int, int], do.EndAttempt] = field(default_factory=dict)
    sessions: dict[str, do.SaveSession] = field(default_factory=dict)


class MemoryStore:
    """What ``broker.store.Store`` is to its server, over a ``MemoryDisk``."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.store_id = ""
        self.incarnation = 0
        self._end_from: dict[int, int] = {}
        self._undo: list[tuple[dict[Any, Any], Any, Any]] = []

    def take_over(self, chance: Callable[[], str]) -> None:
        disk = self.disk
        disk.store_id = disk.store_id or chance()
        disk.incarnation += 1
        self.store_id, self.incarnation = disk.store_id, disk.incarnation

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._undo.clear()
        try:
            yield
            self.check_incarnation()
        except BaseException:
            for table, key, old in reversed(self._undo):
                if old is _ABSENT:
                    del table[key]
                else:
                    table[key] = old
            self._undo.clear()
            raise
        self._undo.clear()

    def check_incarnation(self) -> None:
        if self.disk.incarnation != self.incarnation:
            raise RefusedError(f"another broker took this store over (run {self.disk.incarnation})")

    # -- writes -------------------------------------------------------------------------------------------------

    def apply(self, writes: Sequence[do.Write]) -> None:
        for write in writes:
            self._apply(write)

    def _apply(self, write: do.Write) -> None:
        disk = self.disk
        match write:
            case do.AssignLine():
                row = disk.lines[write.job][write.idx]
                if row.state < ENDED:
                    self._line(
                        write.job, row._replace(state=1, attempt=write.attempt, held=write.held, worker=write.worker)
                    )
            case do.ReturnLine():
                row = disk.lines[write.job][write.idx]
                if row.state == 1:
                    self._line(write.job, row._replace(state=WAITING, held=0, worker="", deaths=write.deaths))
            case do.CountDeath():
                self._line(write.job, disk.lines[write.job][write.idx]._replace(deaths=write.deaths))
            case do.EndAttempt():
                self._put(disk.attempts, (write.job, write.idx, write.attempt), write)
            case do.StoreResult():
                self._end(write)
            case do.SaveSession():
                self._put(disk.sessions, write.worker, write)
            case do.ForgetWorker():
                self._undo.append((disk.sessions, write.worker, disk.sessions.pop(write.worker)))
            case do.NewJob() | do.SaveJob():
                job = write.job
                self._put(disk.jobs, job.number, tuple(getattr(job, name) for name in JOB))
            case do.History():
                pass  # for people: no rule reads it
            case _:
                raise InvariantError(f"this store knows no {type(write).__name__}")

    def _end(self, write: do.StoreResult) -> None:
        disk = self.disk
        row = disk.lines[write.job][write.idx]
        place = (write.job, write.kind, write.seq)
        if row.state == ENDED or (write.job, write.idx) in disk.results or place in disk.places:
            raise InvariantError(f"the store refuses a write: line {write.idx} ends twice, or its place is taken")
        self._put(disk.results, (write.job, write.idx), write)
        self._put(disk.places, place, write.idx)
        self._line(write.job, row._replace(state=ENDED))

    def _line(self, job: int, row: Row) -> None:
        self._put(self.disk.lines[job], row.idx, row)

    def _put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._undo.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def end_waiting(self, job: Job, code: str, words: str, count: int, at: float) -> tuple[int, bool]:
        start = self._end_from.get(job.number, 0)
        waiting = [row for row in self.disk.lines[job.number].values() if row.idx >= start and row.state == WAITING][
            :count
        ]
        for place, row in enumerate(waiting):
            seq = job.failed + place
            message = cut_short(words, row.attempt)
            self._end(do.StoreResult(job.number, row.idx, 1, seq, row.attempt, 0, code, message, 0, 0, "", b"", at))
        full = len(waiting) == count
        self._end_from[job.number] = waiting[-1].idx + 1 if full else 0
        return len(waiting), full or start > 0

    # -- reads --------------------------------------------------------------------------------------------------

    def load(self, now: Now, grace_s: float) -> State:
        disk = self.disk
        state = State(self.store_id, self.incarnation)
        state.next_job = 1 + max(disk.jobs, default=0)
        for worker, one in sorted(disk.sessions.items(), key=lambda item: (item[1].at, item[0])):
            state.known[worker] = KnownWorker(one.user, one.incarnation, one.login, one.epoch)
        state.next_epoch = 1 + max((known.epoch for known in state.known.values()), default=0)
        for number in sorted(disk.jobs):
            job = job_of(disk.jobs[number])
            if job.status not in OPEN:
                continue
            if job.window_s:
                job.deadline = max(now.mono + 1e-9, now.mono + job.created_at + job.window_s - now.wall)
            if job.status in ("validating", "in_progress"):
                for model in disk.models[number]:
                    job.windows[model] = Window(model)
            state.jobs[job.id] = job
            for row in disk.lines[number].values():
                if row.state == 1:
                    job.assigned[row.idx] = _made(row)
                    state.absent.add(row.worker)
        state.grace_until = now.mono + grace_s if state.absent else 0.0
        return state

    def models(self, job: int) -> dict[str, int]:
        return self.disk.models[job]

    def window(self, job: int, model: str, cursor: int, count: int) -> tuple[tuple[Line, ...], int, bool]:
        rows = [
            row for row in self.disk.lines[job].values()
            if row.idx >= cursor and row.state == WAITING and row.model == model
        ][:count]  # fmt: skip
        return tuple(map(_made, rows)), rows[-1].idx + 1 if rows else cursor, len(rows) < count

    def facts(self, refs: Sequence[LineRef], state: State) -> dict[LineId, Fact | None]:
        numbers = {row[JOB.index("id")]: number for number, row in self.disk.jobs.items()}
        return {ref.line: self._fact(numbers.get(ref.job), ref.index) for ref in refs}

    def _fact(self, number: int | None, index: int) -> Fact | None:
        row = self.disk.lines.get(number or 0, {}).get(index)
        if number is None or row is None:
            return None
        result = self.disk.results.get((number, index))
        attempt = result.attempt if result is not None and not result.code else 0
        return Fact(number, row.state, _made(row), attempt)

    def closed_job(self, job: str) -> ClosedJob | None:
        return None

    def close(self) -> None:
        pass

    # -- for the world ------------------------------------------------------------------------------------------

    def has_result(self, job: str, index: int) -> bool:
        return any(
            (number, index) in self.disk.results
            for number, row in self.disk.jobs.items()
            if row[JOB.index("id")] == job
        )

    def dump(self) -> dict[str, Any]:
        disk = self.disk
        return {
            "jobs": sorted(tuple(row) for row in disk.jobs.values()),
            "lines": sorted((job, *row) for job, rows in disk.lines.items() for row in rows.values()),
            "results": sorted(tuple(row) for row in disk.results.values()),
            "attempts": sorted(tuple(row) for row in disk.attempts.values()),
            "sessions": sorted(tuple(row) for row in disk.sessions.values()),
        }


def _made(row: Row) -> Line:
    return Line(
        row.idx, row.url, row.model, row.offset, row.size, row.attempt, row.held, row.worker, None, row.deaths,
        prefix=row.prefix,
    )  # fmt: skip


def insert_job(disk: MemoryDisk, job: Job, rows: Sequence[Row]) -> None:
    """A job that has passed its checks, with its lines waiting."""
    disk.jobs[job.number] = tuple(getattr(job, name) for name in JOB)
    disk.lines[job.number] = {row.idx: row for row in rows}
    names = dict.fromkeys(row.model for row in rows)
    disk.models[job.number] = {name: number for number, name in enumerate(names)}
