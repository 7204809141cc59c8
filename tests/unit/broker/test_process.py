"""The broker's process: what it leaves for others to find it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker import process
from broker.process import _announce
from broker.store import Store
from common.config import BrokerSettings, KeySettings
from common.errors import DiskFullError, RefusedError


@pytest.mark.parametrize(
    ("number", "failure"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EROFS, RefusedError)]
)
def test_a_disk_without_room_for_the_endpoint_is_a_full_disk_and_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failure: type[Exception]
) -> None:
    """D6: the broker then waits for room as it does for its store; anything else is told by name."""

    def refuse(path: Path, text: str) -> int:
        raise OSError(number, "nothing more")

    monkeypatch.setattr(Path, "write_text", refuse)
    settings = BrokerSettings("tcp://127.0.0.1:0", tmp_path, KeySettings(None, insecure=True))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        with pytest.raises(failure, match="nothing more") as caught:
            _announce(settings, socket, 1, 0)
    assert type(caught.value) is failure


@pytest.mark.parametrize("where", ["prepare", "Upkeep", "Reader"])
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (sqlite3.DatabaseError("malformed"), "damaged"),
        (sqlite3.OperationalError("disk I/O error"), "Look after the disk"),
    ],
)
def test_a_store_that_fails_as_the_broker_begins_is_the_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, failure: Exception, words: str
) -> None:
    """D6: before the first turn too, exit 4 with what to do, and no bug of ours."""

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(process, where, fail)
    store = Store.open(tmp_path / "broker.sqlite")
    settings = BrokerSettings("tcp://127.0.0.1:0", tmp_path, KeySettings(None, insecure=True))
    nobody: Any = None
    with pytest.raises(RefusedError, match=words):
        process._turns(settings, store, nobody, nobody, nobody, nobody, None)
    store.close()


@pytest.mark.parametrize("below", ["", "broker"])
def test_a_file_where_the_state_folder_should_be_is_named(tmp_path: Path, below: str) -> None:
    """--state notes.txt: which file is in the way, before anything else is tried."""
    (tmp_path / "notes.txt").write_text("")
    settings = BrokerSettings("tcp://127.0.0.1:0", tmp_path / "notes.txt" / below, KeySettings(None, insecure=True))
    with pytest.raises(RefusedError, match=r"notes\.txt is a file, not a folder; see --state"):
        process.serve(settings)
