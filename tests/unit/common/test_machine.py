"""What a machine or a container has of memory, from the system's own files."""

from __future__ import annotations

from pathlib import Path

from common.machine import available_bytes, memory_bytes


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


def test_what_a_container_may_still_take_bounds_what_the_machine_has(tmp_path: Path) -> None:
    """``--headroom-gib auto`` on a CPU, in life: 10 GiB are available, a container of 2 uses 1.5, half of that files
    that need not stay; in either form of control groups. One over its bound has none."""
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       16777216 kB\nMemAvailable:   10485760 kB\n")
    assert available_bytes(info, (tmp_path / "none" / "memory.max",)) == 10 << 30
    for bound, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = tmp_path / bound
        group.write_text("max\n")
        (tmp_path / used).write_text(f"{3 << 29}\n")
        assert available_bytes(info, (group,)) == 10 << 30
        group.write_text(f"{2 << 30}\n")
        (tmp_path / "memory.stat").unlink(missing_ok=True)
        assert available_bytes(info, (group,)) == 1 << 29
        (tmp_path / "memory.stat").write_text(f"anon 7\n{files} {3 << 28}\n")
        assert available_bytes(info, (group,)) == 5 << 28
        group.write_text(f"{1 << 29}\n")
        (tmp_path / "memory.stat").unlink()
        assert available_bytes(info, (group,)) == 0


def test_this_machine_has_some() -> None:
    """The real files, and where they are not told, the system's own counters."""
    assert 4096 < available_bytes() < memory_bytes() < 2**60
    assert 4096 < available_bytes(Path("none"), ()) < 2**60
