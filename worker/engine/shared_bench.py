"""shell: ``haulier bench engine --shared-tokens N``: decode of many questions on one document beside that of one (H5).

One engine, one document of made-up rows that is held once: first one question decodes, then all of them. With room for
the document and the link as the bound, all take little longer a step than one. Bits are compared with ``--residency
full`` over the same schedule. Nothing is reported that was not measured.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from common.config import GIB, EngineSettings
from common.errors import InvariantError, UsageError
from worker.engine.bench import (
    TAIL_STEPS,
    WARM_STEPS,
    BenchSettings,
    dtype_of,
    fresh_device,
)
from worker.engine.contexts import StepPlan
from worker.engine.device_use import device_name, versions
from worker.engine.filling import fill_histories
from worker.engine.fit import rounded_up
from worker.engine.link_rate import link_rate
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel, from_config, shape_config
from worker.engine.runner import open_device
from worker.structures import Sampling, SharedPrefix


@dataclass(slots=True)
class Part:
    """So many questions decoding together."""

    questions: int
    seconds: float
    steps: int
    staged_bytes: int
    spared_bytes: int
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens_s(self) -> float:
        return self.questions * self.steps / self.seconds


def shared_bench(settings: BenchSettings, shared_tokens: int) -> dict[str, Any]:
    """Measure: ``settings.contexts`` questions of ``settings.length`` tokens on a document of ``shared_tokens``. Raises
    ``RefusedError`` when it does not fit, naming the setting."""
    if shared_tokens % settings.page_tokens or shared_tokens < settings.page_tokens:
        raise UsageError(
            f"--shared-tokens {shared_tokens} must be one or more whole pages of --page-tokens {settings.page_tokens}"
        )
    device = open_device(settings.device)
    dtype = dtype_of(settings, device)
    own_tokens = settings.length + _answer_tokens(settings)
    context_tokens = shared_tokens + own_tokens
    config = shape_config(settings.geometry, context_tokens)
    loaded = from_config(config, device, dtype, context_tokens, settings.geometry)
    wanted = _engine_settings(settings, loaded, shared_tokens, own_tokens)
    one, all_, link = _run(loaded, wanted, settings, shared_tokens)
    row_bytes = loaded.geometry.token_bytes
    own_bytes = settings.contexts * settings.length * row_bytes
    figures: dict[str, Any] = {
        "geometry": settings.geometry,
        "shared_tokens": shared_tokens,
        "own_tokens": settings.length,
        "questions": settings.contexts,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": all_.steps,
        "bytes_per_token": row_bytes,
        "one_tokens_s": round(one.tokens_s, 2),
        "all_tokens_s": round(all_.tokens_s, 2),
        "ratio": round(all_.tokens_s / one.tokens_s, 2),
        "one_ms_step": round(1000 * one.seconds / one.steps, 3),
        "all_ms_step": round(1000 * all_.seconds / all_.steps, 3),
        "one_staged_gb_step": round(one.staged_bytes / one.steps / 1e9, 4),
        "all_staged_gb_step": round(all_.staged_bytes / all_.steps / 1e9, 4),
        "spared_gb_step": round(all_.spared_bytes / all_.steps / 1e9, 4),
        "unshared_gb_step": round((own_bytes + settings.contexts * shared_tokens * row_bytes) / 1e9, 4),
        "link_gbps": round(link / 1e9, 2),
        "host_pool_gib": wanted.host_pool_gib,
        "device_pages_gib": wanted.device_pages_gib,
        "bitwise": None,
    }
    if settings.bits:
        full = replace(
            wanted,
            residency="full",
            device_pages_gib=math.ceil(_rows(settings, wanted) * loaded.geometry.token_bytes / GIB),
        )
        *parts, _ = _run(fresh_device(loaded, settings), full, settings, shared_tokens)
        pairs = list(zip(one.logits + all_.logits, parts[0].logits + parts[1].logits, strict=True))
        figures["bitwise"] = bool(pairs) and all(torch.equal(mine, other) for mine, other in pairs)
    return figures | {"device": device_name(device), "versions": versions()}


def _answer_tokens(settings: BenchSettings) -> int:
    return WARM_STEPS + settings.steps + TAIL_STEPS


def _rows(settings: BenchSettings, wanted: EngineSettings) -> int:
    """Rows of one layer of all segments: short ones, and a whole one."""
    page = settings.page_tokens
    return rounded_up(wanted.context_tokens, page) + settings.contexts * rounded_up(wanted.own_tokens, page)


def _engine_settings(
    settings: BenchSettings, loaded: LoadedModel, shared_tokens: int, own_tokens: int
) -> EngineSettings:
    """Only the pools that are needed, unless given."""
    base = EngineSettings(
        model=settings.geometry,
        device=settings.device,
        concurrency=settings.contexts,
        context_tokens=shared_tokens + own_tokens,
        page_tokens=settings.page_tokens,
        chunk_tokens=settings.chunk_tokens,
        dtype=settings.dtype,
        retain="off",
        own_tokens=own_tokens,
        shared_histories=1,
    )
    rows = _rows(settings, base)
    host = math.ceil(rows * loaded.geometry.token_bytes / GIB * 1024) / 1024
    slots = math.ceil(2 * rows * loaded.geometry.layer_token_bytes / GIB)
    return replace(
        base, host_pool_gib=settings.host_pool_gib or host, device_pages_gib=settings.device_pages_gib or slots
    )


def _run(
    loaded: LoadedModel, wanted: EngineSettings, settings: BenchSettings, shared_tokens: int
) -> tuple[Part, Part, float]:
    """One question, then all, on one engine; and the link's rate."""
    seen: list[tuple[int, torch.Tensor]] = []

    def watch(plan: StepPlan, logits: torch.Tensor) -> None:
        if plan.joined and all(share.samples for share in plan.shares):
            seen.append((len(plan.shares), logits.clone() if settings.bits else logits[:0]))

    ring_bytes = 1 << max(16, math.ceil(math.log2(8 * settings.contexts * (shared_tokens + settings.length))))
    local = LocalEngine(loaded, wanted, ring_bytes=ring_bytes, watch=watch)
    engine = local.engine
    link = link_rate(engine.device, engine.host, engine.pool) if engine.host is not None else 0.0
    fill_histories(local.engine)
    local.engine.scheduler.filled = shared_tokens + settings.length - 1
    one = _measure(local, settings, shared_tokens, 1, seen)
    all_ = _measure(local, settings, shared_tokens, settings.contexts, seen)
    local.close()
    return one, all_, link


def _measure(
    local: LocalEngine,
    settings: BenchSettings,
    shared_tokens: int,
    questions: int,
    seen: list[tuple[int, torch.Tensor]],
) -> Part:
    """Decode so many questions from their first token on, to their end."""
    engine, vocabulary = local.engine, local.engine.loaded.geometry.vocabulary
    chance = torch.Generator().manual_seed(1)
    document = torch.randint(1, vocabulary, (shared_tokens,), generator=chance).tolist()
    asked = torch.randint(1, vocabulary, (questions, settings.length), generator=chance).tolist()
    prefix = SharedPrefix("the document", shared_tokens)
    sampling = Sampling(_answer_tokens(settings))
    seen.clear()
    local.submit([document + one for one in asked], [sampling] * questions, [prefix] * questions)
    while not seen or seen[-1][0] < questions:
        if not local.step():
            raise InvariantError(f"{questions} questions never decoded together")
    for _ in range(WARM_STEPS):
        local.step()
    moved, spared, start = engine.transport.bytes_in, engine.spared_bytes, time.perf_counter()
    first = engine.steps
    for _ in range(settings.steps):
        local.step()
    seconds, steps = time.perf_counter() - start, engine.steps - first
    moved, spared = engine.transport.bytes_in - moved, engine.spared_bytes - spared
    local.run()
    return Part(questions, seconds, steps, moved, spared, [logits for _, logits in seen])
