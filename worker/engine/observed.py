"""shell: where the time of some decode steps goes, and what device memory does meanwhile: for measuring alone.

Both cost time of their own, so that steps are timed apart from them. A profile tells device time by kind of work; a
step's kinds may add up to more than it took, since queues run side by side. Knows no plan.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from common.errors import InvariantError
from worker.engine.device import Device
from worker.engine.device_use import device_bytes

PROFILED_STEPS = 2
SAMPLE_S = 0.1
KINDS = (
    ("link, to the device", ("Memcpy HtoD",)),
    ("link, to the host", ("Memcpy DtoH",)),
    ("attention", ("flash", "attention", "fmha", "cudnn")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "splitk", "gemv", "addmm", "aten::mm")),
    ("norms, rotation, gates", ("rms_norm", "_rope", "swiglu")),
    ("rows appended, gathered and scattered", ("index", "gather", "scatter")),
)
"""Kinds of work, by what the names of their kernels contain; the first that fits. Others are "other"."""
Interval = tuple[float, float]


def kind_of(name: str) -> str:
    """Of a kernel or a copy."""
    lowered = name.lower()
    return next((kind for kind, parts in KINDS if any(part.lower() in lowered for part in parts)), "other")


def union_s(intervals: list[Interval]) -> float:
    """How long at least one of them lasts; seconds, as they are."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profiled(device: Device, step: Callable[[], object], trace: Path | None = None) -> dict[str, Any]:
    """Run some steps under torch's profiler: milliseconds a step by kind, how long the device and the link were busy,
    and what a step took under it. ``trace``: also write them there, gzipped, for a trace viewer."""
    cuda = device.torch_device.type == "cuda"
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED_STEPS):
            step()
        took = time.perf_counter() - began
    if trace is not None:
        _write(found, trace)
    by_kind: Counter[str] = Counter()
    busy: dict[bool, list[Interval]] = {True: [], False: []}
    for event in found.events() or []:
        kind, span = kind_of(event.name), event.time_range
        if (event.device_type.name == "CPU") == cuda:
            continue  # on a GPU host time is not asked for
        by_kind[kind] += (span.end - span.start if cuda else event.self_cpu_time_total) / 1000
        busy[kind.startswith("link")].append((span.start / 1e6, span.end / 1e6))
    each = 1 / PROFILED_STEPS
    return {
        "ms_step": {kind: round(ms * each, 4) for kind, ms in by_kind.most_common()},
        "device_busy_ms_step": round(1000 * union_s(busy[False]) * each, 4),
        "link_busy_ms_step": round(1000 * union_s(busy[True]) * each, 4),
        "under_profiler_ms_step": round(1000 * took * each, 4),
    }


def _write(found: Any, trace: Path) -> None:
    plain = trace.with_suffix(".json.part")
    found.export_chrome_trace(str(plain))
    trace.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()


@contextmanager
def memory_over_time(device: Device, *, wanted: bool) -> Iterator[list[tuple[float, float]]]:
    """While it is entered, (seconds, GB) of device memory as the driver says, ten times a second; nothing on a CPU."""
    seen: list[tuple[float, float]] = []
    over, began = threading.Event(), time.perf_counter()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            seen.append((round(time.perf_counter() - began, 2), round(device_bytes(device)[0] / 1e9, 3)))

    if not wanted or device.torch_device.type != "cuda":
        yield seen
        return
    watching = threading.Thread(target=sample, name="device-memory", daemon=True)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join(10 * SAMPLE_S)
        if watching.is_alive():
            raise InvariantError("the driver does not say how much memory is used")
