"""Input files checked slice by slice: every bad line by number and code, nothing held, nothing trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.intake import Intake
from common import limits
from common.messages import LineRef
from common.openai_lines import BOM
from common.prefixes import prefix_key
from tests.unit.broker.shell_kit import Disk, good_line, reload


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path)
    yield one
    one.close()


def test_a_good_file(disk: Disk) -> None:
    """Lines are in the store with the places of their bodies, and wait."""
    data = b"".join(good_line(number) for number in range(5))
    job = disk.check(disk.sealed(data))
    assert (job.status, job.good, job.problems, list(job.windows)) == ("in_progress", 5, 0, ["m"])
    lines, cursor, exhausted = disk.store.window(job.number, "m", 0, 10)
    assert [line.index for line in lines] == [0, 1, 2, 3, 4]
    assert (cursor, exhausted) == (5, True)
    assert disk.spool.read(job.id, lines[3].offset, lines[3].size) == b'{"model": "m", "prompt": "p3"}'


def test_questions_about_one_document_get_one_key(disk: Disk) -> None:
    """It is stored with the line, read back with it, and 0 for what is too short to share a beginning."""
    body = {"model": "m", "prompt": "a contract " * 1000}
    data = b"".join(good_line(number, body={**body, "prompt": f"{body['prompt']}? {number}"}) for number in range(2))
    job = disk.check(disk.sealed(data + good_line(2)))
    first, second, short = (line.prefix for line in disk.store.window(job.number, "m", 0, 10)[0])
    assert first == second == prefix_key(body)
    assert (first > 0, short) == (True, 0)
    (fact,) = disk.store.facts([LineRef(job.id, 1, 1)], disk.state).values()
    assert fact is not None
    assert fact.line.prefix == first


@pytest.mark.parametrize(
    ("data", "total"),
    [
        (BOM + good_line(0) + good_line(1), 2),
        (good_line(0).replace(b"\n", b"\r\n") + good_line(1).replace(b"\n", b"\r\n"), 2),
        (good_line(0) + good_line(1)[:-1], 2),
        (good_line(0) + b"\n\r\n", 1),
    ],
    ids=["byte order mark", "CRLF", "no last newline", "blank last lines"],
)
def test_what_editors_do_to_files_is_tolerated(disk: Disk, data: bytes, total: int) -> None:
    """Files from Windows, from shells, from editors."""
    job = disk.check(disk.sealed(data))
    assert (job.status, job.total) == ("in_progress", total)
    line = disk.store.window(job.number, "m", 0, 10)[0][-1]
    assert disk.spool.read(job.id, line.offset, line.size).startswith(b'{"model"')


BAD_FILE = b"".join(
    (
        good_line(0), b"{\n", good_line(0), good_line(1, url="/v1/moderations"), b"\xff\n", good_line(2),
        good_line(3, body={"model": "other", "prompt": "x"}), good_line(1), b"[]\n",
    )
)  # fmt: skip
BAD_LINES = [
    (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "url_mismatch"), (5, "invalid_utf8"),
    (7, "model_mismatch"), (8, "duplicate_custom_id"), (9, "invalid_json_line"),
]  # fmt: skip


def test_every_bad_line_is_listed(disk: Disk) -> None:
    """Not only the first: somebody fixes them all at once (cases 13, 15)."""
    job = disk.check(disk.sealed(BAD_FILE))
    assert job.status == "failed"
    assert disk.problems() == BAD_LINES
    assert (job.total, job.problems) == (9, 7)
    assert "line 2: invalid_json_line" in job.reason
    assert not disk.store.connection.execute("SELECT * FROM results").fetchall()


def test_lenient_gives_bad_lines_an_error_line_each(disk: Disk) -> None:
    """The good ones run; each bad one has its one end, and no custom_id appears twice (D4)."""
    job = disk.check(disk.sealed(BAD_FILE, lenient=True))
    assert (job.status, job.good, job.failed, job.waiting) == ("in_progress", 2, 7, 2)
    rows = disk.store.connection.execute(
        "SELECT r.seq, r.code, l.custom_id FROM results r JOIN lines l ON l.job=r.job AND l.idx=r.idx ORDER BY r.seq"
    ).fetchall()
    assert [(row[0], row[1]) for row in rows] == [(place, code) for place, (_, code) in enumerate(BAD_LINES)]
    named = [row[2] for row in rows if row[2] is not None]
    assert sorted(named) == ["c1", "c3"]


def test_a_job_for_one_url_takes_no_line_for_another(disk: Disk) -> None:
    """A batch names its endpoint: a line for another one is bad. Control: a job that names none takes both."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    data = good_line(0) + good_line(1, url="/v1/chat/completions", body=body)
    job = disk.check(disk.sealed(data, url="/v1/completions"))
    assert (job.status, disk.problems()) == ("failed", [(2, "url_mismatch")])
    other = disk.check(disk.sealed(data, job="11111111-1111-4111-8111-111111111112"))
    assert (other.status, other.good) == ("in_progress", 2)


def test_an_empty_file_fails(disk: Disk) -> None:
    """Nothing but blank lines."""
    assert "empty_file" in disk.check(disk.sealed(b"\n\n")).reason
    assert disk.state.jobs == {}


def test_a_file_that_is_not_the_one_announced_fails(disk: Disk) -> None:
    """A byte changed on its way, or a torn write."""
    job = disk.check(disk.sealed(good_line(0), sha256="0" * 64))
    assert (job.status, "sha256_mismatch" in job.reason) == ("failed", True)


def test_a_line_too_long_is_one_problem_and_is_not_held(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond the limit fails alone; the lines behind it are found."""
    monkeypatch.setattr(limits, "LINE_MAX_BYTES", 200)
    monkeypatch.setattr("broker.spool.BLOCK_BYTES", 64)
    data = good_line(0) + b"x" * 5000 + b"\n" + good_line(1)
    job = disk.check(disk.sealed(data, lenient=True))
    assert disk.problems() == [(2, "line_too_long")]
    assert (job.good, job.status) == (2, "in_progress")


def test_too_many_models(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has its own window: their number is bounded."""
    monkeypatch.setattr(limits, "MODELS_A_JOB_MAX_COUNT", 2)
    data = b"".join(good_line(number, body={"model": f"m{number}", "prompt": "x"}) for number in range(3))
    job = disk.check(disk.sealed(data, model="", lenient=True))
    assert disk.problems() == [(3, "too_many_models")]
    assert list(job.windows) == ["m0", "m1"]


def test_problems_beyond_the_list_are_counted(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the wrong kind altogether must not fill the store."""
    monkeypatch.setattr(limits, "PROBLEMS_LISTED_MAX_COUNT", 2)
    job = disk.check(disk.sealed(b"{\n" * 5))
    assert (len(disk.problems()), job.problems) == (2, 5)


def test_one_turn_is_one_slice(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file: beats go on between slices, and the count of lines read moves on."""
    monkeypatch.setattr(limits, "VALIDATE_LINES_A_TURN", 2)
    job = disk.sealed(b"".join(good_line(number) for number in range(5)))
    seen = []
    while job.status == "validating":
        disk.check(job, turns=1)
        seen.append(job.lines_read)
    assert seen == [2, 4, 5]


def test_a_restart_in_the_middle_goes_on_and_still_knows_the_hash(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker was killed while it checked a file: nothing is checked twice, duplicates are found all the same."""
    monkeypatch.setattr(limits, "VALIDATE_LINES_A_TURN", 2)
    job = disk.sealed(b"".join(good_line(number) for number in (0, 1, 2, 3, 0)), lenient=True)
    disk.turn_of(job)
    with disk.store.turn():
        disk.store._save_job(job)
    disk.state = reload(disk)
    disk.intake = Intake(disk.store, disk.spool)
    again = disk.state.jobs[job.id]
    assert (again.lines_read, again.good, list(again.windows)) == (2, 2, ["m"])
    disk.check(again)
    assert (again.status, again.good, disk.problems()) == ("in_progress", 4, [(5, "duplicate_custom_id")])
