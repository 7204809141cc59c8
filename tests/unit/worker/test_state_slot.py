"""One state folder, any number of workers: each has a slot of its own, and a dead one's results are delivered."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import RefusedError
from common.messages import LineRef
from worker import effects as do
from worker import state_slot
from worker.outbox import Outbox
from worker.structures import Outcome


def store(slot: state_slot.StateSlot, index: int) -> None:
    box = Outbox(slot.folder)
    found = box.begin()
    box.write([do.Save(Outcome(LineRef("job", index, 1), "ok", 200, 1, 1, b"{}"), "s")], found.incarnation)
    box.close()


def test_workers_that_share_a_folder_share_nothing_in_it(tmp_path: Path) -> None:
    """docker compose up --scale worker=3 on one volume."""
    slots = [state_slot.take(tmp_path) for _ in range(3)]
    assert [slot.number for slot in slots] == [0, 1, 2]
    slots[1].release()
    again = state_slot.take(tmp_path)
    assert again.number == 1, "a restarted worker finds the outbox it left"
    for slot in (slots[0], again, slots[2]):
        slot.release()


def test_a_dead_workers_results_are_adopted(tmp_path: Path) -> None:
    """Scaled down from three to one while the broker was away: what the others finished is handed over all the same."""
    slots = [state_slot.take(tmp_path) for _ in range(3)]
    for index, slot in enumerate(slots):
        store(slot, index)
        if index:
            slot.release()
    box = Outbox(slots[0].folder)
    assert state_slot.adopt_orphans(slots[0], box) == {1: 1, 2: 1}
    assert sorted(row[0].index for row in box.rows()) == [0, 1, 2]
    assert state_slot.adopt_orphans(slots[0], box) == {}
    box.close()
    slots[0].release()
    assert state_slot.take(tmp_path).number == 0


def test_a_live_workers_results_are_its_own(tmp_path: Path) -> None:
    """The other worker is well: nobody takes what it is about to deliver."""
    mine, other = state_slot.take(tmp_path), state_slot.take(tmp_path)
    store(other, 1)
    box = Outbox(mine.folder)
    assert state_slot.adopt_orphans(mine, box) == {}
    box.close()


def test_a_slot_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    """One damaged outbox does not keep the other workers from starting."""
    mine = state_slot.take(tmp_path)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "outbox.db").write_bytes(b"damaged" * 1000)
    box = Outbox(mine.folder)
    assert state_slot.adopt_orphans(mine, box) == {}
    box.close()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """--state names the wrong thing."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="--state"):
        state_slot.take(tmp_path / "file")
