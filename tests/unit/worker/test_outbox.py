"""The outbox (D1): durable before anyone is told, gone only when told to, whole after any death of its process."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import limits
from common.errors import InvariantError, RefusedError
from common.messages import LineRef
from worker import effects as do
from worker.outbox import MIGRATIONS, Outbox, OutboxBlocked
from worker.structures import Outcome

CHILD = """
import os, sys
from pathlib import Path
from common.messages import LineRef
from worker import effects as do
from worker.outbox import Outbox
from worker.structures import Outcome
folder, when = Path(sys.argv[1]), sys.argv[2]
box = Outbox(folder)
found = box.begin()
save = do.Save(Outcome(LineRef("job", 0, 1), "ok", 200, 1, 1, b"{}"), "store-a")
if when == "before":
    # the control: told before the commit
    real = box._write
    def write(connection, effects, incarnation):
        real(connection, effects, incarnation)
        print("told", flush=True)
        sys.stdin.read()
    box._write = write
box.write([do.NoteRunning((LineRef("job", 1, 1),))], found.incarnation)
box.write([save], found.incarnation)
print("told", flush=True)
sys.stdin.read()
"""


def outcome(index: int, body: bytes = b'{"a":1}') -> Outcome:
    return Outcome(LineRef("job", index, 1), "ok", 200, 5, 2, body)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Outbox]:
    made = Outbox(tmp_path)
    yield made
    made.close()


def killed(folder: Path, when: str) -> None:
    """A process that says a result is stored, and is killed at that very moment."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), when], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != "told":
            assert child.poll() is None
        child.send_signal(signal.SIGKILL)


def test_what_was_told_survives_a_kill(tmp_path: Path) -> None:
    """kill -9 right after the result was reported: it is there, and the run that was under way is known."""
    killed(tmp_path, "after")
    box = Outbox(tmp_path)
    found = box.begin()
    assert [row[0] for row in found.rows] == [LineRef("job", 0, 1)]
    assert found.incarnation == 2
    assert found.ran == (LineRef("job", 1, 1),)
    assert box.begin().ran == ()
    box.close()


def test_control_what_is_told_before_the_commit_is_lost(tmp_path: Path) -> None:
    """The control of D1: speak inside the transaction, and a kill at that moment loses what was told."""
    killed(tmp_path, "before")
    box = Outbox(tmp_path)
    assert box.begin().rows == ()
    box.close()


def test_a_commit_with_a_result_is_synced_and_one_without_is_not(box: Outbox) -> None:
    """The sync is what gates DONE; the running set is evidence only and costs no sync."""
    found = box.begin()
    ran: list[str] = []
    box._connection.set_trace_callback(ran.append)
    box.write([do.NoteRunning((LineRef("job", 0, 1),))], found.incarnation)
    assert "PRAGMA synchronous=NORMAL" in ran
    ran.clear()
    box.write([do.Save(outcome(0), "s")], found.incarnation)
    assert ran.index("PRAGMA synchronous=FULL") < ran.index("BEGIN IMMEDIATE") < ran.index("COMMIT")
    assert box._connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_the_incarnation_only_grows_and_the_name_stays(tmp_path: Path) -> None:
    """A container restarts with the same host name and pid: it is the same worker, in a later run."""
    runs = []
    for _ in range(3):
        box = Outbox(tmp_path)
        runs.append(box.begin())
        box.close()
    assert [run.incarnation for run in runs] == [1, 2, 3]
    assert len({run.worker for run in runs}) == 1


def test_results_are_read_back_from_memory_or_disk(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """More results than the cache holds: each comes back as it was stored."""
    monkeypatch.setattr(limits, "OUTBOX_CACHE_MAX_BYTES", 20)
    found = box.begin()
    many = [outcome(index, b"%010d" % index) for index in range(5)]
    box.write([do.Save(one, "s") for one in many], found.incarnation)
    assert box.read([one.ref for one in many]) == many
    assert box._cached_bytes <= 20
    with pytest.raises(InvariantError):
        box.read([LineRef("job", 99, 1)])


def test_rows_leave_only_when_told_to(box: Outbox) -> None:
    """Acknowledged ones go; refused ones are kept aside and not offered again; of each store its own are known."""
    found = box.begin()
    box.write([do.Save(outcome(index), "s" if index < 3 else "t") for index in range(4)], found.incarnation)
    box.write([do.Discard((LineRef("job", 0, 1),)), do.SetAside(LineRef("job", 1, 1), "why")], found.incarnation)
    assert [(row[0].index, row[1]) for row in box.rows()] == [(2, "s"), (3, "t")]
    assert box.begin().aside == 1


def test_a_full_disk_writes_nothing_and_says_so(box: Outbox) -> None:
    """D6: all or nothing; what did not fit is tried again and then fits."""
    found = box.begin()
    pages = box._connection.execute("PRAGMA page_count").fetchone()[0]
    box._connection.execute(f"PRAGMA max_page_count={pages + 2}")
    effects: list[do.Save | do.Discard | do.SetAside | do.NoteRunning] = [
        do.Save(outcome(0), "s"), do.Save(outcome(1, b"x" * 100_000), "s"),
    ]  # fmt: skip
    with pytest.raises(OutboxBlocked, match="full"):
        box.write(effects, found.incarnation)
    assert box.rows() == []
    box._connection.execute("PRAGMA max_page_count=1000000")
    box.write(effects, found.incarnation)
    assert len(box.rows()) == 2


def test_a_damaged_outbox_is_refused_in_words(tmp_path: Path) -> None:
    """D6: a truncated file: say which file and what to do, and touch nothing."""
    (tmp_path / "outbox.db").write_bytes(b"this is not a database, but it is long enough to look at" * 100)
    with pytest.raises(RefusedError, match=r"outbox\.db"):
        Outbox(tmp_path)


def test_a_newer_outbox_is_refused_by_name(tmp_path: Path) -> None:
    """A worker was downgraded: it must not guess at rows it does not know."""
    Outbox(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "outbox.db")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(RefusedError, match="newer"):
        Outbox(tmp_path)


def test_tidying_changes_no_row(box: Outbox) -> None:
    """Idle: the log is folded in."""
    found = box.begin()
    box.write([do.Save(outcome(0), "s")], found.incarnation)
    box.tidy()
    assert len(box.rows()) == 1
    assert box.wal_bytes >= 0


def test_a_run_that_ends_in_order_leaves_no_evidence(box: Outbox) -> None:
    """SIGTERM in the middle of a long line: it was stopped by an operator, and nothing it ran is to blame (D5)."""
    found = box.begin()
    box.write([do.NoteRunning((LineRef("job", 1, 1),))], found.incarnation)
    box.leave()
    assert box.begin().ran == ()


def test_a_line_stopped_without_a_result_is_evidence_no_more(box: Outbox) -> None:
    """Another worker's result was first, the line was stopped here; a crash hours later is not its doing (D5)."""
    found = box.begin()
    refs = tuple(LineRef("job", index, 1) for index in range(2))
    box.write([do.NoteRunning(refs)], found.incarnation)
    box.write([do.NoteStopped(refs[:1])], found.incarnation)
    assert box.begin().ran == refs[1:]


def test_a_lost_stores_answer_stands_in_no_ones_way(box: Outbox) -> None:
    """The broker's volume was lost and the job submitted again under its id: the same line and attempt is answered
    anew. The old row is kept aside; the new one is stored, read back and deleted by itself (D1).
    """
    found = box.begin()
    box.write([do.Save(outcome(0, b"old"), "lost")], found.incarnation)
    box.write([do.SetAside(outcome(0).ref, "lost"), do.Save(outcome(0, b"new"), "fresh")], found.incarnation)
    assert [row[1] for row in box.rows()] == ["fresh"]
    assert box.read([outcome(0).ref])[0].body == b"new"
    box.write([do.Discard((outcome(0).ref,))], found.incarnation)
    assert box.rows() == []
    assert box.begin().aside == 1


def test_an_orphans_answer_for_another_store_is_not_lost(tmp_path: Path, box: Outbox) -> None:
    """Two volumes of workers, a broker's store lost between them: the same line was answered for each store."""
    mine = box.begin().incarnation
    box.write([do.Save(outcome(0, b"mine"), "fresh")], mine)
    (tmp_path / "orphan").mkdir()
    orphan = Outbox(tmp_path / "orphan")
    theirs = orphan.begin().incarnation
    orphan.write([do.Save(outcome(0, b"theirs"), "lost"), do.Save(outcome(1, b"other"), "lost")], theirs)
    assert box.adopt(orphan) == 1
    assert [(row[0].index, row[1]) for row in box.rows()] == [(0, "fresh"), (1, "lost")]
    assert orphan.rows() == []
    assert orphan.begin().aside == 1
    orphan.close()


def test_an_outbox_of_the_first_version_migrates_with_its_rows(tmp_path: Path) -> None:
    """An upgrade with finished work in the outbox: all of it is there, what was set aside too."""
    connection = sqlite3.connect(tmp_path / "outbox.db", isolation_level=None)
    MIGRATIONS[0](connection)
    columns = "(store, job, line, attempt, status, status_code, prompt_tokens, completion_tokens, aside, body)"
    for line, aside in ((0, None), (1, "refused")):
        values = ("s", "job", line, 1, "ok", 200, 1, 1, aside, b"{}")
        connection.execute(f"INSERT INTO result {columns} VALUES (?,?,?,?,?,?,?,?,?,?)", values)
    connection.execute("PRAGMA user_version=1")
    connection.close()
    box = Outbox(tmp_path)
    found = box.begin()
    box.close()
    assert [row[0].index for row in found.rows] == [0]
    assert found.aside == 1


def test_notes_survive_a_restart_and_move_with_an_orphan(tmp_path: Path, box: Outbox) -> None:
    """A worker dies between a result's commit and its ACK: what the line waited for is delivered with it. The size of
    such a row is the one it had when it was stored."""
    incarnation = box.begin().incarnation
    told = outcome(0)._replace(notes="0.00 s, step 1: admitted\n0.50 s: ended")
    long = outcome(1, b"x" * (limits.PART_MAX_BYTES + 1))._replace(notes="0.50 s: ended")
    box.write([do.Save(one, "store") for one in (told, long)], incarnation)
    box.close()
    again = Outbox(tmp_path)
    assert again.read([told.ref, long.ref]) == [told, long]
    assert [size for _, _, size in again.rows()] == [told.size, long.size]
    assert (told.size, long.size) == (len(told.body) + len(told.notes), len(long.body))
    (tmp_path / "heir").mkdir()
    heir = Outbox(tmp_path / "heir")
    heir.begin()
    assert heir.adopt(again) == 2
    assert heir.read([told.ref]) == [told]
    for one in (heir, again):
        one.close()


def test_notes_never_make_a_short_result_long() -> None:
    """A body of just one message: with its notes it still goes as one."""
    edge = outcome(0, b"x" * limits.PART_MAX_BYTES)._replace(notes="0.50 s: ended")
    assert edge.size == limits.PART_MAX_BYTES


def test_an_outbox_that_was_large_gives_its_pages_back(box: Outbox) -> None:
    """An outage of a night filled it; once all is delivered the disk gets its room back, a little each time."""
    incarnation = box.begin().incarnation
    held = [outcome(index, b"x" * 100_000) for index in range(20)]
    box.write([do.Save(one, "store") for one in held], incarnation)
    box.write([do.Discard(tuple(one.ref for one in held))], incarnation)
    free = box._connection.execute("PRAGMA freelist_count").fetchone()[0]
    box.tidy()
    left = box._connection.execute("PRAGMA freelist_count").fetchone()[0]
    assert free - left >= 60


USES = {
    "begin": lambda box: box.begin(),
    "rows": lambda box: box.rows(),
    "read": lambda box: box.read([LineRef("job", 0, 1)]),
    "write": lambda box: box.write([do.Save(outcome(1), "s")], 1),
    "tidy": lambda box: box.tidy(),
    "adopt": lambda box: Outbox(box._path.parent.parent / "other").adopt(box),
}


@pytest.mark.parametrize("use", [use for use in USES if use != "tidy"])
def test_damage_found_in_any_use_is_the_storage_error_and_no_bug(tmp_path: Path, use: str) -> None:
    """D6: pages went bad under a file whose head is whole: exit 4 with what to do, wherever it is noticed first."""
    (tmp_path / "box").mkdir()
    (tmp_path / "other").mkdir()
    box = Outbox(tmp_path / "box")
    found = box.begin()
    for index in range(40):
        box.write([do.Save(outcome(index + 10, b"x" * 2000), "s")], found.incarnation)
    box.close()
    path = tmp_path / "box" / "outbox.db"
    broken = Outbox(tmp_path / "box")
    broken.tidy()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    try:
        with pytest.raises(RefusedError, match=r"outbox\.db is damaged.*--state"):
            USES[use](broken)
    finally:
        broken.close()


IO, BAD = sqlite3.OperationalError("it said so"), sqlite3.DatabaseError("it said so")


@pytest.mark.parametrize(
    ("use", "failure", "kind"),
    [
        ("begin", IO, RefusedError), ("write", IO, OutboxBlocked), ("tidy", IO, OutboxBlocked),
        ("begin", BAD, RefusedError), ("write", BAD, RefusedError), ("tidy", BAD, RefusedError),
    ],
)  # fmt: skip
def test_what_may_pass_is_told_from_what_stands(
    box: Outbox, use: str, failure: sqlite3.Error, kind: type[Exception]
) -> None:
    """A lock, an input or output error: a run that has begun waits, one that begins says so and ends with exit 4."""

    class Failing:
        def __getattr__(self, name: str) -> object:
            raise failure

    real, box._connection = box._connection, Failing()  # type: ignore[assignment]
    box._database.conn, kept = Failing(), box._database.conn  # type: ignore[assignment]
    with pytest.raises(kind, match="it said so"):
        USES[use](box)
    box._connection, box._database.conn = real, kept
