"""shell: answers clients' questions from the store as it stands after the commit. Changes nothing.

Home of the output half of the batch format: how a stored result becomes a line of the output or the error file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from broker import explain, jobs, scheduler
from broker.audit import audit
from broker.effects import Query
from broker.state import OPEN, Job, Session, State
from broker.store import JOB, Store, job_of
from common import limits, messages

JOBS_A_PAGE_COUNT = 200
_PIECE_BITS = 16
"""An offset of ``Fetch`` is a line's place shifted by this, plus how many pieces of that line were fetched."""
_NO_JOB = "no job {job!r} here, or none your key may see"


def answer(store: Store, state: State, query: Query, mono: float) -> Any:
    """The message that answers ``query``: what was asked for, or ``Failure``."""
    message = query.message
    if isinstance(message, messages.AskWorkers):
        return messages.Workers(
            message.request, tuple(_worker(one, mono) for one in list(state.sessions.values())[: limits.PAGE_MAX_COUNT])
        )
    if isinstance(message, messages.AskJobs):
        return _jobs(store, state, query, message)
    job = job_asked_for(store, state, query)
    if isinstance(job, messages.Failure):
        return job
    match message:
        case messages.AskProblems():
            return _problems(store, job, message)
        case messages.Fetch():
            return _lines(store, job, message)
        case messages.Explain():
            why = partial(scheduler.why_waiting, state, job)
            return explain.answer(store.connection, job, message, why, mono)
        case messages.AskAudit():
            return audit(store.connection, job.id, message.request)
        case messages.Chunk():
            return messages.Need(message.request, job.id, job.size)
    return _info(store, state, job, message.request)


def job_asked_for(store: Store, state: State, query: Query) -> Job | messages.Failure:
    """The job that ``query`` is about, or the answer to who may not see it, or asks for one that is not there."""
    message = query.message
    job = _job(store, state, message.job)
    if job is None or not jobs.may_see(job.owner, query):
        return messages.Failure(message.request, "no_job", _NO_JOB.format(job=message.job[:80]), 4)
    return job


def _job(store: Store, state: State, job: str) -> Job | None:
    found = state.jobs.get(job)
    if found is not None:
        return found
    row = store.connection.execute(f"SELECT {','.join(JOB)} FROM jobs WHERE id=?", (job,)).fetchone()
    return None if row is None else job_of(row)


def _info(store: Store, state: State, job: Job, request: int) -> messages.JobInfo:
    one = store.connection.execute("SELECT count(*) FROM attempts WHERE job=? AND how='known'", (job.number,))
    return jobs.info(job, request, one.fetchone()[0], scheduler.why_waiting(state, job)[: limits.REASON_MAX_CHARS])


def _jobs(store: Store, state: State, query: Query, message: messages.AskJobs) -> messages.Jobs:
    if message.open_only:
        return _open_jobs(store, state, query, message)
    where, values = ("", ()) if query.admin else ("WHERE owner=?", (query.user,))
    rows = store.connection.execute(
        f"SELECT {','.join(JOB)} FROM jobs {where} ORDER BY number DESC LIMIT ? OFFSET ?",
        (*values, JOBS_A_PAGE_COUNT + 1, message.offset),
    ).fetchall()
    page = [state.jobs.get(row[0]) or job_of(row) for row in rows[:JOBS_A_PAGE_COUNT]]
    infos = tuple(_info(store, state, job, message.request) for job in page)
    return messages.Jobs(message.request, infos, len(rows) > JOBS_A_PAGE_COUNT)


def _open_jobs(store: Store, state: State, query: Query, message: messages.AskJobs) -> messages.Jobs:
    """Those in memory: however many have ended, they are not gone through."""
    seen = [job for job in state.jobs.values() if jobs.may_see(job.owner, query)]
    seen.sort(key=lambda job: job.number, reverse=True)
    page = seen[message.offset : message.offset + JOBS_A_PAGE_COUNT]
    infos = tuple(_info(store, state, job, message.request) for job in page)
    return messages.Jobs(message.request, infos, message.offset + len(page) < len(seen))


def _problems(store: Store, job: Job, message: messages.AskProblems) -> messages.Problems:
    most = 500
    rows = store.connection.execute(
        "SELECT line, code, message FROM problems WHERE job=? ORDER BY line LIMIT ? OFFSET ?",
        (job.number, most + 1, message.offset),
    ).fetchall()
    found = tuple(messages.Problem(*row) for row in rows[:most])
    return messages.Problems(message.request, job.id, found, len(rows) > most)


def _worker(session: Session, mono: float) -> messages.WorkerInfo:
    """``last_beat_s`` is how long ago it was heard."""
    return messages.WorkerInfo(
        session.worker, session.fence.worker_incarnation, session.fence.epoch,
        "draining" if session.draining else session.phase, session.models, session.concurrency,
        max(0, session.credit_lines), len(session.running), len(session.lines), session.steps, session.tokens,
        max(0.0, mono - session.heard_at), session.ring, max(0, session.credit_bytes), session.engine,
        session.tokens_pace.a_second, session.staged_pace.a_second, session.waits.partition(":")[0],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ output lines


def _lines(store: Store, job: Job, message: messages.Fetch) -> Any:
    if message.which not in ("output", "error"):
        return messages.Failure(message.request, "bad_fetch", "fetch output or error", 2)
    place, piece = message.offset >> _PIECE_BITS, message.offset & ((1 << _PIECE_BITS) - 1)
    rows = store.connection.execute(
        "SELECT r.seq, r.idx, r.attempt, r.status_code, r.code, r.message, r.body, l.custom_id "
        "FROM results r JOIN lines l ON l.job=r.job AND l.idx=r.idx "
        "WHERE r.job=? AND r.kind=? AND r.seq>=? ORDER BY r.seq LIMIT ?",
        (job.number, int(message.which == "error"), place, limits.PAGE_MAX_COUNT),
    )
    lines: list[bytes] = []
    size = 0
    more = False
    for row in rows:
        line = output_line(job.id, row)
        if lines and size + len(line) > limits.FETCH_MAX_BYTES:
            more = True
            break
        if len(line) > limits.PART_MAX_BYTES:
            return _piece(job, message, line, place, piece)
        lines.append(line)
        size += len(line)
        place = row[0] + 1
    total = job.failed if message.which == "error" else job.completed
    ended = job.status not in OPEN and not more and place >= total
    return messages.Lines(message.request, job.id, tuple(lines), place << _PIECE_BITS, ended)


def _piece(job: Job, message: messages.Fetch, line: bytes, place: int, piece: int) -> messages.Lines:
    """One line longer than a message may be, a piece at a time."""
    start = piece * limits.PART_MAX_BYTES
    data = line[start : start + limits.PART_MAX_BYTES]
    more = start + len(data) < len(line)
    following = (place << _PIECE_BITS) + piece + 1 if more else (place + 1) << _PIECE_BITS
    return messages.Lines(message.request, job.id, (data,), following, False, more)


def output_line(job: str, row: Sequence[Any]) -> bytes:
    """A result as a line of the output or error file, without the line end.

    ``row`` is (seq, idx, attempt, status_code, code, message, body, custom_id); ``code`` says that the line never ran.
    """
    _, idx, attempt, status_code, code, message, body, custom_id = row
    name = f"{job}-{idx}" if idx >= 0 else f"{job}-line{-idx}"
    head = f'{{"id": "batch_req_{name}", "custom_id": {json.dumps(custom_id)}, "response": '
    if code:
        return f'{head}null, "error": {json.dumps({"code": code, "message": message})}}}'.encode()
    response = f'{{"status_code": {status_code}, "request_id": "req_{name}-{attempt}", "body": '
    return b"".join((head.encode(), response.encode(), body, b'}, "error": null}'))
