"""shell: what this machine has, as far as a setting may ask for more than there is. Knows no setting."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container finds its own bound, in either form of control groups."""


def memory_bytes(meminfo: Path = MEMINFO, groups: tuple[Path, ...] = GROUPS) -> int:
    """Physical memory of this machine, or of the container this runs in; 0 when it cannot be told."""
    found = []
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal" and (number := rest.split()[:1]):
            found.append(int(number[0]) * 1024)
    found += [int(text) for group in groups if (text := _text(group).strip()).isdecimal()]
    return min(found, default=0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
