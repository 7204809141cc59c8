"""Files and batches on the disk: whole or not there, wherever the process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.http import shelf as shelves
from broker.http.faults import ApiFault
from broker.http.records import BATCH, BatchRecord, written
from broker.http.shelf import Shelf
from common.clock import SystemClock

DATA = b"x" * 1000


class Killed(BaseException):
    """The process is gone: nothing cleans up after it."""


def opened(folder: Path, reserve: int = 0) -> Shelf:
    return Shelf(folder, SystemClock(), reserve)


def kept(shelf: Shelf) -> str:
    upload = shelf.begin()
    upload.write(DATA)
    with contextlib.closing(upload._file):  # a killed process closes it too
        return shelf.keep("alice", upload, "a.jsonl").id


def record_first(shelf: Shelf) -> str:
    """Control: the record goes into place before its bytes."""
    upload = shelf.begin()
    upload.write(DATA)
    with contextlib.closing(upload._file):
        sha256 = upload.sync()
    found = shelves.FileRecord(shelf.new_id("file-"), len(DATA), 1.0, "a", "batch", sha256)
    shelf.put_file("alice", found)
    upload.place(shelf.data("alice", found.id))
    return found.id


def broken_after_kills(folder: Path, keep: Callable[[Shelf], str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Kill at every rename and sync in turn; how often a record without its bytes, or anything else, was left."""
    broken, at, done = 0, 0, False
    while not done:
        at += 1
        place = folder / str(at)
        shelf, left = opened(place), at

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return real(*arguments)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", counted(os.rename))
            patch.setattr(os, "fsync", counted(os.fsync))
            try:
                keep(shelf)
                done = True
            except Killed:
                pass
        again = opened(place)
        for name in again.files("alice"):
            path = again.data("alice", name)
            broken += not path.exists() or path.read_bytes() != DATA
        files = [path for path in place.rglob("*") if path.is_file()]
        broken += len(files) != 2 * len(again.files("alice"))
    assert at > 4
    assert len(again.files("alice")) == 1
    return broken


def test_wherever_it_is_killed_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_after_kills(tmp_path, kept, monkeypatch) == 0


def test_control_a_record_before_its_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_after_kills(tmp_path, record_first, monkeypatch) > 0


def test_bytes_are_synced_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what the disk is told: the file, its name, then the record and its name."""
    shelf, told = opened(tmp_path), []
    kept(shelf)  # its folder is there from now on
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda one, two: (told.append(Path(two).suffix), rename(one, two))[1])
    monkeypatch.setattr(os, "fsync", lambda one: (told.append("sync"), fsync(one))[1])
    kept(shelf)
    assert told == ["sync", ".data", "sync", "sync", ".json", "sync"]


def test_room_for_results_is_kept(tmp_path: Path) -> None:
    """Control: without a reserve it is taken."""
    upload = opened(tmp_path, reserve=1 << 60).begin()
    with pytest.raises(ApiFault) as caught:
        upload.write(DATA)
    assert (caught.value.status, caught.value.code) == (507, "disk_full")
    upload.drop()
    assert kept(opened(tmp_path))


def test_tenants_are_apart(tmp_path: Path) -> None:
    shelf = opened(tmp_path)
    name = kept(shelf)
    assert shelf.file("alice", name).bytes == 1000
    for tenant, asked in (("bob", name), ("alice", "file-..%2f"), ("alice", "../alice/files/" + name)):
        with pytest.raises(ApiFault) as caught:
            shelf.file(tenant, asked)
        assert caught.value.status == 404
    with pytest.raises(ApiFault):
        shelf.delete_file("bob", name)
    shelf.delete_file("alice", name)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_batches_change_one_after_the_other_and_are_there_again(tmp_path: Path) -> None:
    shelf = opened(tmp_path)
    record = BatchRecord(shelf.new_id(BATCH), 1.0, "file-x", "/v1/completions", "24h", 86400)
    shelf.put_batch("alice", record)
    ids = [shelf.new_id(BATCH) for _ in range(100)]
    assert ids == sorted(set(ids))
    assert opened(tmp_path).batch("alice", record.id) == record
    (tmp_path / "alice" / "batches" / f"{record.id}.json").write_bytes(written(record)[:-9])
    with pytest.raises(ApiFault) as caught:
        shelf.batch("alice", record.id)
    assert (caught.value.status, caught.value.code) == (500, "damaged")
