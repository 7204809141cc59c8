"""A file of lines is whole or absent, whatever kills its writer, and a wrong name is told before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.outfile import OutFile, check_distinct, commit_all, outputs
from common.errors import RefusedError, UsageError

KILLED_WRITER = """
import os, signal, sys
from broker.outfile import OutFile
file = OutFile(sys.argv[1])
file.write(b"new line\\nhalf a li")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(out: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(out)], check=False)
    assert done.returncode == -9


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_takes_over(tmp_path: Path) -> None:
    """SIGKILL in the middle of a line: OUT is absent, or what it was before."""
    out = tmp_path / "out"
    killed(out)
    assert not out.exists()
    out.write_bytes(b"old\n")
    killed(out)
    assert out.read_bytes() == b"old\n"
    with outputs(str(out), None) as (first, second):
        first.write(b"new\n")
        commit_all(first, second)
    assert out.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [out]


def test_writing_straight_into_the_file_would_leave_half_a_line(tmp_path: Path) -> None:
    """Control: the same writer without the part file."""
    out = tmp_path / "out"
    direct = KILLED_WRITER.replace("OutFile(sys.argv[1])", "open(sys.argv[1], 'wb', 0)")
    subprocess.run([sys.executable, "-c", direct, str(out)], check=False)
    assert not out.read_bytes().endswith(b"\n")


def test_what_is_not_committed_disappears(tmp_path: Path) -> None:
    """An error on the way: nothing half-written is left."""

    def fails() -> None:
        with outputs(str(tmp_path / "o"), str(tmp_path / "e")) as (first, second):
            first.write(b"x\n")
            second.write(b"y\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_are_told_apart(tmp_path: Path) -> None:
    """Two fetches to the same OUT: the second is refused; after the first has ended it is let in."""
    first = OutFile(str(tmp_path / "o"))
    with pytest.raises(RefusedError, match="another process"):
        OutFile(str(tmp_path / "o"))
    first.write(b"1\n")
    first.commit()
    second = OutFile(str(tmp_path / "o"))
    assert (tmp_path / "o").read_bytes() == b"1\n"
    second.write(b"2\n")
    second.commit()
    assert (tmp_path / "o").read_bytes() == b"2\n"


def test_a_link_stays_a_link_and_a_device_stays_a_device(tmp_path: Path) -> None:
    """OUT may be a link to another disk, or /dev/null in a measurement: neither is replaced by a file."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "real")
    for name in (str(tmp_path / "link"), os.devnull):
        file = OutFile(name)
        file.write(b"x\n")
        file.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "real").read_bytes() == b"x\n"
    assert not Path(os.devnull).is_file()


def test_an_error_file_stands_before_the_output_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two renames: whoever sees OUT sees ERR too."""
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with outputs(str(tmp_path / "out"), str(tmp_path / "err")) as (first, second):
        commit_all(first, second)
    assert seen == ["err", "out"]


def test_the_same_file_twice_is_refused(tmp_path: Path) -> None:
    """OUT over the input, ERR over OUT, also through a link: the input would be lost."""
    (tmp_path / "in").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for out, err in (("in", "e"), ("link", "e"), ("o", "o"), ("o", "in")):
        with pytest.raises(UsageError, match="another file"):
            check_distinct(tmp_path / "in", [str(tmp_path / out), str(tmp_path / err)])
    with pytest.raises(UsageError):
        check_distinct(None, ["-", "-"])
    check_distinct(tmp_path / "in", [str(tmp_path / "o"), str(tmp_path / "e")])
    check_distinct(None, [os.devnull, os.devnull])


def test_a_full_disk_is_a_refusal_with_its_reason() -> None:
    """D6: exit 4, and the name of what is full."""
    file = OutFile("/dev/full")
    with pytest.raises(RefusedError, match="No space"):
        file.write(b"x\n")
    file.close()


@pytest.mark.parametrize(("name", "words"), [("no/out", "folder does not exist"), (".", "is a folder")])
def test_a_name_that_cannot_be_written_is_told_at_once(tmp_path: Path, name: str, words: str) -> None:
    """Before a model is loaded, not after."""
    with pytest.raises(UsageError, match=words):
        OutFile(str(tmp_path / name))
