"""Input files as they came: bytes, places of lines, and what a disk can do to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker import spool as room
from broker.spool import Spool
from common.errors import RefusedError


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    one = Spool(tmp_path / "spool")
    yield one
    one.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"")), max_size=8),
    last=st.booleans(), max_lines=st.integers(1, 4), max_bytes=st.integers(1, 30), block=st.integers(1, 9),
)  # fmt: skip
def test_slices_together_are_the_file(
    spool: Spool, pieces: list[bytes], last: bool, max_lines: int, max_bytes: int, block: int
) -> None:
    """However slices and blocks fall: each line once, at its place, and nothing else."""
    data = b"\n".join(pieces) + (b"\n" if last and pieces else b"")
    spool.drop("a")
    spool.append("a", 0, data)
    former, room.BLOCK_BYTES = room.BLOCK_BYTES, block
    try:
        at, found = 0, []
        while at < len(data):
            piece = spool.slice("a", at, len(data), max_lines, max_bytes)
            assert piece.end > at
            assert len(piece.lines) <= max_lines
            assert piece.last == (piece.end == len(data))
            found += piece.lines
            at = piece.end
    finally:
        room.BLOCK_BYTES = former
    expected = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    assert [line.raw for line in found] == expected
    assert all(data[line.offset : line.offset + line.size] == line.raw for line in found)


def test_appended_pieces_read_back(spool: Spool) -> None:
    """An upload in pieces; a piece sent again lies where it lay."""
    spool.append("a", 0, b"12345")
    spool.append("a", 5, b"67890")
    spool.append("a", 5, b"67890")
    spool.seal("a")
    assert spool.size("a") == 10
    assert spool.read("a", 3, 4) == b"4567"
    assert spool.size("none") == 0


def test_a_file_cut_short_by_somebody_is_told(spool: Spool) -> None:
    """A file under a running job was truncated: a clear error, not half a body sent as a whole one."""
    spool.append("a", 0, b"12345")
    with pytest.raises(RefusedError, match="shorter than it was"):
        spool.read("a", 3, 10)


def test_many_files_need_few_descriptors(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More jobs than a process may have files open."""
    monkeypatch.setattr(room, "OPEN_MAX_COUNT", 2)
    for number in range(6):
        spool.append(str(number), 0, b"x")
    assert len(spool._open) == 2
    assert spool.read("0", 0, 1) == b"x"


def test_a_dropped_file_is_gone(spool: Spool) -> None:
    """Deleting twice is as good as once."""
    spool.append("a", 0, b"x")
    spool.drop("a")
    spool.drop("a")
    assert spool.size("a") == 0


def test_files_of_no_open_job_are_swept(spool: Spool) -> None:
    """The process ended between the commit of a job's end and its clean-up: the next start finishes that."""
    for job in ("a", "b"):
        spool.append(job, 0, b"x")
    spool.sweep({"b"})
    assert (spool.size("a"), spool.size("b")) == (0, 1)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """--state names a file."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="--state"):
        Spool(tmp_path / "file" / "spool")


def test_many_places_read_as_one_by_one(tmp_path: Path) -> None:
    """An assignment's bodies: neighbours, a gap, the same one twice, a step back, one longer than a block."""
    spool = Spool(tmp_path / "many")
    data = bytes(range(256)) * 8192
    spool.append("job", 0, data)
    places = [(0, 10), (12, 3), (12, 3), (40, 0), (5, 4), (100, 1_500_000), (1_600_100, 7), (0, 1)]
    assert spool.read_many("job", places) == [data[at : at + size] for at, size in places]
    assert spool.read_many("job", []) == []
    with pytest.raises(RefusedError):
        spool.read_many("job", [(0, 1), (len(data) - 1, 2)])
    spool.close()
