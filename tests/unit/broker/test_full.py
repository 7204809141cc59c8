"""A full disk under the broker (D6): everybody hears it, nothing is acknowledged, with room it goes on by itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.full import CODE, Full
from broker.inputs import Came, Faulted
from broker.store import Store
from common import limits, messages
from common.database import FULL_BYTES, is_full
from common.errors import DiskFullError, RefusedError
from tests.unit.broker.kit import JOB, hello


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Link:
    """Hands out ``incoming``, keeps what was said."""

    def __init__(self) -> None:
        self.incoming: list[Any] = []
        self.said: list[tuple[bytes, Any]] = []

    def wait(self, seconds: float) -> None:
        pass

    def receive(self) -> Iterator[Any]:
        incoming, self.incoming = self.incoming, []
        yield from incoming

    def send(self, peer: bytes, message: Any) -> bool:
        self.said.append((peer, message))
        return True


class Outage:
    def __init__(self, folder: Path) -> None:
        self.link: Any = Link()
        self.clock: Any = Clock()
        self.path = folder / "broker.sqlite"
        Store.open(self.path).close()
        self.full = Full(self.link, self.path, self.clock, "disk is full")

    def turn(self, seconds: float = 0.0, *messages_: Any) -> Store | None:
        self.link.incoming = [Came(b"p", "", True, message) for message in messages_]
        self.clock.now += seconds
        return self.full.turn()


@pytest.fixture
def outage(tmp_path: Path) -> Outage:
    return Outage(tmp_path)


def test_everybody_hears_why_and_nothing_is_acknowledged(outage: Outage) -> None:
    """A client's question is a refusal with what to free; a worker is told to come back and keeps what it has."""
    done = messages.Done(messages.Fence("s", 1, 1, 1), ())
    assert outage.turn(0.0, messages.AskStatus(7, JOB), hello(), done) is None
    status, login, result = [message for _, message in outage.link.said]
    assert (status.request, status.code, status.exit_code) == (7, CODE, 4)
    assert "free" in status.message or "full" in status.message
    assert (login.code, result.code) == (CODE, CODE)
    assert not any(isinstance(message, messages.Ack) for _, message in outage.link.said)


def test_who_breaks_the_protocol_gets_no_answer(outage: Outage) -> None:
    """Garbage while the disk is full stops nothing."""
    outage.link.incoming = [Faulted(b"p", "bad", "no message")]
    assert outage.full.turn() is None
    assert outage.link.said == []


def test_with_room_the_store_is_opened_anew(outage: Outage) -> None:
    """Somebody deleted a log file: at the next try the broker goes on, without a restart."""
    assert outage.turn(limits.OUTBOX_RETRY_S / 2) is None
    store = outage.turn(limits.OUTBOX_RETRY_S)
    assert store is not None
    store.close()


def test_without_room_it_is_tried_again(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours without room: still there, still answering."""

    def still(_: Path) -> Store:
        raise DiskFullError("still full")

    monkeypatch.setattr(Store, "open", still)
    for _ in range(50):
        assert outage.turn(limits.OUTBOX_RETRY_S, messages.AskWorkers(1)) is None
    assert len(outage.link.said) == 50


def test_another_failure_than_want_of_room_ends_the_broker(outage: Outage) -> None:
    """The disk is not only full, the file is damaged too: no use in waiting."""
    outage.path.write_bytes(b"no database" * 1000)
    with pytest.raises(RefusedError, match="damaged") as told:
        outage.turn(limits.OUTBOX_RETRY_S)
    assert not isinstance(told.value, DiskFullError)


@pytest.mark.parametrize(
    ("code", "free", "full"),
    [
        (sqlite3.SQLITE_FULL, 10**12, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, FULL_BYTES - 1, True),
        (sqlite3.SQLITE_IOERR_FSYNC, 10**12, False),
        (sqlite3.SQLITE_CORRUPT, 0, False),
    ],
)
def test_want_of_room_is_told_from_other_failures(
    code: int, free: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room SQLite cannot grow its index and speaks of input and output; a sync that fails is another thing."""
    monkeypatch.setattr("common.database.free_bytes", lambda _: free)
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    assert is_full(error, tmp_path) is full
