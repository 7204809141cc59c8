"""shell: W3: long requests of which the device pages hold one, whole requests from the first prompt to the last token.

Cold, and with the prompts' histories on the host already: rows made up, of which only the last is computed. The same
engine settings for both; start-up and end of the engine are not counted.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.config import GIB, EngineSettings
from worker.engine.device_use import device_bytes, device_name, versions
from worker.engine.filling import fill_histories
from worker.engine.fit import rounded_up
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.runner import open_device
from worker.engine.versus import Requests, load_shape
from worker.structures import Sampling

NAME, SHAPE = "w3", "d16"


@dataclass(frozen=True, slots=True)
class LongWork:
    """``count`` requests of ``length`` tokens, answered with ``answer`` each."""

    count: int = 4
    length: int = 31_744
    answer: int = 256


def long_bench(settings: EngineSettings, work: LongWork = LongWork()) -> dict[str, Any]:
    """Seconds and new tokens a second of both, on the shape that ``settings.model`` names. Raises ``RefusedError`` when
    it does not fit."""
    tokens = work.length + work.answer
    loaded = load_shape(settings, tokens)
    rows = work.count * rounded_up(tokens, settings.page_tokens)
    host = math.ceil(rows * loaded.geometry.token_bytes / GIB * 1024) / 1024
    settings = replace(settings, context_tokens=tokens, concurrency=work.count, host_pool_gib=host, shared_histories=0)
    found: dict[str, Any] = {"requests": work.count, "length": work.length, "answer": work.answer}
    for name, filled in (("cold", False), ("on_host", True)):
        found[name] = _run(loaded, settings, work, filled)
        gc.collect()
    memory, _ = device_bytes(loaded.device)
    told = {"retain": settings.retain, "device_pages_gib": settings.device_pages_gib, "device_gb": memory / 1e9}
    return found | told | {"device": device_name(loaded.device), "versions": versions()}


def _run(loaded: LoadedModel, settings: EngineSettings, work: LongWork, filled: bool) -> dict[str, Any]:
    prompts, answers = Requests(work.count, (work.length,) * 2, (work.answer,) * 2).drawn(loaded.geometry.vocabulary)
    fresh = replace(loaded, device=open_device(settings.device, settings.threads))
    local = LocalEngine(fresh, settings, ring_bytes=1 << (8 * work.count * work.length).bit_length())
    engine = local.engine
    if filled:
        with torch.no_grad():
            fill_histories(engine)
        engine.scheduler.filled = work.length - 1
    began = time.perf_counter()
    local.submit(prompts, [Sampling(max_tokens=count) for count in answers])
    local.run()
    seconds = time.perf_counter() - began
    figures = {
        "seconds": round(seconds, 3),
        "new_tokens_s": round(sum(answers) / seconds, 2),
        "steps": engine.steps,
        "staged_gb": round(engine.transport.bytes_in / 1e9, 3),
        "replayed": engine.graphs.replays if engine.graphs is not None else 0,
    }
    local.close()
    return figures
