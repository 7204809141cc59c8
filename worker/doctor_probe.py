"""shell: measures what ``worker.doctor`` judges: limits, memory, disk, GPU. Leaves nothing behind; judges nothing."""

from __future__ import annotations

import importlib.util
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine
from common.database import filesystem, free_bytes, is_unsafe
from common.errors import HaulierError
from common.folders import made
from common.limits import RING_ENTRIES_COUNT
from worker.doctor import Facts, Gpu, Wanted

SYNCS_COUNT, SYNC_BYTES = 32, 4096


def probe(wanted: Wanted, state: Path) -> Facts:
    """What there is. ``state`` is made if it is not there; all that is written there is taken away again."""
    gpu = None if wanted.device == "cpu" else gpu_of(wanted.device)
    problem, syncs = disk(state)
    return Facts(
        _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_MEMLOCK), machine.cores(), machine.numa_nodes(),
        frozenset(os.sched_getaffinity(0)), machine.memory_bytes(), machine.available_bytes(),
        ring(wanted.ring_mib) if wanted.device == "cpu" else None, str(state), problem,
        "" if problem else filesystem(state), not problem and is_unsafe(state), syncs,
        0 if problem else free_bytes(state), gpu,
        pinned(wanted) if isinstance(gpu, Gpu) else None,
    )  # fmt: skip


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def ring(mib: int) -> str | None:
    """Have the ring's pages, touch them all, give them back: why not, or empty. None: no numpy, so no worker here."""
    if importlib.util.find_spec("numpy") is None:
        return None
    if mib * 1024**2 > machine.available_bytes():  # touching them would take the memory from others first
        return f"{mib} MiB are more than the memory that is available"
    from ring.memory import HostRingMemory

    try:
        HostRingMemory(mib * 1024**2, RING_ENTRIES_COUNT).close()
    except (HaulierError, MemoryError) as refused:
        return str(refused) or "the system has no memory for it"
    return ""


def disk(state: Path) -> tuple[str, tuple[float, ...]]:
    """Why the folder takes no files, or empty; milliseconds of each synced write."""
    try:
        return "", syncs_ms(made(state, "the check"))
    except HaulierError as failure:
        return str(failure), ()
    except OSError as failure:
        return f"{state} cannot be written: {failure.strerror}", ()


def syncs_ms(folder: Path, count: int = SYNCS_COUNT) -> tuple[float, ...]:
    """What each of so many small writes costs until it is on the disk. Raises ``OSError``."""
    took = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(os.urandom(SYNC_BYTES))
            os.fsync(file.fileno())
            took.append(1000 * (time.perf_counter() - began))
    return tuple(took)


def gpu_of(name: str) -> Gpu | str:
    """The device of ``--device cuda:N``, or why there is none that works."""
    absent = [module for module in ("torch", "cuda.bindings") if not _there(module)]
    if absent:
        return f"{', '.join(absent)} not installed here: pip install 'haulier[worker,cuda]'"
    import torch

    index = int(name.partition(":")[2] or 0)
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: no driver, or a torch that was built without CUDA"
    if index >= torch.cuda.device_count():
        return f"{name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0"
    from cuda.bindings import driver

    found = torch.cuda.get_device_properties(index)
    driver.cuInit(0)
    told, bus = driver.cuDeviceGetPCIBusId(32, index)
    known = told == driver.CUresult.CUDA_SUCCESS
    return Gpu(
        found.name, found.total_memory, int(driver.cuDriverGetVersion()[1]), torch.version.cuda or "",
        machine.device_node(bus.split(b"\0")[0].decode()) if known else None,
    )  # fmt: skip


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def pinned(wanted: Wanted, make: Any = None) -> str:
    """Have the ring in pinned, mapped memory, as a worker does, and give it back: why not, or empty."""
    if make is None:
        from ring.cuda_memory import CudaRingMemory

        make = CudaRingMemory
    try:
        index = int(wanted.device.partition(":")[2] or 0)
        make(wanted.ring_mib * 1024**2, RING_ENTRIES_COUNT, device=index).close()
    except HaulierError as refused:
        return str(refused)
    return ""
