"""shell: input files as they came, one a job, synced when sealed. Knows bytes and lines' places, not what they say.

The store holds offsets into these files, so that neither it nor memory grows with long bodies. Used by one thread.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import limits
from common.errors import RefusedError, disk_failure
from common.folders import made, sync

OPEN_MAX_COUNT = 64
"""Files kept open at once."""
BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line's place, and its bytes without the line end; ``raw`` is None for a line too long to be held."""

    offset: int
    size: int
    raw: bytes | None


@dataclass(frozen=True, slots=True)
class Slice:
    """Lines from one offset on; the next slice begins at ``end``. ``last`` says the file is read whole."""

    lines: tuple[RawLine, ...]
    end: int
    last: bool


class Spool:
    """The folder of input files."""

    def __init__(self, folder: Path) -> None:
        self.folder = made(folder, "input files")
        self._open: OrderedDict[str, int] = OrderedDict()

    def path(self, job: str) -> Path:
        return self.folder / f"{job}.jsonl"

    def append(self, job: str, offset: int, data: bytes) -> None:
        """Write ``data`` at ``offset``. Raises ``OSError``; then nothing of it counts."""
        descriptor = self._descriptor(job)
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)

    def seal(self, job: str) -> None:
        """Sync the file and its name. Raises ``DiskFullError`` or ``RefusedError``; then it counts as not sealed."""
        try:
            os.fsync(self._descriptor(job))
            sync(self.folder)
        except OSError as error:
            words = f"{self.path(job)} cannot be synced: {error.strerror}; look after the disk of --state"
            raise disk_failure(error)(words) from error

    def size(self, job: str) -> int:
        """Bytes there are; 0 when there is no file yet."""
        try:
            return self.path(job).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, job: str, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``offset``. Raises ``RefusedError`` when the file does not have them any more."""
        descriptor = self._descriptor(job)
        data = os.pread(descriptor, size, offset)
        while len(data) < size:
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                raise RefusedError(
                    f"{self.path(job)} is shorter than it was: it must not be touched while its job runs"
                )
            data += more
        return data

    def read_many(self, job: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """``read`` for several places (offset, size) at once: neighbours, up to ``BLOCK_BYTES``, in one go."""
        found: list[bytes] = []
        while len(found) < len(places):
            start, size = places[len(found)]
            end, count = start + size, 1
            for offset, size in places[len(found) + 1 :]:
                if offset < end or offset + size - start > BLOCK_BYTES:
                    break
                end, count = offset + size, count + 1
            block = self.read(job, start, end - start)
            found += [block[at - start : at - start + size] for at, size in places[len(found) : len(found) + count]]
        return found

    def slice(self, job: str, offset: int, size: int, max_lines: int, max_bytes: int) -> Slice:
        """Lines of the first ``size`` bytes, from ``offset`` on: at most ``max_lines``, and about ``max_bytes``."""
        lines: list[RawLine] = []
        pending = bytearray()
        start = at = offset
        too_long = False
        while at < size and len(lines) < max_lines and (start - offset < max_bytes):
            block = self.read(job, at, min(BLOCK_BYTES, size - at))
            at += len(block)
            begin = 0
            while (end := block.find(b"\n", begin)) >= 0 and len(lines) < max_lines:
                pending += block[begin:end]
                length = at - len(block) + end - start
                lines.append(RawLine(start, length, None if too_long else bytes(pending)))
                pending.clear()
                too_long = False
                begin = end + 1
                start = at - len(block) + begin
            if len(lines) >= max_lines:
                break
            pending += block[begin:]
            if len(pending) > limits.LINE_MAX_BYTES + 2:
                too_long = True
                pending.clear()
        if at >= size and start < size and len(lines) < max_lines:
            lines.append(RawLine(start, size - start, None if too_long else bytes(pending)))
            start = size
        return Slice(tuple(lines), start, start >= size)

    def drop(self, job: str) -> None:
        """Remove the file, if it is there."""
        descriptor = self._open.pop(job, None)
        if descriptor is not None:
            os.close(descriptor)
        self.path(job).unlink(missing_ok=True)

    def sweep(self, keep: Container[str]) -> None:
        """Remove the files of all jobs but these: left by a process that ended between a commit and its clean-up."""
        for path in self.folder.glob("*.jsonl"):
            if path.stem not in keep:
                self.drop(path.stem)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, job: str) -> int:
        found = self._open.get(job)
        if found is None:
            found = os.open(self.path(job), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._open[job] = found
            if len(self._open) > OPEN_MAX_COUNT:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(job)
        return found
