"""Deleting, retention, vacuum, checkpoints, the check for damage: none of it stalls a turn or touches a live job."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.effects import DropJob, History, SaveJob, StoreResult
from broker.inputs import ClosedJob, Now
from broker.reader import Reader
from broker.store import Store
from broker.upkeep import Upkeep
from common import limits, messages
from common.database import wal_bytes
from common.errors import RefusedError
from tests.unit.broker.kit import JOB, NOW, came, feed, fresh, later, running_job, said, wrote
from tests.unit.broker.shell_kit import Disk, good_line, reload

LINES = 30
OTHER = "00000000-0000-4000-8000-000000000002"
TABLES = ("jobs", "lines", "results", "attempts", "problems", "models")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A job that completed, and one that runs."""
    one = Disk(tmp_path)
    for name in (JOB, OTHER):
        one.check(one.sealed(b"".join(good_line(number) for number in range(LINES)), job=name))
    with one.store.turn():
        one.store.apply(
            [StoreResult(1, index, 0, index, 1, 200, "", "", 1, 1, "w", b"{}", 1.0) for index in range(LINES)]
        )
        job = one.state.jobs.pop(JOB)
        job.status, job.completed, job.ended_at = "completed", LINES, NOW.wall
        one.store.apply([SaveJob(job)])
    yield one
    one.close()


def counts(disk: Disk, job: int) -> dict[str, int]:
    column = {"jobs": "number"}
    return {
        table: disk.store.connection.execute(
            f"SELECT count(*) FROM {table} WHERE {column.get(table, 'job')}=?", (job,)
        ).fetchone()[0]
        for table in TABLES
    }


def upkeep_of(disk: Disk, keep_s: int = 0, checker: Reader | None = None) -> Upkeep:
    return Upkeep(disk.store.connection, disk.folder / "broker.sqlite", keep_s, checker)


def turn(disk: Disk, upkeep: Upkeep, now: Now = NOW) -> None:
    with disk.store.turn():
        upkeep.within_turn(now)


def test_a_deleted_job_is_gone_at_once_and_its_rows_go_in_slices(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of millions of lines is deleted while others run: no turn does more than its slice."""
    monkeypatch.setattr(limits, "DELETE_ROWS_A_TURN", 7)
    upkeep = upkeep_of(disk)
    with disk.store.turn():
        disk.store.apply([DropJob(JOB, NOW.wall)])
    assert counts(disk, 1)["jobs"] == 0
    before = sum(counts(disk, 1).values())
    turns = 0
    while sum(counts(disk, 1).values()):
        turn(disk, upkeep, later(limits.RETENTION_LOOK_S))
        left = sum(counts(disk, 1).values())
        assert before - left <= 7
        before, turns = left, turns + 1
    turn(disk, upkeep)
    assert turns > 5
    assert not upkeep.busy
    assert counts(disk, 2) == {"jobs": 1, "lines": LINES, "results": 0, "attempts": 0, "problems": 0, "models": 1}


def test_a_deletion_goes_on_after_a_restart_and_its_number_is_nobodys(disk: Disk) -> None:
    """SIGKILL between two slices: the next broker goes on, and gives no new job the old one's number."""
    disk.state.jobs.pop(OTHER)
    with disk.store.turn():
        disk.store.apply([DropJob(JOB, NOW.wall), DropJob(OTHER, NOW.wall)])
    assert reload(disk).next_job == 3
    upkeep = upkeep_of(disk)
    assert upkeep.busy
    for _ in range(4):
        turn(disk, upkeep)
    assert not upkeep.busy
    assert sum(counts(disk, 1).values()) + sum(counts(disk, 2).values()) == 0


def test_ended_jobs_go_when_they_are_kept_no_longer_and_running_ones_stay(disk: Disk) -> None:
    """--keep 30d: what ended 30 days ago goes; a job that runs for longer does not."""
    upkeep = upkeep_of(disk, keep_s=100)
    turn(disk, upkeep, later(99.0))
    assert counts(disk, 1)["jobs"] == 1
    turn(disk, upkeep, later(99.0 + limits.RETENTION_LOOK_S))
    assert (counts(disk, 1)["jobs"], counts(disk, 2)["jobs"]) == (0, 1)
    assert disk.store.closed_job(JOB) is not None


def test_without_keep_nothing_goes(disk: Disk) -> None:
    """The default: results stay until somebody deletes them."""
    turn(disk, upkeep_of(disk), later(1e9))
    assert counts(disk, 1)["results"] == LINES


def test_a_clock_that_jumps_retires_nothing(disk: Disk) -> None:
    """The wall clock is set a year ahead by mistake: nobody's results go for that."""
    upkeep = upkeep_of(disk, keep_s=100)
    turn(disk, upkeep, NOW)
    turn(disk, upkeep, Now(NOW.mono + limits.RETENTION_LOOK_S, NOW.wall + 3.2e7))
    assert counts(disk, 1)["jobs"] == 1


def test_a_quiet_store_gives_its_pages_back_and_folds_its_log(disk: Disk) -> None:
    """After a large job is deleted the file shrinks while nobody asks for anything; never in the middle of work."""
    with disk.store.turn():
        disk.store.connection.execute("UPDATE results SET body=zeroblob(100000)")
    with disk.store.turn():
        disk.store.apply([DropJob(JOB, NOW.wall)])
    upkeep = upkeep_of(disk)
    while upkeep.busy:
        turn(disk, upkeep)

    def free() -> int:
        found: int = disk.store.connection.execute("PRAGMA freelist_count").fetchone()[0]
        return found

    full = free()
    assert full > 500
    for second in range(20):
        upkeep.between_turns(later(second), quiet=False)
    assert free() == full
    for second in range(20, 40):
        upkeep.between_turns(later(second), quiet=True)
    assert free() == 0
    assert wal_bytes(disk.folder / "broker.sqlite") == 0


def test_a_sound_store_is_checked_and_the_check_ends(disk: Disk) -> None:
    """Each start reads the whole file once, beside the work."""
    upkeep = upkeep_of(disk, checker=Reader(disk.folder / "broker.sqlite"))
    until(lambda: upkeep._checker is None, lambda: upkeep.between_turns(NOW, quiet=False))


def test_a_damaged_store_is_refused_with_advice(tmp_path: Path) -> None:
    """A page went bad on the disk: the broker says so and what to do, and acknowledges nothing more."""
    disk = Disk(tmp_path)
    disk.check(disk.sealed(b"".join(good_line(number) for number in range(3000))))
    disk.close()
    path = tmp_path / "broker.sqlite"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 8192] = b"\xff" * 8192
    path.write_bytes(data)
    store = Store.open(path)
    upkeep = Upkeep(store.connection, path, 0, Reader(path))
    with pytest.raises(RefusedError, match=r"damaged.*Restore the whole --state"):
        until(lambda: False, lambda: upkeep.between_turns(NOW, quiet=False))
    upkeep.close()
    store.close()


def test_old_logins_go_and_what_happened_to_jobs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that flaps for a year writes two entries each time: the store does not grow with it."""
    monkeypatch.setattr(limits, "HISTORY_KEPT_MAX_COUNT", 10)
    store = Store.open(tmp_path / "broker.sqlite")
    store.take_over()
    upkeep = Upkeep(store.connection, tmp_path / "broker.sqlite", 0)
    with store.turn():
        store.apply([History(1.0, "login", "", "w", "") for _ in range(20)])
        store.apply([History(1.0, "started", JOB, "", "")])
        store.apply([History(1.0, "login", "", "w", "") for _ in range(20)])
        upkeep.within_turn(NOW)
    kinds = [row[0] for row in store.connection.execute("SELECT kind FROM history ORDER BY id")]
    assert kinds == ["started", *["login"] * 10]
    store.close()


@pytest.mark.parametrize(
    ("failure", "refused"), [(sqlite3.OperationalError("locked"), False), (sqlite3.DatabaseError("malformed"), True)]
)
def test_damage_that_tidying_finds_is_the_storage_error(tmp_path: Path, failure: Exception, refused: bool) -> None:
    """A reader in the way is waited for; damage ends the broker with what to do, as anywhere else."""

    class Failing:
        def execute(self, statement: str) -> Any:
            if "busy_timeout" in statement:
                return None
            raise failure

    upkeep = Upkeep(Store.open(tmp_path / "broker.sqlite").connection, tmp_path / "broker.sqlite", 0)
    real, upkeep._db = upkeep._db, Failing()  # type: ignore[assignment]
    upkeep.between_turns(NOW, quiet=True)
    with pytest.raises(RefusedError, match="malformed") if refused else contextlib.nullcontext():
        upkeep.between_turns(later(limits.TIDY_AFTER_S), quiet=True)
    real.close()


def test_only_ended_jobs_are_deleted_and_only_by_who_may_see_them() -> None:
    """DELETE of a job that runs is refused with what to do; a stranger learns not even that it exists."""
    state = fresh()
    running_job(state, 2, owner="bob")
    ask = messages.DeleteJob(1, JOB)
    (failure,) = said(feed(state, came(ask, user="bob")), messages.Failure)
    assert (failure.code, failure.exit_code) == ("job_open", 4)
    assert "haulier cancel" in failure.message
    assert not said(feed(state, came(ask, user="eve")), messages.Failure)


@pytest.mark.parametrize(("user", "admin", "gone"), [("bob", False, True), ("eve", False, False), ("eve", True, True)])
def test_an_ended_job_is_deleted_by_its_owner_or_an_admin(user: str, admin: bool, gone: bool) -> None:
    """Told again after a lost answer it says the same, and writes nothing a second time."""
    state = fresh()
    first = feed(state, came(messages.DeleteJob(1, JOB), user=user, admin=admin, closed=ClosedJob("bob", 1, "", 9)))
    assert bool(wrote(first, DropJob)) is gone
    assert [one.lines for one in said(first, messages.Deleted)] == [9] * gone
    again = came(messages.DeleteJob(2, JOB), user=user, admin=admin, closed=ClosedJob("bob", 0, "", deleted=True))
    second = feed(state, again)
    assert not wrote(second, DropJob)
    assert [one.lines for one in said(second, messages.Deleted)] == [0] * gone


def test_a_deleted_jobs_id_is_never_used_again(disk: Disk) -> None:
    """A worker far away still holds a result of the old job: a new one of that id must never be given it."""
    with disk.store.turn():
        disk.store.apply([DropJob(JOB, NOW.wall)])
    closed = disk.store.closed_job(JOB)
    order = messages.Submit(1, JOB, "n", 10, "0" * 64, False, 0, 0, "")
    (failure,) = said(feed(fresh(), came(order, admin=True, closed=closed)), messages.Failure)
    assert failure.code == "job_deleted"


def until(holds: Any, step: Any) -> None:
    """Step until ``holds``; the number of steps bounds a hang."""
    for _ in range(2000):
        step()
        if holds():
            return
        time.sleep(0.005)
    pytest.fail("it does not come to an end")
