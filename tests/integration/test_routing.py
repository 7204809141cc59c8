"""Two real workers, two documents, many questions: each document is at one worker, and nobody idles for it."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from typing import Any

from common import messages
from tests.integration.fleet_kit import Fleet, chat

QUESTIONS = 24
SHORT = 120
"""Requests without a document: with them to run, nobody has to help with another's."""


def document(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=9_000))


DOCUMENTS = [document(seed) for seed in (1, 2)]


def about(number: int, which: int) -> dict[str, Any]:
    """A question about a document, behind the system prompt of all."""
    line = chat(number, DOCUMENTS[which] + f" {number}?")
    line["body"]["messages"].insert(0, {"role": "system", "content": "Answer from the document alone."})
    return line


def two_ready(fleet: Fleet) -> None:
    fleet.broker()
    for name in ("one", "two"):
        fleet.worker("--context-tokens", "16384", name=name)
    fleet.until(
        lambda: [one.phase for one in fleet.workers() if one.credit_lines > 0] == ["ready"] * 2, "two workers are ready"
    )


def who_ran(fleet: Fleet, job: str) -> dict[str, str]:
    """Worker by custom_id, from the store."""
    store = sqlite3.connect(f"file:{fleet.folder / 'state' / 'broker.sqlite'}?mode=ro", uri=True)
    rows = store.execute(
        "SELECT l.custom_id, r.worker FROM results r JOIN lines l ON l.job=r.job AND l.idx=r.idx "
        "JOIN jobs j ON j.number=r.job WHERE j.id=?", (job,),
    ).fetchall()  # fmt: skip
    store.close()
    return dict(rows)


def test_each_documents_lines_go_to_one_worker(fleet: Fleet) -> None:
    """Questions about two documents in turns, and short requests enough: each document is read at one worker only."""
    two_ready(fleet)
    lines = [about(number, number % 2) for number in range(2 * QUESTIONS)]
    job = fleet.submit([*lines, *(chat(number) for number in range(2 * QUESTIONS, 2 * QUESTIONS + SHORT))])
    info = fleet.ended(job)
    assert (info.completed, info.failed) == (2 * QUESTIONS + SHORT, 0), info
    ran = who_ran(fleet, job)
    workers: dict[int, set[str]] = defaultdict(set)
    for number in range(2 * QUESTIONS):
        workers[number % 2].add(ran[f"id-{number}"])
    assert [len(found) for found in workers.values()] == [1, 1]
    assert workers[0] != workers[1]
    told = fleet.client.ask(messages.Explain(0, job, "id-3"), messages.Explained).told
    where = f"{QUESTIONS - 1} of them given to {ran['id-3']}"
    assert f"shares its beginning with {QUESTIONS - 1} other lines of the job, {where}" in told


def test_one_document_is_no_reason_to_idle(fleet: Fleet) -> None:
    """Questions about one document alone: both workers run them."""
    two_ready(fleet)
    job = fleet.submit([about(number, 0) for number in range(4 * QUESTIONS)])
    info = fleet.ended(job)
    assert (info.completed, info.failed) == (4 * QUESTIONS, 0), info
    assert len(set(who_ran(fleet, job).values())) == 2
