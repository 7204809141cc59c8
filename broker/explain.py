"""shell: what became of a job or of one of its lines, told from the store: history, attempts, result. Changes nothing.

Every sentence is a fact that was written down when it happened; nothing is inferred. Times are UTC. What a line waited
for in its worker comes with its result: of an attempt that gave none, nobody knows. Of a line that is out now, memory
says where it is and why it went there, and its worker's last beat what that one does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime

from broker.client_rules import plural
from broker.state import ASSIGNED, HAS_IT, HELPS, PASSED_OVER, UNOWNED, WAITING, Job, Line, Session
from common import limits, messages
from common.messages import LineRef
from common.printable import printable

Why = Callable[[str], str]
ENTRIES_MAX_COUNT = 500
_HISTORY = "SELECT at, kind, detail FROM history WHERE job=? ORDER BY id LIMIT ?"
_LINE = (
    "SELECT l.idx, l.line, l.state, l.attempt, l.held, l.worker, l.deaths, l.prefix, m.name FROM lines l "
    "JOIN models m ON m.job=l.job AND m.number=l.model WHERE l.job=? AND l.custom_id=?"
)
ALIKE_MAX_COUNT = 10_000
"""Lines with one beginning that are counted for one answer."""
_ALIKE = (
    "SELECT count(*), sum(worker=?) FROM "
    "(SELECT worker FROM lines INDEXED BY lines_by_prefix WHERE job=? AND prefix=? AND prefix<>0 LIMIT ?)"
)
_ATTEMPTS = "SELECT at, attempt, worker, how FROM attempts WHERE job=? AND idx=? ORDER BY attempt LIMIT ?"
_RESULT = (
    "SELECT stored_at, attempt, worker, kind, status_code, code, message, notes FROM results WHERE job=? AND idx=?"
)
HOW = {
    "lost": "its session ended before there was a result; the line waited again",
    "unlisted": "the worker logged in again without it; the line waited again",
    "unclaimed": "nobody claimed it within the grace after the broker's restart; the line waited again",
    "handed_back": "the worker left and handed it back; the line waited again",
    "cancelled": "the worker was told to stop it, and did",
    "overtaken": "another result was stored first; the worker was told to stop",
    "known": "its result came when the line had one already: wasted work",
}
"""How an attempt may have ended otherwise than as the line's result."""
WENT = {
    HAS_IT: "that worker had lines with the same beginning",
    UNOWNED: "no worker that is logged in had lines with the same beginning",
    HELPS: "other workers had its beginning, and this one had nothing else to do",
    PASSED_OVER: "it had been passed over for other beginnings often enough",
}
"""Why a line that shares its beginning went where it is."""


def explain(
    connection: sqlite3.Connection, job: Job, custom_id: str, why: Why, mono: float
) -> tuple[str, ...] | None:  # fmt: skip
    """The story of a job, or of its line ``custom_id``; None when it has no such line.

    ``why`` says in words why lines of the job wait just now: those of a model, or of any (empty).
    """
    number = job.number
    if custom_id:
        return _line(connection, job, custom_id, why, mono)
    told = [
        _said(at, f"{kind.replace('_', ' ')}{': ' if detail else ''}{detail}")
        for at, kind, detail in connection.execute(_HISTORY, (job.id, ENTRIES_MAX_COUNT))
    ]
    ends = connection.execute("SELECT how, count(*) FROM attempts WHERE job=? GROUP BY how ORDER BY how", (number,))
    told += [f"{plural(count, 'attempt')} ended {how}: {HOW.get(how, how)}" for how, count in ends]
    waits = why("")
    return (*told, *([f"now: {waits}"[: limits.TEXT_MAX_CHARS]] if waits else []))


def _line(
    connection: sqlite3.Connection, job: Job, custom_id: str, why: Why, mono: float
) -> tuple[str, ...] | None:  # fmt: skip
    number = job.number
    found = connection.execute(_LINE, (number, custom_id)).fetchone()
    if found is None:
        return None
    idx, line, state, attempt, held, worker, deaths, prefix, model = found
    told = [f"line {line} of the input; given out {plural(attempt, 'time')}"]
    if prefix:
        told += _alike(connection.execute(_ALIKE, (worker, number, prefix, ALIKE_MAX_COUNT + 1)).fetchone(), worker)
    for at, tried, whom, how in connection.execute(_ATTEMPTS, (number, idx, ENTRIES_MAX_COUNT)):
        told.append(_said(at, f"attempt {tried} on {whom}: {HOW.get(how, how)}"))
    if deaths:
        told.append(f"{plural(deaths, 'worker')} died while running it alone")
    result = connection.execute(_RESULT, (number, idx)).fetchone()
    if result is not None:
        at, tried, whom, kind, status_code, code, message, notes = result
        kept = [note for note in notes.split("\n") if note][: limits.NOTES_MAX_COUNT]
        told += [f"attempt {tried} in its worker: {printable(note)}" for note in kept]
        if code:
            told.append(_said(at, f"ended as {code}: {message}"))
        else:
            words = "an error line" if kind else "an output line"
            told.append(_said(at, f"attempt {tried} on {whom} is {words}, status {status_code}"))
    elif state == ASSIGNED:
        told += _out(job, job.assigned.get(idx), held, worker, mono)
    elif state == WAITING:
        waits = "it ran when a worker died and waits to be tried apart" if idx in job.suspects else why(model)
        told.append(f"now: it waits{': ' if waits else ''}{waits}")
    return tuple(one[: limits.TEXT_MAX_CHARS] for one in told)


def _alike(found: tuple[int, int], worker: str) -> list[str]:
    """With how many lines of its job a line shares its beginning, and how many of them went where it went."""
    count, there = found[0] - 1, found[1] - 1
    if count < 1:
        return []
    many = f"{ALIKE_MAX_COUNT:,} or more" if count >= ALIKE_MAX_COUNT else f"{count:,}"
    where = f", {there:,} of them given to {worker}" if worker else ""
    return [f"shares its beginning with {many} other lines of the job{where}"]


def _out(job: Job, line: Line | None, held: int, worker: str, mono: float) -> list[str]:
    """Where an assigned line is now, and what its worker said last."""
    session = None if line is None else line.session
    if line is None or session is None:
        return [f"now: attempt {held} is assigned to {worker}, which has not logged in since this broker's start"]
    told = [
        _said(
            line.since, f"attempt {held} held by {worker} from then on, in its session of epoch {session.fence.epoch}"
        )
    ]
    if line.prefix and line.why in WENT:
        alike = sum(other.prefix == line.prefix for other in session.lines.values()) - 1
        told.append(f"it went there because {WENT[line.why]}; {alike} of the lines there now share it")
    return [*told, f"now: {_does(session, LineRef(job.id, line.index, held), mono)}"]


def _does(session: Session, ref: LineRef, mono: float) -> str:
    """A worker's last beat in words, and what it says of one line."""
    if not session.told_at:
        return f"{session.worker} has not said yet what it does"
    if ref in session.running:
        line = "its engine runs the line"
    elif len(session.running) >= limits.PAGE_MAX_COUNT:
        line = "it does not say of every line whether its engine runs it"
    elif ref == session.head:
        line = f"the line is the first that waits in its engine, for {session.waits}"
    elif session.head is not None:
        kind = session.waits.partition(":")[0]
        line = f"its engine has not begun the line: the first that waits there waits for {kind}"
    else:
        line = "its engine had not taken the line in"
    running = plural(len(session.running), "line")
    return (
        f"{session.worker} said {max(0.0, mono - session.told_at):.1f} s ago: {session.phase}, step {session.steps}, "
        f"{session.tokens_pace.a_second:.1f} tokens/s, {running} running, {len(session.lines)} held; {line}"
    )


def _said(at: float, words: str) -> str:
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{stamp} {words}"[: limits.TEXT_MAX_CHARS]


def answer(
    connection: sqlite3.Connection, job: Job, message: messages.Explain, why: Why, mono: float
) -> messages.Explained | messages.Failure:
    """The answer to a client."""
    told = explain(connection, job, message.custom_id, why, mono)
    if told is None:
        return messages.Failure(
            message.request, "no_line", f"job {message.job} has no line with custom_id {message.custom_id!r}", 4
        )
    return messages.Explained(message.request, message.job, told[: limits.PAGE_MAX_COUNT])
