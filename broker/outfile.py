"""shell: files of lines that are whole or absent, whatever kills their writer. Knows no job and no message.

Lines go to ``.NAME.part`` beside the file, which grows while the job runs; ``commit`` syncs it and renames it over
NAME. A part file left behind by a killed process is taken over by the next one. What is no regular file (a terminal,
a pipe, /dev/null) is written straight, and so is ``-``, standard output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import HaulierError, ReaderGone, RefusedError, UsageError
from common.folders import sync as sync_folder

STANDARD_OUTPUT = "-"
_WORLD = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
"""What the disk does, as against what the user named."""


def check_distinct(source: Path | None, outputs: Sequence[str]) -> None:
    """Raise ``UsageError`` when two of the files are the same one, by name or by link."""
    seen: dict[str, str] = {}
    if source is not None:
        seen[os.path.realpath(source)] = "the input"
    for name in outputs:
        real = STANDARD_OUTPUT if name == STANDARD_OUTPUT else os.path.realpath(name)
        if real in seen and (name == STANDARD_OUTPUT or os.path.isfile(real) or not os.path.exists(real)):
            raise UsageError(f"{name} is {seen[real]} too; name another file")
        seen[real] = "another output"


class OutFile:
    """One output file. Made writable at once, so that a wrong name is told before any work. One thread."""

    def __init__(self, name: str) -> None:
        """Raises ``UsageError`` when nothing can be written there, ``RefusedError`` when another process does."""
        self.name = name
        self._part: Path | None = None
        # a link stays a link: the file it names is replaced
        self._target = Path(os.path.realpath(name))
        try:
            self._fd = self._open()
        except OSError as failure:
            raise _told(failure, name) from failure

    def _open(self) -> int:
        if self.name == STANDARD_OUTPUT:
            sys.stdout.flush()
            return os.dup(1)
        if self._target.is_dir():
            raise UsageError(f"{self.name} is a folder; name a file to write to")
        if self._target.exists():
            if not self._target.is_file():
                return os.open(self._target, os.O_WRONLY)
            if not os.access(self._target, os.W_OK):
                raise UsageError(f"{self.name} is write-protected; name another file to write to")
        self._part = self._target.with_name(f".{self._target.name}.part")
        while True:
            fd = os.open(self._part, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise RefusedError(
                    f"another process is writing {self.name}; wait for it or name another file"
                ) from None
            # between open and lock its writer may have renamed it: then this is the finished file, not a part
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._part)):
                    os.ftruncate(fd, 0)
                    return fd
            os.close(fd)

    def write(self, data: bytes) -> None:
        """Append. Raises ``RefusedError`` when the disk is full or fails."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            raise ReaderGone(f"{self.name} was closed by its reader") from None
        except OSError as failure:
            raise _told(failure, self.name) from failure

    def sync(self) -> None:
        """Everything written is on the disk."""
        if self._part is None:
            return
        try:
            os.fsync(self._fd)
        except OSError as failure:
            raise _told(failure, self.name) from failure

    def commit(self) -> None:
        """The file is whole: it appears under its name, durably."""
        self.sync()
        if self._part is not None:
            try:
                os.replace(self._part, self._target)
                sync_folder(self._target.parent)
            except OSError as failure:
                raise _told(failure, self.name) from failure
            self._part = None
        self.close()

    def close(self) -> None:
        """Let go; what was not committed disappears. May be called again."""
        if self._part is not None:
            self._part.unlink(missing_ok=True)
            self._part = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def outputs(output: str, error: str | None, source: Path | None = None) -> Iterator[tuple[OutFile, OutFile]]:
    """The file of completed lines and that of failed ones; one and the same where ``error`` is None.

    Without a file of their own, failed lines go where the others go: a line is never dropped in silence. The files
    stay only if ``commit_all`` was called.
    """
    check_distinct(source, [output] if error is None else [output, error])
    with contextlib.ExitStack() as stack:
        first = OutFile(output)
        stack.callback(first.close)
        second = first
        if error is not None:
            second = OutFile(error)
            stack.callback(second.close)
        yield first, second


def commit_all(first: OutFile, second: OutFile) -> None:
    """Both files appear, the output last: where it stands, the errors stand too."""
    if second is not first:
        first.sync()
        second.commit()
    first.commit()


def _told(failure: OSError, name: str) -> HaulierError:
    if failure.errno in _WORLD:
        return RefusedError(f"cannot write {name}: {failure.strerror}; make room or name another file")
    if failure.errno == errno.ENOENT:
        return UsageError(f"cannot write {name}: its folder does not exist; make it or name another file")
    return UsageError(f"cannot write {name}: {failure.strerror}; name another file to write to")
