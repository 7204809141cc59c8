"""rules: what of a machine is fine for haulier, what could be better, what would make it refuse, and what to change.

``diagnose`` judges what was measured (``Facts``) against what is asked for (``Wanted``). ``bad`` is what a broker
or worker with these settings would stop at; ``advice`` for what costs speed or safety. Knows no probe.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from common import limits
from common.config import GIB

OK, ADVICE, BAD = "ok", "advice", "bad"
FILES_LEAST_COUNT = 32
"""Open files: with 16 neither broker nor worker starts, with 24 each does and has few left for peers."""
FILES_WELL_COUNT = 1024
"""512 connections over HTTP, a few hundred workers and clients, and what a process opens for itself."""
SYNC_SLOW_MS = 10.0
"""A synced write above it is a disk that turns, or one over a network: each commit of the broker waits for it."""
CORES_WELL_COUNT = 2
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings that are to work here, as ``broker`` and ``worker`` take them."""

    device: str = "cpu"
    host_pool_gib: float = 1.0
    ring_mib: int = 64
    disk_reserve_gib: float = 1.0

    @property
    def memory_bytes(self) -> int:
        return int(self.host_pool_gib * GIB) + self.ring_mib * 1024**2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device as the driver tells of it. ``node`` is the memory node it is attached to."""

    name: str
    memory_bytes: int
    driver_cuda: int
    """The CUDA version the driver can do, as the driver writes it: 13000 for 13.0."""
    built_cuda: str
    """The one torch was built for: ``13.0``."""
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured. A text where there should be a number says why there is none."""

    files: int
    """Limits of this process; -1 for none."""
    locked_bytes: int
    cores: float
    nodes: dict[int, frozenset[int]]
    """Memory nodes and their cores, and the cores this process may run on."""
    may_run_on: frozenset[int]
    memory_bytes: int
    available_bytes: int
    ring: str | None
    """Empty when the ring's pages could be had, else why not; None when not tried."""
    state: str
    state_problem: str
    """Empty when the state folder takes files, else why not."""
    filesystem: str
    unsafe: bool
    """Whether SQLite's write-ahead log is known to break there."""
    syncs_ms: tuple[float, ...]
    free_bytes: int
    gpu: Gpu | str | None = None
    """None when no GPU is asked for, a text when there is none that works."""
    pinned: str | None = None
    """None when not tried, empty when pinned memory could be had, else why not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``change`` names the setting; empty when there is nothing to change."""

    name: str
    verdict: str
    found: str
    change: str = ""


def diagnose(facts: Facts, wanted: Wanted) -> list[Finding]:
    """All findings, in the order in which a process would meet them."""
    found = [_files(facts), _locked(facts, wanted), _cores(facts), _nodes(facts), _memory(facts, wanted)]
    if facts.ring is not None:
        found.append(_ring(facts.ring, wanted))
    if wanted.device != "cpu":
        found += _gpu(facts, wanted)
    return [*found, *_state(facts, wanted)]


def _files(facts: Facts) -> Finding:
    text = "unlimited" if facts.files < 0 else str(facts.files)
    if 0 <= facts.files < FILES_LEAST_COUNT:
        return Finding("open files", BAD, f"{text}, a process needs {FILES_LEAST_COUNT}", "ulimit -n 4096")
    if 0 <= facts.files < FILES_WELL_COUNT:
        return Finding("open files", ADVICE, f"{text}: few connections fit", "ulimit -n 4096")
    return Finding("open files", OK, text)


def _locked(facts: Facts, wanted: Wanted) -> Finding:
    text = "unlimited" if facts.locked_bytes < 0 else f"{gib(facts.locked_bytes)}"
    if wanted.device == "cpu":
        return Finding("locked memory", OK, f"{text}; nothing is pinned with --device cpu")
    if 0 <= facts.locked_bytes < wanted.memory_bytes:
        asked = f"host pool and ring pin {gib(wanted.memory_bytes)}"
        return Finding("locked memory", ADVICE, f"{text}, {asked}", "ulimit -l unlimited (containers: ulimits memlock)")
    return Finding("locked memory", OK, text)


def _cores(facts: Facts) -> Finding:
    text = f"{facts.cores:g} of them may be used"
    if facts.cores < CORES_WELL_COUNT:
        words = f"{text}: session and engine share one"
        return Finding("processor cores", ADVICE, words, "more cores for the process (containers: cpus)")
    return Finding("processor cores", OK, text)


def _nodes(facts: Facts) -> Finding:
    name, nodes = "memory nodes", facts.nodes
    if len(nodes) < 2:
        return Finding(name, OK, "one: every core is as near to memory as another" if nodes else "not told here")
    used = sorted(node for node, cores in nodes.items() if cores & facts.may_run_on)
    near = facts.gpu.node if isinstance(facts.gpu, Gpu) else None
    if near is not None and used != [near]:
        words = f"{len(nodes)}; the GPU is at node {near}, this process may run on {_listed(used)}"
        return Finding(name, ADVICE, words, f"numactl --cpunodebind={near} --membind={near} haulier worker ...")
    if near is None and len(used) > 1:
        words = f"{len(nodes)}; this process may run on {_listed(used)}"
        return Finding(name, ADVICE, words, "numactl --cpunodebind=N --membind=N, one worker a node")
    return Finding(name, OK, f"{len(nodes)}; this process runs on {_listed(used)}")


def _memory(facts: Facts, wanted: Wanted) -> Finding:
    name = "memory"
    if not facts.memory_bytes:
        return Finding(name, ADVICE, "not told here", "--host-pool-gib below what there is")
    text = f"{gib(facts.memory_bytes)} here, {gib(facts.available_bytes)} of it available"
    asked = f"host pool and ring take {gib(wanted.memory_bytes)}"
    if wanted.memory_bytes > facts.memory_bytes:
        return Finding(name, BAD, f"{text}; {asked}", "--host-pool-gib lower, or more memory for the container")
    if wanted.memory_bytes > facts.available_bytes:
        return Finding(name, ADVICE, f"{text}; {asked}", "--host-pool-gib lower, or end what takes the rest")
    return Finding(name, OK, f"{text}; {asked}")


def _ring(problem: str, wanted: Wanted) -> Finding:
    if problem:
        return Finding("ring pages", BAD, problem, "--ring-mib lower")
    return Finding("ring pages", OK, f"{wanted.ring_mib} MiB had and given back (they need no /dev/shm)")


def _gpu(facts: Facts, wanted: Wanted) -> list[Finding]:
    if not isinstance(facts.gpu, Gpu):
        words = facts.gpu or "not looked at"
        return [Finding("GPU", BAD, words, "--device cpu, or install driver and haulier[worker,cuda]")]
    gpu = facts.gpu
    does, needs = divmod(gpu.driver_cuda, 1000)[0], int(gpu.built_cuda.partition(".")[0] or 0)
    text = f"{gpu.name}, {gib(gpu.memory_bytes)}; driver does CUDA {_version(gpu.driver_cuda)}, torch {gpu.built_cuda}"
    verdict = BAD if does < needs else OK
    change = "a newer driver, or a torch built for an older CUDA" if verdict == BAD else ""
    pinned = Finding("pinned memory", OK, f"{wanted.ring_mib} MiB had, mapped and given back")
    if facts.pinned is None or facts.pinned:
        words = facts.pinned or "not tried"
        pinned = Finding("pinned memory", BAD, words, "ulimit -l unlimited, or --ring-mib lower")
    return [Finding("GPU", verdict, text, change), pinned]


def _state(facts: Facts, wanted: Wanted) -> list[Finding]:
    place = f"{facts.state} on {facts.filesystem or 'an unknown file system'}"
    if facts.state_problem:
        return [Finding("state folder", BAD, facts.state_problem, "--state on a disk that can be written")]
    found = [Finding("state folder", OK, place)]
    if facts.unsafe:
        words = f"{place}, where SQLite's write-ahead log is known to break"
        found = [Finding("state folder", BAD, words, "--state on a local disk or a named volume")]
    elif facts.filesystem in MEMORY_FILESYSTEMS:
        words = f"{place}: memory, gone with the machine"
        found = [Finding("state folder", ADVICE, words, "--state on a disk")]
    return [*found, _syncs(facts), _free(facts, wanted)]


def _syncs(facts: Facts) -> Finding:
    name, middle, most = "synced write", statistics.median(facts.syncs_ms), max(facts.syncs_ms)
    text = f"{middle:.2f} ms median, {most:.2f} ms at most, of {len(facts.syncs_ms)} writes of 4 KiB"
    if middle > SYNC_SLOW_MS:
        words = f"{text}: no more than {1000 / middle:.0f} commits/s"
        return Finding(name, ADVICE, words, "--state on a local solid-state disk")
    return Finding(name, OK, text)


def _free(facts: Facts, wanted: Wanted) -> Finding:
    name, reserve = "free disk", int(wanted.disk_reserve_gib * GIB)
    text = f"{gib(facts.free_bytes)}, --disk-reserve-gib keeps {wanted.disk_reserve_gib:g} GiB of it"
    if facts.free_bytes <= reserve:
        return Finding(name, BAD, f"{text}: every submit is refused", "free some space, or --disk-reserve-gib lower")
    if facts.free_bytes < reserve + limits.OUTBOX_MAX_BYTES:
        words = f"{text}; a worker's outbox may take {gib(limits.OUTBOX_MAX_BYTES)}"
        return Finding(name, ADVICE, words, "free some space, or --state on a larger disk")
    return Finding(name, OK, text)


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 1024**2:.1f} MiB"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _listed(nodes: list[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"
