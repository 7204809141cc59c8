"""One run at a time in a state folder, and it knows when the processes of the run before are gone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from broker import state_folder as module
from broker.state_folder import beside, state_folder, tail
from common.errors import RefusedError, UsageError


class Waits:
    """Counts how often somebody waits, and does something at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.said: list[str] = []
        self.then: dict[int, object] = {}

    def sleep(self, seconds: float) -> None:
        self.count += 1
        action = self.then.get(self.count)
        if callable(action):
            action()


@pytest.fixture
def waits() -> Waits:
    return Waits()


def test_a_live_run_keeps_others_out_and_is_named(tmp_path: Path, waits: Waits) -> None:
    """Exit 4 with the process that has it; free again when it is done."""
    path = tmp_path / "state"
    with (
        state_folder(path, waits.sleep, waits.said.append),
        pytest.raises(RefusedError, match=f"in use by process {os.getpid()}"),
        state_folder(path, waits.sleep, waits.said.append),
    ):
        pass
    with state_folder(path, waits.sleep, waits.said.append):
        pass
    assert waits.count == 0


def hold(path: Path) -> int:
    fd = os.open(path / "children.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_the_next_run_waits_for_the_children_of_a_killed_one(tmp_path: Path, waits: Waits) -> None:
    """SIGKILL of a run, started again at once: its broker may still be writing; nothing starts beside it."""
    with state_folder(tmp_path / "s", waits.sleep, waits.said.append) as folder:
        folder.note_children([11, 12])
    fd = hold(tmp_path / "s")
    waits.then[3] = lambda: os.close(fd)
    with state_folder(tmp_path / "s", waits.sleep, waits.said.append):
        assert waits.count == 3
    assert waits.said == ["waiting for the processes of an earlier run to end (pids 11 12)"]


def test_children_that_stay_for_ever_are_named(tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: it is the lock that is waited for, not the time."""
    monkeypatch.setattr(module, "WAIT_S", 1.0)
    with state_folder(tmp_path / "s", waits.sleep, waits.said.append) as folder:
        folder.note_children([11])
    fd = hold(tmp_path / "s")
    with pytest.raises(RefusedError, match="pids 11"), state_folder(tmp_path / "s", waits.sleep, waits.said.append):
        pass
    os.close(fd)


def test_a_removed_folder_is_gone_at_once_and_can_be_made_anew(tmp_path: Path, waits: Waits) -> None:
    """Killed in the middle of removing: no half of a store is ever taken for one, and the litter goes later."""
    path = tmp_path / ".out.haulier"
    with state_folder(path, waits.sleep, waits.said.append) as folder:
        (folder.path / "broker").mkdir()
        folder.remove()
        assert not path.exists()
    litter = tmp_path / ".out.haulier.removing.1"
    litter.mkdir()
    with state_folder(path, waits.sleep, waits.said.append):
        assert not litter.exists()
        assert not (path / "broker").exists()


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path, waits: Waits) -> None:
    """--state below a file."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--state"), state_folder(tmp_path / "file" / "s", waits.sleep, print):
        pass


def test_names_and_tails(tmp_path: Path) -> None:
    """Beside the real file, also through a link; the last lines of a log, however long it is."""
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d" / "out.jsonl")
    assert beside(str(tmp_path / "link")) == tmp_path / "d" / ".out.jsonl.haulier"
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert tail(log, 2) == ("line 99998", "line 99999")
    assert tail(tmp_path / "none", 2) == ()
