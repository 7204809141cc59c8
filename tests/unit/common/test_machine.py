"""What a machine or a container has of memory, from the system's own files."""

from __future__ import annotations

from pathlib import Path

from common.machine import memory_bytes


def test_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    """A container with 2 GiB on a machine with 16."""
    info, group = tmp_path / "meminfo", tmp_path / "memory.max"
    info.write_text("MemTotal:       16777216 kB\nMemFree:  1 kB\n")
    assert memory_bytes(info, (group,)) == 16 << 30
    group.write_text("max\n")
    assert memory_bytes(info, (group,)) == 16 << 30
    group.write_text(f"{2 << 30}\n")
    assert memory_bytes(info, (tmp_path / "none", group)) == 2 << 30


def test_where_nothing_can_be_told_nothing_is_said(tmp_path: Path) -> None:
    """Another system."""
    assert memory_bytes(tmp_path / "none", ()) == 0


def test_this_machine_has_some() -> None:
    """The real files."""
    assert memory_bytes() > 0
