"""shell: the audit of one job, counted line by line in the store: home of D4's proof. Changes nothing.

Everything is read from the store and nothing from memory, at one moment, so that the books are held against what is
durable. What is not finished is never said to hold.
"""

from __future__ import annotations

import sqlite3

from broker.state import OPEN
from common import messages

_JOB = "number, status, good, problems, lenient, completed, failed, bad_stored, id"
_DUPLICATES = (
    "SELECT coalesce(sum(n - 1), 0) FROM (SELECT count(*) AS n FROM results r "
    "JOIN lines l ON l.job=r.job AND l.idx=r.idx "
    "WHERE r.job=? AND l.custom_id IS NOT NULL GROUP BY l.custom_id HAVING n > 1)"
)


def audit(connection: sqlite3.Connection, job: str, request: int) -> messages.Audit | None:
    """Does D4 hold for this job (its id)? None when there is none."""
    one = connection.execute
    row = one(f"SELECT {_JOB} FROM jobs WHERE id=?", (job,)).fetchone()
    if row is None:
        return None
    number, status, good, problems, lenient, completed, failed, _, name = row
    output, error = (
        one("SELECT count(*) FROM results WHERE job=? AND kind=?", (number, kind)).fetchone()[0] for kind in (0, 1)
    )
    duplicates = one(_DUPLICATES, (number,)).fetchone()[0]
    runs = one("SELECT coalesce(sum(attempt), 0) FROM lines WHERE job=?", (number,)).fetchone()[0]
    wasted = one("SELECT count(*) FROM attempts WHERE job=? AND how='known'", (number,)).fetchone()[0]
    missing = 0 if status == "failed" else max(0, good + (problems if lenient else 0) - output - error)
    finished = status not in OPEN
    wrong = []
    if finished and missing:
        wrong.append(f"{missing} lines have neither output nor error")
    if (output, error) != (completed, failed):
        wrong.append(f"the job counts {completed} and {failed}, the store holds {output} and {error}")
    if duplicates:
        wrong.append(f"{duplicates} custom_ids appear more than once")
    so_far = [] if finished else [f"the job is {status}: {missing} lines have not ended yet"]
    return messages.Audit(
        request, name, finished and not wrong, good + problems, output, error, duplicates, missing, wasted, runs,
        (*so_far, *wrong), finished, not wrong,
    )  # fmt: skip
