"""shell: files and batches of HTTP's tenants in the state folder, each synced and in place before it counts (D1).

``TENANT/files/ID.json`` is a file, with ``ID.data`` beside it for an upload; ``TENANT/batches/ID.json`` a batch. What
is under ``incoming`` counts for nothing and is gone after a restart. One process has the folder, its threads share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

from broker.http.faults import ApiFault, missing
from broker.http.records import BATCH, FILE, BatchRecord, FileRecord, T, is_id, new_id, read, written
from common.clock import Clock
from common.database import free_bytes
from common.folders import made, sync

FILES, BATCHES, INCOMING = "files", "batches", "incoming"


class Upload:
    """A file on its way in. One thread at a time; every method may wait for the disk."""

    def __init__(self, path: Path, reserve_bytes: int) -> None:
        self._path, self._reserve = path, reserve_bytes
        self._file = _new(path)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises ``ApiFault`` 507 when the disk has no room for it beside what is kept for results."""
        try:
            if free_bytes(self._path.parent) - len(data) < self._reserve:
                raise no_room(self._reserve)
            self._file.write(data)
        except OSError as error:
            raise no_room(self._reserve, error.strerror or "") from error
        self._digest.update(data)
        self.size += len(data)

    def sync(self) -> str:
        """All of it is on the disk; its SHA-256 in hexadecimal."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise no_room(self._reserve, error.strerror or "") from error
        self._file.close()
        return self._digest.hexdigest()

    def place(self, path: Path) -> None:
        os.rename(self._path, path)

    def drop(self) -> None:
        """Take away what is not in place."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class Shelf:
    """The folder. ``reserve_bytes`` of its disk are kept for results."""

    def __init__(self, folder: Path, clock: Clock, reserve_bytes: int = 0) -> None:
        self._folder = made(folder, "files of --http")
        self._clock, self._reserve = clock, reserve_bytes
        self._lock, self._id_lock = threading.Lock(), threading.Lock()
        self._last_ms = 0
        self._sweep()

    # -- files --------------------------------------------------------------------------------------------------------

    def begin(self) -> Upload:
        return Upload(self._folder / INCOMING / secrets.token_hex(16), self._reserve)

    def keep(self, tenant: str, upload: Upload, filename: str) -> FileRecord:
        """The upload is a file of the tenant's from now on, whatever ends now."""
        sha256 = upload.sync()
        record = FileRecord(self.new_id(FILE), upload.size, self._clock.wall(), filename, "batch", sha256)
        folder = self._room(tenant, FILES)
        upload.place(folder / f"{record.id}.data")
        sync(folder)  # a record never outlives its bytes
        _write(folder / f"{record.id}.json", written(record))
        return record

    def put_file(self, tenant: str, record: FileRecord) -> None:
        """Keep the record of a job's file."""
        _write(self._room(tenant, FILES) / f"{record.id}.json", written(record))

    def file(self, tenant: str, name: str) -> FileRecord:
        """Raises ``ApiFault`` 404."""
        return self._record(FileRecord, tenant, FILE, name)

    def data(self, tenant: str, name: str) -> Path:
        """Where an upload's bytes are."""
        return self._folder / tenant / FILES / f"{name}.data"

    def delete_file(self, tenant: str, name: str) -> FileRecord:
        """Raises ``ApiFault`` 404."""
        record = self.file(tenant, name)
        folder = self._folder / tenant / FILES
        (folder / f"{name}.json").unlink(missing_ok=True)
        sync(folder)
        (folder / f"{name}.data").unlink(missing_ok=True)
        return record

    def files(self, tenant: str) -> list[str]:
        return _names(self._folder / tenant / FILES)

    # -- batches ------------------------------------------------------------------------------------------------------

    def put_batch(self, tenant: str, record: BatchRecord) -> None:
        _write(self._room(tenant, BATCHES) / f"{record.id}.json", written(record))

    def batch(self, tenant: str, name: str) -> BatchRecord:
        """Raises ``ApiFault`` 404."""
        return self._record(BatchRecord, tenant, BATCH, name)

    def change(self, tenant: str, name: str, how: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Put what ``how`` makes of the batch in its place: no other change comes between."""
        with self._lock:
            former = self.batch(tenant, name)
            record = how(former)
            if record != former:
                self.put_batch(tenant, record)
            return record

    def batches(self, tenant: str) -> list[str]:
        return _names(self._folder / tenant / BATCHES)

    def tenants(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir() and path.name != INCOMING)

    # -- both ---------------------------------------------------------------------------------------------------------

    def new_id(self, kind: str) -> str:
        """A fresh id, later by name than any that this process gave out."""
        with self._id_lock:
            self._last_ms = max(int(self._clock.wall() * 1000), self._last_ms + 1)
            return new_id(kind, self._last_ms, secrets.randbits(74))

    def _record(self, kind: type[T], tenant: str, begins: str, name: str) -> T:
        what = begins[:-1]
        if not is_id(begins, name):
            raise missing(what, name)
        path = self._folder / tenant / (FILES if begins == FILE else BATCHES) / f"{name}.json"
        try:
            return read(kind, path.read_bytes())
        except FileNotFoundError:
            raise missing(what, name) from None
        except (ValueError, TypeError) as error:
            raise ApiFault(500, "damaged", f"what is kept of {name} cannot be read: {error}") from error

    def _room(self, tenant: str, room: str) -> Path:
        folder = self._folder / tenant / room
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for parent in (folder.parent, self._folder):
                sync(parent)
        return folder

    def _sweep(self) -> None:
        """Take away what a process that ended in the middle left: it was promised to nobody."""
        shutil.rmtree(self._folder / INCOMING, ignore_errors=True)
        (self._folder / INCOMING).mkdir(mode=0o700)
        for tenant in self.tenants():
            for path in (self._folder / tenant).glob("*/*"):
                if path.suffix == ".new" or (path.suffix == ".data" and not path.with_suffix(".json").exists()):
                    path.unlink(missing_ok=True)


def no_room(reserve: int, words: str = "") -> ApiFault:
    """507: the disk."""
    why = words or f"{reserve} bytes of it are kept for results (--disk-reserve-gib)"
    return ApiFault(
        507, "disk_full", f"the server's disk has no room for this: {why}; delete files, or free some there"
    )


def _names(folder: Path) -> list[str]:
    try:
        return [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
    except FileNotFoundError:
        return []


def _write(path: Path, data: bytes) -> None:
    """Whole and synced under its name, or not there."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with _new(fresh) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(fresh, path)
        sync(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ApiFault(507, "disk_full", f"the server cannot keep this: {error.strerror}; ask again later") from error


def _new(path: Path) -> BufferedWriter:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600))
