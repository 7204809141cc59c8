"""A standby broker: it never takes what is held, takes it as soon as it is free, and tells of a holder that hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.standby import Standby, pulse
from common import limits
from common.locks import Lock
from common.metrics import Metrics


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Room:
    """A state folder whose lock an active broker holds, and a standby beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active, self.lock = Lock(folder / "lock"), Lock(folder / "lock")
        assert self.active.try_take()
        pulse(folder)
        self.clock: Any = Clock()
        self.figures = Metrics()
        self.standby = Standby(self.lock, folder, self.clock, self.figures)
        self.beats = 0

    def beat(self) -> None:
        """The active broker's pulse, at a time of its own."""
        self.beats += 1
        os.utime(self.folder / "pulse", ns=(self.beats, self.beats))

    def figure(self, name: str) -> float:
        value = self.figures.registry.get_sample_value(f"haulier_{name}")
        assert value is not None
        return value


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    one = Room(tmp_path)
    yield one
    one.active.release()
    one.lock.release()


def test_a_held_store_is_never_taken(room: Room) -> None:
    """However long the active one is silent: it may wake up and write."""
    for _ in range(5):
        room.clock.now += 1000.0
        assert not room.standby.look()
    assert not room.lock.try_take()


def test_the_store_is_taken_at_the_first_look_after_its_holders_end(room: Room) -> None:
    """The active broker is killed: the kernel lets the lock go, and the standby is next."""
    assert not room.standby.look()
    room.active.release()
    assert room.standby.look()
    assert not room.active.try_take()


def test_an_active_broker_that_does_turns_is_not_reported(room: Room) -> None:
    """Hours of standing by beside a healthy broker leave no line in the log."""
    with capture_logs() as lines:
        for _ in range(100):
            room.clock.now += limits.BEAT_S
            room.beat()
            assert not room.standby.look()
    assert lines == []
    assert not room.standby.hung


def test_a_hung_active_broker_is_reported_again_and_again_and_its_return_once(room: Room) -> None:
    """A process stopped or stuck in a disk's call: the standby says so, with what to do, and counts the silence."""
    with capture_logs() as lines:
        for _ in range(30):
            room.clock.now += 1.0
            room.standby.look()
        said = [line for line in lines if line["event"] == "active_hung"]
        assert len(said) == 3  # at 5, 15 and 25 s
        assert "takes over" in said[0]["advice"]
        assert room.standby.hung
        assert room.figure("active_silent_seconds") == 30.0
        room.beat()
        room.standby.look()
    assert [line["event"] for line in lines][-1] == "active_beats_again"
    assert not room.standby.hung
    assert room.figure("active_silent_seconds") == 0.0


def test_waiting_ends_with_the_lock_or_with_the_word_to_stop(room: Room) -> None:
    """SIGTERM while it stands by ends it with nothing taken."""
    stop = threading.Event()
    stop.set()
    assert not room.standby.wait(stop)
    assert room.figure("standby") == 1.0
    room.active.release()
    assert room.standby.wait(threading.Event())
    assert room.figure("standby") == 0.0


def test_a_missing_pulse_counts_as_silence(tmp_path: Path) -> None:
    """The active broker got the lock and hangs in its start, before its first turn."""
    room = Room(tmp_path)
    (tmp_path / "pulse").unlink()
    room.standby = Standby(room.lock, tmp_path, room.clock, room.figures)
    room.clock.now += limits.LIVENESS_S
    room.standby.look()
    assert room.standby.hung
    room.active.release()
