"""Long questions beside the work: asked once, answered to everyone who waits, never in a turn's way."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.effects import Query, SaveJob
from broker.questions import Questions
from broker.reader import Reader
from common import limits, messages
from common.errors import RefusedError
from tests.unit.broker.kit import JOB
from tests.unit.broker.shell_kit import Disk, good_line


class Slow(Reader):
    """A reader whose questions wait for ``go``."""

    def __init__(self, path: Path) -> None:
        self.go = threading.Event()
        self.asked = 0
        super().__init__(path)

    def ask(self, tag: Any, question: Any) -> None:
        self.asked += 1

        def waits(connection: sqlite3.Connection) -> Any:
            self.go.wait(10)
            return question(connection)

        super().ask(tag, waits)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path)
    job = one.check(one.sealed(b"".join(good_line(number) for number in range(4))))
    with one.store.turn():
        one.store.apply([SaveJob(job)])
    yield one
    one.close()


@pytest.fixture
def reader(disk: Disk) -> Iterator[Slow]:
    one = Slow(disk.folder / "broker.sqlite")
    yield one
    one.go.set()
    one.close()


def collect(questions: Questions, count: int) -> list[tuple[bytes, Any]]:
    found: list[tuple[bytes, Any]] = []
    for _ in range(2000):
        found += questions.answers()
        if len(found) >= count:
            return found
        time.sleep(0.005)
    pytest.fail("no answer")


def asked(peer: bytes, request: int) -> Query:
    return Query(peer, "", True, messages.AskAudit(request, JOB))


def test_an_audit_is_made_once_for_all_who_wait_and_each_gets_its_own_number(disk: Disk, reader: Slow) -> None:
    """A client asks again on a fresh socket because the audit of a huge job takes long: it is not begun anew."""
    questions = Questions(reader, disk.folder)
    job = disk.state.jobs[JOB]
    assert questions.ask(asked(b"a", 1), job) is None
    assert questions.ask(asked(b"a2", 2), job) is None
    assert list(questions.answers()) == []
    reader.go.set()
    found = collect(questions, 2)
    assert [(peer, one.request, one.finished, one.missing) for peer, one in found] == [
        (b"a", 1, False, 4), (b"a2", 2, False, 4),
    ]  # fmt: skip
    assert reader.asked == 1


def test_too_many_questions_are_told_to_come_back(disk: Disk, reader: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for the audit of every job at once does not grow the broker's memory."""
    monkeypatch.setattr(limits, "QUESTIONS_MAX_COUNT", 1)
    questions = Questions(reader, disk.folder)
    job = disk.state.jobs[JOB]
    assert questions.ask(asked(b"a", 1), job) is None
    other = disk.sealed(b"x", job="00000000-0000-4000-8000-000000000002")
    refused = questions.ask(asked(b"b", 2), other)
    assert refused is not None
    assert (refused.code, refused.exit_code) == ("busy", 3)


def test_a_job_deleted_meanwhile_is_said_to_be(disk: Disk, reader: Slow) -> None:
    """The audit begins after the job's row is gone."""
    questions = Questions(reader, disk.folder)
    questions.ask(asked(b"a", 1), disk.state.jobs[JOB])
    with disk.store.turn():
        disk.store.connection.execute("DELETE FROM jobs")
    reader.go.set()
    ((_, answer),) = collect(questions, 1)
    assert (answer.code, answer.request) == ("no_job", 1)


def test_a_question_sees_the_last_commit_and_nothing_half_done(disk: Disk, reader: Slow) -> None:
    """The turn that is writing while an audit runs is not seen by halves."""
    reader.go.set()
    with disk.store.turn():
        disk.store.connection.execute("DELETE FROM jobs")
        reader.ask("count", lambda db: db.execute("SELECT count(*) FROM jobs").fetchone()[0])
        while not (found := list(reader.answers())):
            time.sleep(0.005)
        assert found == [("count", 1)]


@pytest.mark.parametrize(
    ("error", "code"), [(sqlite3.OperationalError("locked"), "busy"), (sqlite3.DatabaseError("malformed"), None)]
)
def test_a_failure_to_read_is_told_and_damage_stops_the_broker(
    disk: Disk, reader: Slow, error: Exception, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock passes; a file that is not whole does not (D6)."""
    questions = Questions(reader, disk.folder)
    questions.ask(asked(b"a", 1), disk.state.jobs[JOB])
    monkeypatch.setattr(reader, "answers", lambda: iter([(JOB, error)]))
    if code is None:
        with pytest.raises(RefusedError, match="damaged"):
            list(questions.answers())
    else:
        assert [one.code for _, one in questions.answers()] == [code]


def test_closing_ends_a_question_in_its_middle(disk: Disk) -> None:
    """SIGTERM while a store of many GiB is read: the process does not wait for it."""
    reader = Reader(disk.folder / "broker.sqlite")
    reader.ask("long", lambda db: db.execute(
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n LIMIT 100000000000) SELECT count(*) FROM n"
    ).fetchone())  # fmt: skip
    reader.close()
    assert not reader._thread.is_alive()
