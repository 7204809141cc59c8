"""shell: what became of a job or of one of its lines, told from the store: history, attempts, result. Changes nothing.

Every sentence is a fact that was written down when it happened; nothing is inferred. Times are UTC. What a line waited
for in its worker comes with its result: of an attempt that gave none, nobody knows.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime

from broker.state import ASSIGNED, WAITING
from common import limits, messages

ENTRIES_MAX_COUNT = 500
_HISTORY = "SELECT at, kind, detail FROM history WHERE job=? ORDER BY id LIMIT ?"
_LINE = "SELECT idx, line, state, attempt, held, worker, deaths FROM lines WHERE job=? AND custom_id=?"
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


def explain(connection: sqlite3.Connection, number: int, custom_id: str, why: str) -> tuple[str, ...] | None:
    """The story of job ``number``, or of its line ``custom_id``; None when it has no such line.

    ``why`` says in words why lines of the job wait just now.
    """
    if custom_id:
        return _line(connection, number, custom_id, why)
    job = connection.execute("SELECT id, status FROM jobs WHERE number=?", (number,)).fetchone()
    told = [
        _said(at, f"{kind.replace('_', ' ')}{': ' if detail else ''}{detail}")
        for at, kind, detail in connection.execute(_HISTORY, (job[0], ENTRIES_MAX_COUNT))
    ]
    ends = connection.execute("SELECT how, count(*) FROM attempts WHERE job=? GROUP BY how ORDER BY how", (number,))
    told += [f"{count} attempts ended {how}: {HOW.get(how, how)}" for how, count in ends]
    return (*told, *([f"now: {why}"[: limits.TEXT_MAX_CHARS]] if why else []))


def _line(connection: sqlite3.Connection, number: int, custom_id: str, why: str) -> tuple[str, ...] | None:
    found = connection.execute(_LINE, (number, custom_id)).fetchone()
    if found is None:
        return None
    idx, line, state, attempt, held, worker, deaths = found
    told = [f"line {line} of the input; given out {attempt} times"]
    for at, tried, whom, how in connection.execute(_ATTEMPTS, (number, idx, ENTRIES_MAX_COUNT)):
        told.append(_said(at, f"attempt {tried} on {whom}: {HOW.get(how, how)}"))
    if deaths:
        told.append(f"{deaths} workers died while they ran it alone")
    result = connection.execute(_RESULT, (number, idx)).fetchone()
    if result is not None:
        at, tried, whom, kind, status_code, code, message, notes = result
        told += [f"attempt {tried} in its worker: {note}" for note in _printable(notes)]
        if code:
            told.append(_said(at, f"ended as {code}: {message}"))
        else:
            words = "an error line" if kind else "an output line"
            told.append(_said(at, f"attempt {tried} on {whom} is {words}, status {status_code}"))
    elif state == ASSIGNED:
        told.append(f"now: attempt {held} is assigned to {worker}")
    elif state == WAITING:
        told.append(f"now: it waits{': ' if why else ''}{why}")
    return tuple(one[: limits.TEXT_MAX_CHARS] for one in told)


def _printable(notes: str) -> list[str]:
    """A worker's notes in its order, without what a terminal would obey."""
    lines = ["".join(one for one in line if one.isprintable()) for line in notes.split("\n")]
    return [line for line in lines if line][: limits.NOTES_MAX_COUNT]


def _said(at: float, words: str) -> str:
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{stamp} {words}"[: limits.TEXT_MAX_CHARS]


def answer(
    connection: sqlite3.Connection, number: int, message: messages.Explain, why: str
) -> messages.Explained | messages.Failure:
    """The answer to a client."""
    told = explain(connection, number, message.custom_id, why)
    if told is None:
        return messages.Failure(
            message.request, "no_line", f"job {message.job} has no line with custom_id {message.custom_id!r}", 4
        )
    return messages.Explained(message.request, message.job, told[: limits.PAGE_MAX_COUNT])
