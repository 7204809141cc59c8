"""The store: one commit a turn, one end a line, one broker at a time, and a state that comes back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.effects import AssignLine, EndAttempt, ForgetWorker, History, ReturnLine, SaveJob, SaveSession, StoreResult
from broker.schema import MIGRATIONS
from broker.store import Store, runs
from common import limits
from common.errors import InvariantError, RefusedError
from common.messages import LineRef
from tests.unit.broker.kit import JOB, NOW, STORE
from tests.unit.broker.shell_kit import Disk, good_line, reload


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path)
    one.check(one.sealed(b"".join(good_line(number) for number in range(6))))
    yield one
    one.close()


def stored(index: int, seq: int = 0, kind: int = 0, attempt: int = 1) -> StoreResult:
    return StoreResult(1, index, kind, seq, attempt, 200, "", "", 1, 1, "w", b"{}", 1.0)


def states(disk: Disk) -> list[int]:
    return [row[0] for row in disk.store.connection.execute("SELECT state FROM lines ORDER BY idx")]


def test_a_turn_is_one_commit(disk: Disk) -> None:
    """A failure in the middle of a turn leaves nothing of it."""
    with pytest.raises(AttributeError), disk.store.turn():
        disk.store.apply([AssignLine(1, 1, "w", 1, 0), SaveJob(None)])  # type: ignore[arg-type]
    assert states(disk) == [0] * 6
    with disk.store.turn():
        disk.store.apply([AssignLine(1, 1, "w", 1, 0), stored(1), EndAttempt(1, 0, 1, "w", "known", 1.0)])
    assert states(disk) == [1, 2, 0, 0, 0, 0]


def test_a_line_ends_once(disk: Disk) -> None:
    """The store's own guard behind the rules (D4): a second end is a bug, and stops the process."""
    with disk.store.turn():
        disk.store.apply([stored(0)])
    with pytest.raises(InvariantError, match="refuses"), disk.store.turn():
        disk.store.apply([stored(0, seq=1)])
    with pytest.raises(InvariantError, match="had none"), disk.store.turn():
        disk.store.apply([stored(99, seq=1)])


def test_control_without_the_unique_index_a_line_could_end_twice(disk: Disk) -> None:
    """Control: the index is what refuses."""
    disk.store.connection.execute("DROP INDEX results_by_line")
    with disk.store.turn():
        disk.store.apply([stored(0)])
    with disk.store.turn():
        disk.store.connection.execute("INSERT INTO results SELECT 99, job, idx, kind, 5, attempt, status_code, code, "
                                      "message, 0, 0, worker, stored_at, body, notes FROM results")  # fmt: skip
    assert disk.store.connection.execute("SELECT count(*) FROM results WHERE idx=0").fetchone()[0] == 2


def test_an_ended_line_is_neither_assigned_nor_returned(disk: Disk) -> None:
    """Writes of the same turn in the wrong order cannot bring an ended line back."""
    with disk.store.turn():
        disk.store.apply([stored(0), AssignLine(2, 2, "w", 1, 0), ReturnLine(0, 1, 0)])
    assert states(disk)[0] == 2


def test_a_broker_that_was_replaced_writes_no_more(disk: Disk, tmp_path: Path) -> None:
    """A standby took over while this one hung: its next turn fails, and nothing of it is there."""
    other = Store.open(tmp_path / "broker.sqlite")
    other.take_over()
    assert (other.store_id, other.incarnation) == (STORE, 2)
    with pytest.raises(RefusedError, match="another broker took this store over"), disk.store.turn():
        disk.store.apply([AssignLine(1, 1, "w", 1, 0)])
    assert states(disk) == [0] * 6
    other.close()


def test_a_full_disk_is_a_clear_error_and_nothing_is_half_there(disk: Disk) -> None:
    """D6: the turn fails as a whole, with what to do about it."""
    pages = disk.store.connection.execute("PRAGMA page_count").fetchone()[0]
    disk.store.connection.execute(f"PRAGMA max_page_count={pages}")
    big = StoreResult(1, 0, 0, 0, 1, 200, "", "", 1, 1, "w", b"x" * 10**6, 1.0)
    with pytest.raises(RefusedError, match=r"cannot be written.*full"), disk.store.turn():
        disk.store.apply([big])
    assert states(disk) == [0] * 6


def test_windows_walk_through_the_waiting_lines(disk: Disk) -> None:
    """Assigned and ended lines are left out; the cursor goes on behind the last one given."""
    with disk.store.turn():
        disk.store.apply([AssignLine(1, 1, "w", 1, 1), stored(2)])
    first = disk.store.window(1, "m", 0, 2)
    assert ([line.index for line in first[0]], first[1:]) == ([0, 3], (4, False))
    rest = disk.store.window(1, "m", first[1], 10)
    assert ([line.index for line in rest[0]], rest[1:]) == ([4, 5], (6, True))
    assert disk.store.window(1, "m", 6, 10) == ((), 6, True)


def test_facts_see_the_writes_of_this_turn(disk: Disk) -> None:
    """A result and its repetition in one turn: the second is judged by what the first did."""
    with disk.store.turn():
        disk.store.apply([stored(0, attempt=3)])
        facts = disk.store.facts(
            [LineRef(JOB, 0, 3), LineRef(JOB, 1, 1), LineRef(JOB, 77, 1), LineRef("x", 0, 1)], disk.state
        )
    found: list[Any] = list(facts.values())
    assert (found[0].state, found[0].result_attempt) == (2, 3)
    assert (found[1].state, found[1].line.index, found[1].line.model) == (0, 1, "m")
    assert found[2:] == [None, None]


def test_waiting_lines_end_in_slices(disk: Disk) -> None:
    """Cancel of a long job: each waiting line gets its error line, in order, a slice a turn."""
    job = disk.state.jobs[JOB]
    with disk.store.turn():
        disk.store.apply([AssignLine(1, 1, "w", 1, 1)])
        assert disk.store.end_waiting(job, "batch_cancelled", "x", 2, 1.0) == (2, True)
        job.failed += 2
        assert disk.store.end_waiting(job, "batch_cancelled", "x", 2, 1.0) == (2, True)
        job.failed += 2
    with disk.store.turn():  # a line before the place reached so far waits again meanwhile
        disk.store.apply([ReturnLine(0, 1, 1)])
        assert disk.store.end_waiting(job, "batch_cancelled", "x", 2, 1.0) == (1, True)
        job.failed += 1
        assert disk.store.end_waiting(job, "batch_cancelled", "x", 2, 1.0) == (1, False)
    rows = disk.store.connection.execute("SELECT seq, code FROM results ORDER BY seq").fetchall()
    assert rows == [(place, "batch_cancelled") for place in range(6)]


def test_what_a_restart_finds(disk: Disk) -> None:
    """Jobs, who held what, and the last login of each worker: D3 rests on it."""
    job = disk.state.jobs[JOB]
    job.completed = 1
    with disk.store.turn():
        disk.store.apply([
            AssignLine(2, 1, "w", 1, 1), stored(2), SaveJob(job), SaveSession("w", "u", 3, 4, 5, "open", 1.0),
            History(1.0, "login", "", "w", ""),
        ])  # fmt: skip
    state = reload(disk)
    again = state.jobs[JOB]
    line = again.assigned[1]
    assert (line.attempt, line.held, line.worker, line.session) == (2, 1, "w", None)
    assert (again.waiting, again.completed, again.status) == (4, 1, "in_progress")
    assert (state.absent, state.grace_until) == ({"w"}, NOW.mono + 30.0)
    assert (state.known["w"].incarnation, state.known["w"].login, state.next_epoch) == (3, 4, 6)
    assert state.next_job == 2
    state.check()


def test_a_deadline_survives_a_restart(disk: Disk) -> None:
    """--window: what was left of it in wall time is what is left of it now."""
    job = disk.state.jobs[JOB]
    job.window_s, job.created_at = 100, NOW.wall - 40
    with disk.store.turn():
        disk.store.connection.execute("UPDATE jobs SET window_s=100, created_at=?", (NOW.wall - 40,))
    assert reload(disk).jobs[JOB].deadline == pytest.approx(NOW.mono + 60)


def test_nothing_held_means_no_grace(disk: Disk) -> None:
    """A broker that was idle when it ended begins at once."""
    assert reload(disk).grace_until == 0


def test_a_newer_store_is_refused_by_name(tmp_path: Path) -> None:
    """A downgrade must not write into what it does not understand."""
    connection = sqlite3.connect(tmp_path / "broker.sqlite")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(RefusedError, match="newer"):
        Store.open(tmp_path / "broker.sqlite")


def test_a_store_of_the_version_before_notes_migrates_with_its_results(tmp_path: Path) -> None:
    """An upgrade with answers in the store: they are there, and nobody knows what they waited for."""
    path = tmp_path / "broker.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    for migration in MIGRATIONS[:3]:
        migration(connection)
    connection.execute("INSERT INTO results VALUES (1, 1, 0, 0, 0, 1, 200, '', '', 1, 1, 'w', 1.0, x'7b7d')")
    connection.execute("PRAGMA user_version=3")
    connection.close()
    store = Store.open(path)
    assert store.connection.execute("SELECT body, notes FROM results").fetchall() == [(b"{}", "")]
    store.close()


def test_a_store_of_the_version_before_beginnings_migrates_with_its_lines(tmp_path: Path) -> None:
    """An upgrade in the middle of a job: its lines have no key, and go where there is room, as they did."""
    path = tmp_path / "broker.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    for migration in MIGRATIONS[:4]:
        migration(connection)
    connection.execute("INSERT INTO models VALUES (1, 0, 'm')")
    connection.execute(
        "INSERT INTO lines (job, idx, line, custom_id, model, url, offset, size) VALUES (1, 0, 1, 'c', 0, 0, 0, 9)"
    )
    connection.execute("PRAGMA user_version=4")
    connection.close()
    store = Store.open(path)
    assert [(line.size, line.prefix) for line in store.window(1, "m", 0, 9)[0]] == [(9, 0)]
    store.close()


def test_a_store_of_the_version_before_urls_migrates_with_its_jobs(tmp_path: Path) -> None:
    """An upgrade in the middle of a job: it is for any url, as it was."""
    path = tmp_path / "broker.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    for migration in MIGRATIONS[:5]:
        migration(connection)
    connection.execute(
        "INSERT INTO jobs (number, id, owner, name, status, size, sha256, lenient, priority, window_s, model, "
        "created_at) VALUES (1, 'j', 'me', 'n', 'completed', 1, '', 0, 0, 0, 'm', 1.0)"
    )
    connection.execute("PRAGMA user_version=5")
    connection.close()
    store = Store.open(path)
    assert store.connection.execute("SELECT id, url FROM jobs").fetchall() == [("j", "")]
    store.close()


def test_neighbours_are_written_as_one_run() -> None:
    """Lines go out in order, with gaps where others had them; whatever else differs keeps rows apart."""
    assert runs([]) == []
    assert runs([("a", 3)]) == [("a", 3, 3)]
    assert runs([("a", 0), ("a", 1), ("a", 2), ("a", 4), ("b", 5), ("b", 6), ("b", 5)]) == [
        ("a", 0, 2), ("a", 4, 4), ("b", 5, 6), ("b", 5, 5),
    ]  # fmt: skip
    assert runs([(0,), (1,), (1,)]) == [(0, 1), (1, 1)]


def test_a_store_cut_to_nothing_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    """A restore that failed half way, a disk that lost a file's length: an empty file is a valid new database, and to
    take it for one would silently forget every job."""
    path = tmp_path / "broker.sqlite"
    Store.open(path).close()
    (tmp_path / "endpoint").write_text("tcp://somewhere")
    path.write_bytes(b"")
    with pytest.raises(RefusedError, match="damaged"):
        Store.open(path)
    (tmp_path / "endpoint").unlink()
    Store.open(path).close()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_store_cut_short_is_refused_with_advice(tmp_path: Path, share: float) -> None:
    """Only a part of the file came back from a backup (D6)."""
    path = tmp_path / "broker.sqlite"
    Store.open(path).close()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(RefusedError, match=r"damaged|malformed"):
        Store.open(path)


def test_a_forgotten_worker_has_no_row_and_the_others_keep_their_order(disk: Disk) -> None:
    """What is bounded in memory is bounded in the store; who came last is last after a restart too."""
    with disk.store.turn():
        disk.store.apply([SaveSession(name, "u", 1, 1, epoch, "lost", at) for name, epoch, at in
                          (("b", 1, 1.0), ("c", 2, 2.0), ("a", 3, 3.0))])  # fmt: skip
        disk.store.apply([ForgetWorker("b")])
    state = reload(disk)
    assert list(state.known) == ["c", "a"]
    assert state.next_epoch == 4


def test_lists_of_models_in_memory_are_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that runs for a year: a list that is no longer kept is read again, a line's model is right."""
    monkeypatch.setattr(limits, "MODEL_LISTS_KEPT_MAX_COUNT", 2)
    for number in range(10):
        disk.store.models(number)
        assert len(disk.store._models) <= 2
    assert [line.model for line in disk.store.window(1, "m", 0, 2)[0]] == ["m", "m"]


def test_a_job_whose_lines_all_ended_leaves_no_place_behind(disk: Disk) -> None:
    """Where a cancelled job's lines were ended up to is kept only while there are more."""
    job = disk.state.jobs[JOB]
    with disk.store.turn():
        assert disk.store.end_waiting(job, "batch_cancelled", "x", 4, 1.0) == (4, True)
        assert disk.store._end_from == {1: 4}
        job.failed += 4
        disk.store.end_waiting(job, "batch_cancelled", "x", 4, 1.0)
    assert disk.store._end_from == {}
