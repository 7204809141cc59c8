"""What clients get to see: output lines exactly as the format says, pages, pieces, and the audit of D4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import explain
from broker.answers import answer
from broker.effects import AssignLine, EndAttempt, History, Query, SaveJob, StoreResult
from broker.inputs import Tick
from broker.state import NOT_SAID, Line
from common import limits, messages
from common.messages import LineRef
from tests.unit.broker.kit import JOB, NOW, beat, came, feed, later, log_in
from tests.unit.broker.shell_kit import Disk, good_line

BODY = b'{"choices":[]}'


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path)
    data = b"".join(good_line(number) for number in range(4)) + b"{\n"
    one.check(one.sealed(data, lenient=True))
    yield one
    one.close()


def ask(disk: Disk, message: Any, user: str = "", admin: bool = False) -> Any:
    return answer(disk.store, disk.state, Query(b"c", user, admin, message), NOW.mono)


def store(disk: Disk, *results: StoreResult) -> None:
    job = disk.state.jobs[JOB]
    with disk.store.turn():
        disk.store.apply(results)
        job.completed += sum(one.kind == 0 for one in results)
        job.failed += sum(one.kind == 1 for one in results)
        disk.store.apply([SaveJob(job)])


def ok(index: int, seq: int, body: bytes = BODY) -> StoreResult:
    return StoreResult(1, index, 0, seq, 1, 200, "", "", 1, 1, "w", body, 1.0)


def fetch(disk: Disk, which: str = "output") -> tuple[list[bytes], list[messages.Lines]]:
    """All lines so far, as a client puts them together."""
    offset, pages, lines, piece = 0, [], [], b""
    while True:
        page = ask(disk, messages.Fetch(1, JOB, which, offset))
        pages.append(page)
        if page.piece_more or piece:
            piece += page.lines[0]
            if not page.piece_more:
                lines.append(piece)
                piece = b""
        else:
            lines += page.lines
        if page.next_offset == offset:
            return lines, pages
        assert page.next_offset > offset
        offset = page.next_offset


def test_output_lines_are_the_services(disk: Disk) -> None:
    """ok, failed by its own fault, never ran: each exactly as the batch format has it."""
    store(
        disk, ok(2, 0), StoreResult(1, 0, 1, 1, 1, 400, "", "", 1, 0, "w", b'{"error":{"message":"too long"}}', 1.0),
        StoreResult(1, 1, 1, 2, 0, 0, "batch_cancelled", "why", 0, 0, "", b"", 1.0),
    )  # fmt: skip
    (output,), _ = fetch(disk)
    assert json.loads(output) == {
        "id": f"batch_req_{JOB}-2", "custom_id": "c2",
        "response": {"status_code": 200, "request_id": f"req_{JOB}-2-1", "body": {"choices": []}}, "error": None,
    }  # fmt: skip
    bad, failed, never = (json.loads(line) for line in fetch(disk, "error")[0])
    assert bad["custom_id"] is None
    assert bad["error"]["code"] == "invalid_json_line"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["message"] == "too long"
    assert failed["error"] is None
    assert never == {
        "id": f"batch_req_{JOB}-1", "custom_id": "c1", "response": None,
        "error": {"code": "batch_cancelled", "message": "why"},
    }  # fmt: skip


def test_lines_come_in_the_order_of_completion_and_by_pages(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that resumes asks from where it was; nothing is skipped or repeated."""
    monkeypatch.setattr(limits, "FETCH_MAX_BYTES", 300)
    store(disk, ok(3, 0), ok(1, 1), ok(0, 2))
    lines, pages = fetch(disk)
    assert [json.loads(line)["custom_id"] for line in lines] == ["c3", "c1", "c0"]
    assert len(pages) > 2
    assert not any(page.ended for page in pages)


def test_a_long_line_comes_in_pieces(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result longer than a message may be, between two short ones."""
    monkeypatch.setattr(limits, "PART_MAX_BYTES", 1000)
    monkeypatch.setattr(limits, "FETCH_MAX_BYTES", 1000)
    long = b'{"x":"' + b"y" * 4000 + b'"}'
    store(disk, ok(0, 0), ok(1, 1, long), ok(2, 2))
    lines, pages = fetch(disk)
    assert [json.loads(line)["custom_id"] for line in lines] == ["c0", "c1", "c2"]
    assert sum(page.piece_more for page in pages) == 4
    assert all(len(page.lines) == 1 for page in pages if page.piece_more)


def test_a_closed_job_says_that_nothing_follows(disk: Disk) -> None:
    """``fetch`` knows when it has all."""
    store(disk, *(ok(index, index) for index in range(4)))
    job = disk.state.jobs.pop(JOB)
    job.status = "completed"
    with disk.store.turn():
        disk.store.apply([SaveJob(job)])
    page = ask(disk, messages.Fetch(1, JOB, "output", 0))
    assert (len(page.lines), page.ended) == (4, True)
    info = ask(disk, messages.AskStatus(1, JOB))
    assert (info.status, info.total, info.completed, info.failed) == ("completed", 5, 4, 1)
    audit = ask(disk, messages.AskAudit(1, JOB))
    assert (audit.holds, audit.output_lines, audit.error_lines, audit.missing, audit.findings) == (True, 4, 1, 0, ())


def test_the_audit_finds_what_is_wrong(disk: Disk) -> None:
    """A line lost, a count that does not fit, wasted work: the audit says so from the store alone (D4)."""
    store(disk, ok(0, 0))
    with disk.store.turn():
        disk.store.apply([EndAttempt(1, 1, 1, "w", "known", 1.0)])
    audit = ask(disk, messages.AskAudit(1, JOB))
    assert (audit.holds, audit.finished, audit.sound, audit.missing, audit.wasted) == (False, False, True, 3, 1)
    assert "have not ended yet" in audit.findings[0]
    job = disk.state.jobs.pop(JOB)
    job.status, job.completed = "completed", 4
    with disk.store.turn():
        disk.store.apply([SaveJob(job)])
    audit = ask(disk, messages.AskAudit(1, JOB))
    assert (audit.holds, audit.finished, audit.sound) == (False, True, False)
    assert any("neither output nor error" in words for words in audit.findings)
    assert any("the store holds 1" in words for words in audit.findings)


def test_owners_see_their_own_and_an_admin_sees_all(disk: Disk) -> None:
    """Jobs belong to the key that submitted them; others learn not even that they exist."""
    disk.state.jobs[JOB].owner = "alice"
    with disk.store.turn():
        disk.store.connection.execute("UPDATE jobs SET owner='alice'")
    assert len(ask(disk, messages.AskJobs(1, 0), "alice").jobs) == 1
    assert ask(disk, messages.AskJobs(1, 0), "bob").jobs == ()
    assert len(ask(disk, messages.AskJobs(1, 0), "root", admin=True).jobs) == 1
    for message in (messages.AskStatus(1, JOB), messages.Fetch(1, JOB, "output", 0), messages.AskAudit(1, JOB)):
        assert ask(disk, message, "bob").code == "no_job"
        assert not isinstance(ask(disk, message, "alice"), messages.Failure)


def test_problems_by_pages(disk: Disk) -> None:
    """Every bad line, with its number and code."""
    page = ask(disk, messages.AskProblems(1, JOB, 0))
    assert [(one.line, one.code) for one in page.problems] == [(5, "invalid_json_line")]
    assert not page.more
    assert ask(disk, messages.AskProblems(1, JOB, 1)).problems == ()


def test_workers_and_wrong_questions(disk: Disk) -> None:
    """Who is connected; and a question that makes no sense."""
    log_in(disk.state)
    worker = ask(disk, messages.AskWorkers(1)).workers[0]
    assert (worker.worker, worker.phase, worker.assigned) == ("w", "loading", 0)
    assert ask(disk, messages.Fetch(1, JOB, "input", 0)).code == "bad_fetch"
    assert ask(disk, messages.AskStatus(1, "nothing")).code == "no_job"
    disk.state.jobs[JOB].status = "receiving"
    assert "bytes of its input" in ask(disk, messages.AskStatus(1, JOB)).reason


def test_a_lines_story_is_told_in_order_from_what_was_written_down(disk: Disk) -> None:
    """haulier explain JOB c1: it ran on a worker that was lost, then elsewhere, and its first result won."""
    with disk.store.turn():
        disk.store.connection.execute("UPDATE lines SET attempt=2, deaths=1 WHERE idx=1")
        disk.store.apply([EndAttempt(1, 1, 1, "w-1", "lost", 10.0)])
    told = ask(disk, messages.Explain(1, JOB, "c1")).told
    assert told[0] == "line 2 of the input; given out 2 times"
    assert told[1].startswith("1970-01-01 00:00:10 attempt 1 on w-1: its session ended")
    assert told[2] == "1 worker died while running it alone"
    assert told[3].startswith("now: it waits: no worker")
    store(disk, ok(1, 0))
    assert ask(disk, messages.Explain(1, JOB, "c1")).told[-1].endswith("attempt 1 on w is an output line, status 200")


def test_what_a_line_waited_for_in_its_worker_is_told_in_order(disk: Disk) -> None:
    """haulier explain JOB c1: the notes that came with its result, one a row, before the end they explain; what a
    terminal would obey is escaped, however much a worker sends."""
    notes = "0.00 s, steps 1-9: waited for segments: all 3 are owned\n0.90 s, step 10: \x1b[2Jadmitted\n\n" + "x\n" * 99
    store(disk, ok(1, 0)._replace(notes=notes))
    told = ask(disk, messages.Explain(1, JOB, "c1")).told
    first = told.index("attempt 1 in its worker: 0.00 s, steps 1-9: waited for segments: all 3 are owned")
    assert told[first + 1] == "attempt 1 in its worker: 0.90 s, step 10: \\x1b[2Jadmitted"
    assert told[-1].endswith("attempt 1 on w is an output line, status 200")
    assert len(told) <= limits.NOTES_MAX_COUNT + 2
    fetched, _ = fetch(disk)
    assert b"waited" not in b"".join(fetched)


def out(disk: Disk, index: int, worker: str, attempt: int = 1, why: int = NOT_SAID) -> None:
    """The line is with ``worker``, in memory and in the store; its session too, if it has one."""
    job = disk.state.jobs[JOB]
    (fact,) = disk.store.facts([LineRef(JOB, index, 1)], disk.state).values()
    assert fact is not None
    line = fact.line
    session = disk.state.by_worker.get(worker)
    line.held, line.attempt, line.worker, line.why, line.since = attempt, attempt, worker, why, 60.0
    line.session, job.assigned[index] = session, line
    if session is not None:
        session.lines[JOB, index] = line
    with disk.store.turn():
        disk.store.apply([AssignLine(attempt, attempt, worker, 1, index)])


def explained(disk: Disk, name: str, seconds: float = 0.0) -> tuple[str, ...]:
    query = Query(b"c", "", False, messages.Explain(1, JOB, name))
    found = answer(disk.store, disk.state, query, NOW.mono + seconds)
    assert isinstance(found, messages.Explained)
    return found.told


def test_where_a_line_is_now_and_what_its_worker_said_last(disk: Disk) -> None:
    """haulier explain JOB c1 while it runs: since when, where, under which attempt, and what the last beat told."""
    session = log_in(disk.state)
    out(disk, 1, "w", attempt=2)
    assert explained(disk, "c1")[-2:] == (
        "1970-01-01 00:01:00 attempt 2 held by w from then on, in its session of epoch 1",
        "now: w has not said yet what it does",
    )  # fmt: skip
    ref = LineRef(JOB, 1, 2)
    feed(disk.state, came(beat(session, steps=10, tokens=100)))
    assert explained(disk, "c1")[-1].endswith("its engine had not taken the line in")
    feed(disk.state, came(beat(session, steps=12, tokens=160, running=(ref,))), later(2))
    assert explained(disk, "c1", 2.5)[-1] == (
        "now: w said 0.5 s ago: ready, step 12, 30.0 tokens/s, 1 line running, 1 held; its engine runs the line"
    )
    several = tuple(LineRef(JOB, 100 + number, 1) for number in range(limits.PAGE_MAX_COUNT))
    feed(disk.state, came(beat(session, running=several)), later(3))
    assert "does not say of every line" in explained(disk, "c1")[-1]


def test_a_line_that_waits_in_its_engine_is_told_why(disk: Disk) -> None:
    """A7, in life: a long line waits for room and another behind it: the first is told the numbers, the other what the
    first waits for, and not how long it is: it may be somebody else's."""
    session = log_in(disk.state)
    out(disk, 1, "w")
    out(disk, 2, "w")
    head, waits = LineRef(JOB, 1, 1), "slot rows: needs 8 rows of a staging slot, 0 of 40 are free"
    feed(disk.state, came(beat(session, head=head, waits=waits)))
    assert explained(disk, "c1")[-1].endswith(f"the line is the first that waits in its engine, for {waits}")
    assert explained(disk, "c2")[-1].endswith("the first that waits there waits for slot rows")
    feed(disk.state, came(beat(session)), later(1))
    assert explained(disk, "c1")[-1].endswith("had not taken the line in"), "control: nothing waits any more"


def test_a_line_of_a_worker_that_is_not_back_says_so(disk: Disk) -> None:
    """After a restart of the broker nobody knows more than who had it; of a suspect, why it waits apart."""
    disk.state.absent.add("w")
    out(disk, 1, "w")
    assert explained(disk, "c1")[-1] == (
        "now: attempt 1 is assigned to w, which has not logged in since this broker's start"
    )
    job = disk.state.jobs[JOB]
    job.suspects[2] = Line(2, "u", "m", 0, 1, group=1)
    assert explained(disk, "c2")[-1] == "now: it waits: it ran when a worker died and waits to be tried apart"


@pytest.mark.parametrize(("why", "words"), explain.WENT.items())
def test_why_a_line_went_where_it_is(disk: Disk, why: int, words: str) -> None:
    """It shares its beginning with others: with how many, how many of them went the same way, and what decided."""
    log_in(disk.state)
    disk.store.connection.execute("UPDATE lines SET prefix=77 WHERE idx BETWEEN 0 AND 2")
    out(disk, 0, "elsewhere")
    for index in (1, 2):
        out(disk, index, "w", why=why)
    told = explained(disk, "c1")
    assert told[1] == "shares its beginning with 2 other lines of the job, 1 of them given to w"
    assert told[-2] == f"it went there because {words}; 1 of the lines there now share it"
    assert not any("beginning" in one for one in explained(disk, "c3"))


def test_lines_that_begin_alike_are_found_by_an_index_and_counted_to_a_bound(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a million lines about one document: the answer must not read them all."""
    disk.store.connection.execute("UPDATE lines SET prefix=77 WHERE idx BETWEEN 0 AND 3")
    monkeypatch.setattr(explain, "ALIKE_MAX_COUNT", 2)
    assert explained(disk, "c1")[1] == "shares its beginning with 2 or more other lines of the job"
    plan = disk.store.connection.execute("EXPLAIN QUERY PLAN " + explain._ALIKE, ("w", 1, 77, 3)).fetchall()
    assert any("lines_by_prefix" in row[-1] for row in plan)


def test_a_jobs_story_counts_its_attempts_and_an_unknown_line_is_refused(disk: Disk) -> None:
    """haulier explain JOB: what happened to it, how attempts ended, and why it waits now."""
    with disk.store.turn():
        disk.store.apply([EndAttempt(1, 1, 1, "w-1", "lost", 10.0), History(5.0, "submitted", JOB, "", "80 bytes")])
    told = ask(disk, messages.Explain(1, JOB, "")).told
    assert "1970-01-01 00:00:05 submitted: 80 bytes" in told
    assert any(one.startswith("1 attempt ended lost") for one in told)
    assert told[-1] == "now: no worker is connected"
    assert ask(disk, messages.Explain(1, JOB, "nobody")).code == "no_line"
    assert ask(disk, messages.Explain(1, "elsewhere", "")).code == "no_job"


def test_what_top_needs_is_in_one_answer_each(disk: Disk) -> None:
    """Rates of jobs and workers, the engine's own figures, and why the first line there waits: its kind alone."""
    session = log_in(disk.state)
    job = disk.state.jobs[JOB]
    for seconds, ended, tokens in ((0.0, 0, 0), (2.0, 3, 80)):
        job.completed = ended
        feed(disk.state, Tick(10**12), later(seconds))
        engine = messages.EngineReport(2, 1, 6, 2, 30, 100, tokens * 1000, 5e9)
        sent = beat(session, lines=0, size=64, tokens=tokens, engine=engine, waits="segments: all 4 owned, by b's line")
        feed(disk.state, came(sent), later(seconds))
    found = ask(disk, messages.AskWorkers(1)).workers[0]
    assert (found.engine, found.credit_bytes, found.tokens_s, found.staged_bytes_s) == (engine, 64, 40.0, 40_000.0)
    assert found.waits == "segments"
    assert ask(disk, messages.AskStatus(1, JOB)).lines_s == pytest.approx(1.5)


def test_open_jobs_alone(disk: Disk) -> None:
    """However many have ended. Control: asked for all, they are there; and another key's are not, either way."""
    job = disk.state.jobs[JOB]
    assert [one.job for one in ask(disk, messages.AskJobs(1, 0, open_only=True), job.owner).jobs] == [JOB]
    assert ask(disk, messages.AskJobs(1, 0, open_only=True), "bob").jobs == ()
    assert ask(disk, messages.AskJobs(1, 1, open_only=True), job.owner).jobs == ()
    del disk.state.jobs[JOB]
    assert ask(disk, messages.AskJobs(1, 0, open_only=True), job.owner).jobs == ()
    assert [one.job for one in ask(disk, messages.AskJobs(1, 0), job.owner).jobs] == [JOB]
