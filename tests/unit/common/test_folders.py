"""A folder that cannot be: the file in its way is named, and the setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import RefusedError, UsageError
from common.folders import announce, made, why_not


def test_a_folder_is_made_with_its_parents_and_left_when_there(tmp_path: Path) -> None:
    """The first start and the second."""
    for _ in range(2):
        assert made(tmp_path / "a" / "b", "results").is_dir()


@pytest.mark.parametrize("below", ["", "b", "b/c"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    """--state names a file, or something below one: which one, and not only "File exists"."""
    (tmp_path / "a").write_text("")
    with pytest.raises(RefusedError, match=re.escape(f"{tmp_path / 'a'} is a file, not a folder; see --state")):
        made(tmp_path / "a" / below, "results")
    with pytest.raises(UsageError):
        made(tmp_path / "a", "results", kind=UsageError)


def test_any_other_reason_is_the_systems(tmp_path: Path) -> None:
    """A read-only disk."""
    assert why_not(tmp_path / "a", OSError(30, "Read-only file system")) == "Read-only file system"


def test_a_word_is_told_whole_or_not_at_all(tmp_path: Path) -> None:
    """Who looks for the endpoint of a broker that starts sees none, or all of it; a folder that is gone is named."""
    announce(tmp_path, "endpoint", "tcp://127.0.0.1:1")
    announce(tmp_path, "endpoint", "tcp://127.0.0.1:2")
    assert (tmp_path / "endpoint").read_text() == "tcp://127.0.0.1:2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["endpoint"]
    with pytest.raises(RefusedError, match="look after the disk of --state"):
        announce(tmp_path / "gone", "endpoint", "tcp://127.0.0.1:3")
