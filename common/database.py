"""shell: SQLite opened the one way haulier opens it (D6), through sqlite-utils. Knows no table.

WAL, synchronous FULL on every commit unless a transaction says otherwise, incremental vacuum from creation, numbered
migrations (an older file migrates, a newer one is refused by name), a write-and-sync self-test at start, and refusal
of file systems on which WAL is known to break. One connection belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import sqlite_utils

from common import limits
from common.errors import DiskFullError, RefusedError
from common.folders import made

Migration = Callable[[sqlite3.Connection], None]
UNSAFE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "vboxsf", "virtiofs", "fuse.grpcfuse", "osxfs"}
"""Network and shared host mounts: shared memory of the WAL index does not reach across them."""
ALLOW_UNSAFE = "HAULIER_UNSAFE_FILESYSTEM"
FULL_BYTES = 1024 * 1024
"""With less free than this a failed write is for want of room."""
BUSY_MS = limits.STORE_BUSY_MS


def open_database(path: Path, migrations: Sequence[Migration], what: str) -> sqlite_utils.Database:
    """The database at ``path``, migrated and self-tested; ``what`` names it in errors.

    The connection is in autocommit: writes go through ``transaction``. Raises ``RefusedError`` with what to change.
    """
    refuse_unsafe(path.parent, what)
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_MS / 1000)
    except sqlite3.Error as error:
        raise RefusedError(f"cannot open {what} at {path}: {error}; is the folder writable?") from error
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection, migrations, what, path)
        _self_test(connection)
    except sqlite3.Error as error:
        connection.close()
        kind = DiskFullError if is_full(error, path.parent) else RefusedError
        raise kind(f"{what} at {path} cannot be used: {error}{_hint(error)}") from error
    except RefusedError:
        connection.close()
        raise
    return sqlite_utils.Database(connection)


@contextlib.contextmanager
def transaction(database: sqlite_utils.Database) -> Iterator[sqlite3.Connection]:
    """All writes of the block in one synced commit, or none. Nobody is told anything before the block ends (D1)."""
    connection = database.conn
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def vacuum(connection: sqlite3.Connection, pages: int) -> None:
    """Give up to so many free pages back to the file system. Outside a transaction."""
    # a row without columns for each page: ``execute`` would stop at the first one, a script runs to its end
    connection.executescript(f"PRAGMA incremental_vacuum({pages})")


def wal_bytes(path: Path) -> int:
    """Size of the write-ahead log beside ``path``; 0 when there is none."""
    try:
        return os.stat(f"{path}-wal").st_size
    except OSError:
        return 0


def free_bytes(path: Path) -> int:
    """What an unprivileged writer may still use on the file system of ``path``."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def is_full(error: sqlite3.Error, folder: Path) -> bool:
    """Whether ``error`` means that the disk of ``folder`` has no room: it may pass. Without room for the WAL's shared
    index SQLite speaks of input and output errors instead, so the disk itself is asked too.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return free_bytes(folder) < FULL_BYTES
    return code == sqlite3.SQLITE_FULL


def refuse_unsafe(folder: Path, what: str) -> None:
    """Make ``folder`` if absent; raise ``RefusedError`` if its file system cannot keep a WAL database safe."""
    made(folder, what)
    if is_unsafe(folder):
        raise RefusedError(
            f"{folder} lies on {filesystem(folder)}, where SQLite's write-ahead log is known to break; put --state on "
            f"a local disk or a named volume ({ALLOW_UNSAFE}=1 overrides this at your own risk)"
        )


def is_unsafe(folder: Path) -> bool:
    """Whether the file system of ``folder`` breaks a write-ahead log, and nobody said to go on all the same."""
    return filesystem(folder) in UNSAFE and os.environ.get(ALLOW_UNSAFE) != "1"


def filesystem(folder: Path) -> str:
    """The type of the file system that holds ``folder``, as the kernel names it; empty when it cannot be told."""
    best, kind = "", ""
    target = str(folder.resolve())
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in mounts:
        fields = line.split(" ")
        mount = fields[1].encode().decode("unicode_escape")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Migration], what: str, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise RefusedError(
            f"{what} at {path} has version {version}, this haulier knows up to {len(migrations)}: "
            "it was written by a newer one; upgrade this haulier"
        )
    for number in range(version, len(migrations)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrations[number](connection)
            connection.execute(f"PRAGMA user_version={number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _self_test(connection: sqlite3.Connection) -> None:
    """One synced write that changes nothing: a full or read-only disk shows now, not with the first result."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS self_test (tried INTEGER NOT NULL) STRICT")
    connection.execute("DELETE FROM self_test")
    connection.execute("INSERT INTO self_test VALUES (?)", (version,))
    connection.execute("COMMIT")
    if connection.execute("SELECT tried FROM self_test").fetchone()[0] != version:
        raise sqlite3.DatabaseError("a row written and synced does not read back")


def _hint(error: sqlite3.Error) -> str:
    text = str(error)
    if "full" in text:
        return "; free some space or move --state"
    if "not a database" in text or "malformed" in text:
        return "; the file is damaged: restore it from a copy, or start with an empty --state"
    if "readonly" in text or "read-only" in text:
        return "; make the file and its folder writable"
    if "locked" in text:
        return "; another process holds it"
    return ""
