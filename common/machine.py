"""shell: what this machine has, as far as a setting may ask for more than there is. Knows no setting."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container finds its own bound, in either form of control groups."""
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Beside a bound: what counts against it."""
CPU_QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Where a container finds its share of the processors, in either form of control groups."""
NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


def memory_bytes(meminfo: Path = MEMINFO, groups: tuple[Path, ...] = GROUPS) -> int:
    """Physical memory of this machine, or of the container this runs in; 0 when it cannot be told."""
    total = _field(meminfo, "MemTotal:")
    found = [None if total is None else total * 1024, *(_number(group) for group in groups)]
    return min((one for one in found if one is not None), default=0)


def available_bytes(meminfo: Path = MEMINFO, groups: tuple[Path, ...] = GROUPS) -> int:
    """Memory that can be had without swapping, of the machine and of the container; where the system does not say so,
    what is unused."""
    available = _field(meminfo, "MemAvailable:")
    unused = available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([unused, *(left for group in groups if (left := _left(group)) is not None)]))


def _left(group: Path) -> int | None:
    """What a container may still take: files that it read lie in memory until it is wanted, and count as free."""
    bound, used = _number(group), _number(group.with_name(_USED[group.name]))
    if bound is None or used is None:
        return None
    stat = group.with_name("memory.stat")
    return bound - used + (_field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0)


def _field(path: Path, name: str) -> int | None:
    """The number behind ``name`` in a file of names and numbers."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name] and len(words) > 1 and words[1].isdecimal():
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cores(quotas: tuple[Path, ...] = CPU_QUOTAS) -> float:
    """Processor cores that this process may use: those it may run on, or the container's share of time if less."""
    found = float(len(os.sched_getaffinity(0)))
    for path in quotas:
        quota, period, *_ = [*_text(path).split(), "", ""]
        if not period:
            period = _text(path.with_name("cpu.cfs_period_us")).strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            found = min(found, int(quota) / int(period))
    return found


def numa_nodes(nodes: Path = NODES) -> dict[int, frozenset[int]]:
    """The machine's memory nodes, each with the numbers of its cores; empty where the system does not tell."""
    found = {}
    for path in sorted(nodes.glob("node[0-9]*")):
        numbers: set[int] = set()
        for part in _text(path / "cpulist").strip().split(","):
            first, _, last = part.partition("-")
            if first.isdecimal():
                numbers.update(range(int(first), int(last if last.isdecimal() else first) + 1))
        found[int(path.name.removeprefix("node"))] = frozenset(numbers)
    return found


def device_node(bus_id: str, devices: Path = PCI_DEVICES) -> int | None:
    """The memory node that a PCI device (``0000:1b:00.0``) is attached to; None where the system does not tell."""
    text = _text(devices / bus_id.lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else None
