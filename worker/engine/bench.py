"""shell: ``haulier bench engine``: streamed decode beside the link's floor, measured in the same run, and its bits.

The floor is the time in which the link, as measured here on the engine's own memory, carries the bytes staged. Bits are
compared with ``--residency full`` under the same schedule. Nothing is reported that was not measured.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.config import GIB, EngineSettings
from common.errors import InvariantError, UsageError
from common.limits import HEADROOM_RESERVE_BYTES
from worker.engine.admission import FLOOR_PAGES, PagePool
from worker.engine.cells import CONTEXT_PAGES, ROUTES, Row, table
from worker.engine.contexts import StepPlan
from worker.engine.device import Device
from worker.engine.device_use import device_bytes, device_name, versions
from worker.engine.drafts import Drafts
from worker.engine.filling import fill_histories
from worker.engine.fit import rounded_up
from worker.engine.lifecycle_clock import LifecycleClock
from worker.engine.link_rate import link_rate
from worker.engine.local import LocalEngine
from worker.engine.model import DTYPES, LoadedModel, from_config, shape_config
from worker.engine.observed import PROFILED_STEPS, memory_over_time, profiled
from worker.engine.retention import Retention
from worker.engine.runner import open_device
from worker.engine.versus import decode_rates
from worker.structures import Sampling

WARM_STEPS = 16
"""Decode steps before the measured ones: host and rates settle, and the first copies of a step are prefetched."""
LIFECYCLE_STEPS = 8
"""Decode steps after the measured ones in which the transport is timed: timing costs, so those are not measured."""
TAIL_STEPS = 4
"""Decode steps after the measured ones, so that none of those is a last one, which prefetches nothing."""
_GIB_STEP = 1024


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure. ``fill`` is ``prefill`` (histories are computed) or ``random`` (rows of random numbers)."""

    geometry: str
    contexts: int = 4
    length: int = 1024
    steps: int = 16
    device: str = "cpu"
    dtype: str = "auto"
    fill: str = "prefill"
    bits: bool = True
    draft_tokens: int = 0
    """Made-up tokens verified beside the last one in each pass, all of them wrong: what a pass of so many costs."""
    transformers: bool = False
    """Whether to decode the same histories with transformers, in the same run."""
    chunk_tokens: int = 2048
    page_tokens: int = 256
    host_pool_gib: float = 0.0
    device_pages_gib: int = 0
    retained: float = 0.0
    """Share of all histories that is kept in device pages (H1); 0 keeps none there, as ``--retain off``."""
    headroom_gib: str = "0"
    """Whole GiB of headroom that keeps history (H2), or ``auto``."""
    headroom_reserve_gib: float = HEADROOM_RESERVE_BYTES / GIB
    profile: Path | None = None
    """Where to write a trace of some further steps, gzipped; what they spent their time on is told too."""
    memory: bool = False
    """Whether to note device memory over time, from the weights to the last token."""

    def __post_init__(self) -> None:
        if self.contexts < 1 or self.length < 2 or self.steps < 1:
            raise UsageError("--contexts and --steps must be 1 or more, --length 2 or more")
        if not 0 <= self.retained <= 1:
            raise UsageError(f"--retained {self.retained} must be 0 (streamed) to 1 (all history on the device)")
        if self.fill not in ("prefill", "random"):
            raise UsageError(f"--fill {self.fill!r} is neither prefill nor random")

    @property
    def answer_tokens(self) -> int:
        """Tokens of each answer: the steps below, and those in which first contexts decode beside the last prompts."""
        building = self.contexts * -(-self.length // self.chunk_tokens) if self.fill == "prefill" else 0
        profiled_steps = PROFILED_STEPS if self.profile is not None else 0
        steps = WARM_STEPS + self.steps + LIFECYCLE_STEPS + profiled_steps + TAIL_STEPS
        return building + steps + self.draft_tokens


@dataclass(slots=True)
class Run:
    """One route's measurements and the logits of its decode steps, by step."""

    seconds: float
    steps: int
    hit_bytes: int
    headroom_bytes: int
    """History found in device pages, and in headroom."""
    predicted_s: float
    """What the rates learned from the steps before said of the measured ones."""
    staged_bytes: int
    link_bytes_s: float
    prefill_seconds: float
    logits: dict[int, torch.Tensor]
    peak_bytes: int
    tokens: dict[int, tuple[int, ...]]
    lifecycle_share: float
    """Host seconds in leases, tickets and receipts for each second of decode."""
    transport_share: float
    """The same with the device calls in between."""
    headroom_gib: float
    """Headroom in use at the end of the measured steps."""
    profile: dict[str, Any] | None
    memory: list[tuple[float, float]]


def retained_pages(settings: BenchSettings) -> int:
    """Device pages that ``--retained`` keeps. Raises ``UsageError`` when they are fewer than the contexts' floors."""
    page, answer = settings.page_tokens, settings.answer_tokens
    whole = rounded_up(settings.length + answer, page) // page
    pages, floor = round(settings.retained * settings.contexts * whole), min(FLOOR_PAGES, whole)
    if settings.retained and pages < settings.contexts * floor:
        share, length = math.ceil(100 * floor / whole) / 100, math.ceil(FLOOR_PAGES / settings.retained) * page - answer
        raise UsageError(
            f"--retained {settings.retained} of {settings.contexts} contexts of {whole} pages is {pages}, each needs "
            f"{floor}: set --retained to {share} or more, --length to {length} or more, or lower --page-tokens"
        )
    return pages


def bench(settings: BenchSettings) -> dict[str, Any]:
    """Measure. Raises ``RefusedError`` or ``UsageError`` when it does not fit, naming the setting."""
    retained_pages(settings)
    device = open_device(settings.device)
    cuda = device.torch_device.type == "cuda"
    dtype = dtype_of(settings, device)
    context_tokens = settings.length + settings.answer_tokens
    config = shape_config(settings.geometry, context_tokens)
    before, source = device_bytes(device)
    loaded = from_config(config, device, dtype, context_tokens, settings.geometry)
    _trim(device)
    staged_settings = _engine_settings(settings, loaded, "staged")
    staged = _run(loaded, staged_settings, settings)
    floor_s = staged.staged_bytes / staged.steps / staged.link_bytes_s
    step_s = staged.seconds / staged.steps
    figures: dict[str, Any] = {
        "geometry": settings.geometry,
        "contexts": settings.contexts,
        "length": settings.length,
        "fill": settings.fill,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": staged.steps,
        "bytes_per_token": loaded.geometry.token_bytes,
        "retained": settings.retained,
        "draft_tokens": settings.draft_tokens,
        "headroom_gib": staged.headroom_gib,
        "staged_gb_step": round(staged.staged_bytes / staged.steps / 1e9, 4),
        "hit_gb_step": round(staged.hit_bytes / staged.steps / 1e9, 4),
        "headroom_gb_step": round(staged.headroom_bytes / staged.steps / 1e9, 4),
        "predicted_ms_step": round(1000 * staged.predicted_s / staged.steps, 3),
        "link_gbps": round(staged.link_bytes_s / 1e9, 2),
        "floor_tokens_s": round(settings.contexts / floor_s, 2) if floor_s else None,
        "tokens_s": round(settings.contexts / step_s, 2),
        "of_floor": round(floor_s / step_s, 4),
        "ms_step": round(1000 * step_s, 3),
        "lifecycle_share": round(staged.lifecycle_share, 4),
        "transport_share": round(staged.transport_share, 4),
        "prefill_tokens_s": None
        if settings.fill == "random"
        else round(settings.contexts * settings.length / staged.prefill_seconds, 1),
        "weights_gb": round(sum(tensor.nbytes for tensor in loaded.module.parameters()) / 1e9, 3),
        "device_pages_gib": staged_settings.device_pages_gib,
        "host_pool_gib": staged_settings.host_pool_gib,
        "peak_gb": round(staged.peak_bytes / 1e9, 3) if cuda else None,
        "before_gb": round(before / 1e9, 3) if cuda else None,
        "peak_source": source,
        "bitwise": None,
        "resident_repeats": None,
    }
    if staged.profile is not None:
        figures["profile"] = staged.profile
    if settings.memory:
        figures["memory_gb"] = staged.memory
    if settings.bits:
        figures |= _compare(loaded, settings, staged)
    if settings.transformers:
        _trim(device)
        figures |= decode_rates(loaded, settings.contexts, settings.length, settings.steps, figures["tokens_s"])
    return figures | {"device": device_name(device), "versions": versions()}


def bit_table(settings: BenchSettings, told: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """H4's table of cells (``cells.table``) for random weights of a geometry; ``told`` sees each row as it comes.

    Of ``settings`` only geometry, device, dtype and page_tokens count. ``passed`` says whether every cell did.
    """
    device = open_device(settings.device)
    dtype = dtype_of(settings, device)
    context_tokens = CONTEXT_PAGES * settings.page_tokens
    config = shape_config(settings.geometry, context_tokens)
    loaded = from_config(config, device, dtype, context_tokens, settings.geometry)
    base = EngineSettings(
        model=settings.geometry, device=settings.device, page_tokens=settings.page_tokens, dtype=settings.dtype
    )
    began, rows = time.perf_counter(), []
    for row in table(lambda: fresh_device(loaded, settings), base):
        told(row)
        rows.append(row)
    cells = [cell for row in rows for cell in row.cells]
    repeats = sum(row.repeats for row in rows)
    return {
        "geometry": settings.geometry,
        "dtype": str(dtype).removeprefix("torch."),
        "page_tokens": settings.page_tokens,
        "passed": bool(rows) and repeats == len(rows) and all(cell.passed for cell in cells),
        "of": len(rows),
        "resident_repeats": repeats,
        "routes": {route: sum(cell.passed for cell in cells if cell.route == route) for route in ROUTES},
        "cells": [asdict(cell) | {"passed": cell.passed} for cell in cells],
        "seconds": round(time.perf_counter() - began, 2),
        "device": device_name(device),
        "versions": versions(),
    }


def dtype_of(settings: BenchSettings, device: Device) -> torch.dtype:
    """As asked for; ``auto`` is bfloat16 on a GPU, float32 elsewhere."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    return torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32


def _compare(loaded: LoadedModel, settings: BenchSettings, staged: Run) -> dict[str, Any]:
    """Two runs of the reference: each against the other is the first control, then the staged one against it."""
    reference = [
        _run(fresh_device(loaded, settings), _engine_settings(settings, loaded, "full"), settings) for _ in range(2)
    ]
    if not staged.logits or staged.logits.keys() != reference[0].logits.keys():
        raise InvariantError("the routes did not run the same schedule")
    return {
        "bitwise": _equal(staged, reference[0]),
        "bitwise_steps": len(staged.logits),
        "resident_repeats": _equal(reference[0], reference[1]),
        "resident_ms_step": round(1000 * reference[0].seconds / reference[0].steps, 3),
    }


def _equal(one: Run, other: Run) -> bool:
    return one.tokens == other.tokens and all(torch.equal(one.logits[step], other.logits[step]) for step in one.logits)


def fresh_device(loaded: LoadedModel, settings: BenchSettings) -> LoadedModel:
    """The same weights behind a fresh device: the last engine ended its own."""
    _trim(loaded.device)
    return replace(loaded, device=open_device(settings.device))


def _engine_settings(settings: BenchSettings, loaded: LoadedModel, residency: str) -> EngineSettings:
    """Only the pools that are needed, unless given: whole histories on the host, two slots (or all) on the device."""
    tokens = settings.length + settings.answer_tokens
    rows = settings.contexts * rounded_up(tokens, settings.page_tokens)
    host = math.ceil(rows * loaded.geometry.token_bytes / GIB * _GIB_STEP) / _GIB_STEP
    layers = loaded.geometry.layers if residency == "full" else 2
    kept = settings.retained * loaded.geometry.layers if residency == "staged" else 0
    pages = math.ceil((layers + kept) * rows * loaded.geometry.layer_token_bytes / GIB)
    if residency == "staged":
        pages = settings.device_pages_gib or pages
    return EngineSettings(
        model=settings.geometry,
        device=settings.device,
        device_pages_gib=pages,
        host_pool_gib=settings.host_pool_gib or host,
        concurrency=settings.contexts,
        context_tokens=tokens,
        residency=residency,
        page_tokens=settings.page_tokens,
        chunk_tokens=settings.chunk_tokens,
        dtype=settings.dtype,
        retain="on" if settings.retained else "off",
        shared_histories=0,
        draft_tokens=settings.draft_tokens,
        headroom_gib=settings.headroom_gib if residency == "staged" else "0",
        headroom_reserve_gib=settings.headroom_reserve_gib,
    )


def _run(loaded: LoadedModel, engine_settings: EngineSettings, settings: BenchSettings) -> Run:
    """One route from its first prompt to its last token; decode is timed between step boundaries."""
    with memory_over_time(loaded.device, wanted=settings.memory and engine_settings.residency == "staged") as memory:
        return _watched_run(loaded, engine_settings, settings, memory)


def _watched_run(
    loaded: LoadedModel, engine_settings: EngineSettings, settings: BenchSettings, memory: list[tuple[float, float]]
) -> Run:
    logits: dict[int, torch.Tensor] = {}

    def watch(plan: StepPlan, values: torch.Tensor) -> None:
        if all(share.samples for share in plan.shares) and len(plan.shares) == settings.contexts:
            logits[plan.step] = values.clone()

    prompts = _prompts(settings, loaded.geometry.vocabulary)
    ring_bytes = 1 << max(16, math.ceil(math.log2(8 * settings.contexts * settings.length)))
    local = LocalEngine(loaded, engine_settings, ring_bytes=ring_bytes, watch=watch)
    engine = local.engine
    if engine.fit.pages < (pages := retained_pages(settings)):
        raise UsageError(f"--device-pages-gib holds {engine.fit.pages} of {pages} pages of --retained: raise it")
    if settings.retained and engine.scheduler.kept.retention is not None:
        engine.scheduler.kept.retention = Retention(PagePool(pages), engine.fit.page_rows)
    engine.scheduler.turns = None  # all decode together in every series
    if engine.drafts is not None:
        _draft_wrongly(engine.drafts, loaded.geometry.vocabulary)
    link = link_rate(engine.device, engine.host, engine.pool) if engine.host is not None else 0.0
    if settings.fill == "random":
        fill_histories(engine)
        engine.scheduler.filled = settings.length - 1
    local.submit(prompts, [Sampling(max_tokens=settings.answer_tokens)] * settings.contexts)
    begun = time.perf_counter()
    while not logits:
        if not local.step() or local.finished:
            raise InvariantError(f"the histories were not built: {list(local.finished.values())[:1]}")
    prefilled = time.perf_counter()
    for _ in range(WARM_STEPS):
        local.step()
    hits, headroom, predicted = engine.hit_bytes, engine.headroom_bytes, engine.turns.predicted_s
    moved, start, first = engine.transport.bytes_in, time.perf_counter(), engine.steps
    for _ in range(settings.steps):
        local.step()
    seconds, steps, moved = time.perf_counter() - start, engine.steps - first, engine.transport.bytes_in - moved
    hits, headroom = engine.hit_bytes - hits, engine.headroom_bytes - headroom
    predicted, headroom_gib = engine.turns.predicted_s - predicted, engine.headroom.nbytes / GIB
    peak, _ = device_bytes(loaded.device)
    lifecycle_share, transport_share = _lifecycle(local)
    profile = None
    if settings.profile is not None and engine.host is not None:
        profile = profiled(loaded.device, local.step, settings.profile)
    local.run()
    if engine.host is not None:
        link = max(link, link_rate(engine.device, engine.host, engine.pool))
    tokens = {number: tuple(finished.token_ids) for number, finished in local.finished.items()}
    local.close()
    return Run(seconds, steps, hits, headroom, predicted, moved, link, prefilled - begun, logits, peak, tokens,
               lifecycle_share, transport_share, headroom_gib, profile, memory)  # fmt: skip


def _draft_wrongly(drafts: Drafts, vocabulary: int) -> None:
    """Tokens that nobody would sample, as many as there is room for."""
    propose = drafts.propose

    def made_up(number: int, room: int) -> tuple[int, ...]:
        last = propose(number, 0)[0]
        return (last, *((last + 1 + at) % vocabulary for at in range(min(drafts.most, room))))

    drafts.propose = made_up  # type: ignore[method-assign]


def _lifecycle(local: LocalEngine) -> tuple[float, float]:
    """Shares of some further decode steps: the lifecycle alone, and everything in the transport."""
    clock = LifecycleClock(local.engine.transport)
    start = time.perf_counter()
    for _ in range(LIFECYCLE_STEPS):
        local.step()
    seconds = time.perf_counter() - start
    clock.stop()
    return clock.lifecycle_s / seconds, clock.doors_s / seconds


def _prompts(settings: BenchSettings, vocabulary: int) -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)
    size = (settings.contexts, settings.length)
    return torch.randint(1, vocabulary, size, generator=chance).tolist()


def _trim(device: Device) -> None:
    """The last engine's memory goes back: it is part of a cycle, which nothing else collects in time."""
    gc.collect()
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
