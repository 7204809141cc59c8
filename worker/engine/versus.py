"""shell: the same work through haulier's engine and through transformers, both in one run on the same weights.

``requests``: prompts and answers of mixed length, from the first prompt to the last token; transformers runs them as
one padded batch (``generate``) and through its continuous batching. ``decode``: equal long histories of random rows,
steps of decode alone; transformers keeps them in a ``DynamicCache``, on the device or offloaded. Answers are greedy and
as long as asked: nothing ends early. Sides run in turns, round after round, so that a slow minute hits all of them.
"""

from __future__ import annotations

import gc
import inspect
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from common.config import GIB, EngineSettings
from common.errors import UsageError
from worker.engine.fit import SLOTS, rounded_up
from worker.engine.local import LocalEngine
from worker.engine.model import DTYPES, SHAPES, LoadedModel, from_config, shape_config
from worker.engine.runner import load, open_device
from worker.structures import Sampling

Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Requests:
    """``count`` requests, prompts of ``lengths`` and answers of ``answers`` tokens (ends included), drawn evenly."""

    count: int
    lengths: tuple[int, int]
    answers: tuple[int, int]
    seed: int = 1

    def __post_init__(self) -> None:
        for name, (low, high) in (("--lengths", self.lengths), ("--answers", self.answers)):
            if not 1 <= low <= high:
                raise UsageError(f"{name} {low}:{high} must be a lower and an upper number of tokens, from 1 on")

    def drawn(self, vocabulary: int) -> tuple[list[list[int]], list[int]]:
        """Prompts (token ids) and how many tokens each is to be answered with."""
        chance = random.Random(self.seed)
        prompts = [
            [chance.randrange(1, vocabulary) for _ in range(chance.randint(*self.lengths))] for _ in range(self.count)
        ]
        return prompts, [chance.randint(*self.answers) for _ in range(self.count)]


Side = Callable[[Sequence[list[int]], Sequence[int]], tuple[float, Answers]]
"""Runs prompts to answers of given lengths: seconds, and the answers' token ids."""


def of_requests(settings: EngineSettings, work: Requests, *, beside: bool, rounds: int = 3) -> dict[str, Any]:
    """``compare_requests`` for a shape of random weights or a real model; pools as large as all histories need.

    ``beside`` transformers, on a CPU ``generate`` alone: its continuous batching is made for GPUs. Raises
    ``RefusedError`` when it does not fit.
    """
    settings = replace(settings, context_tokens=work.lengths[1] + work.answers[1])
    loaded = load_shape(settings, settings.context_tokens) if settings.model in SHAPES else load(settings)
    geometry = loaded.geometry
    rows = settings.concurrency * rounded_up(settings.context_tokens, settings.page_tokens)
    settings = replace(
        settings,
        host_pool_gib=math.ceil(rows * geometry.token_bytes / GIB * 1024) / 1024,
        device_pages_gib=math.ceil((geometry.layers + SLOTS) * rows * geometry.layer_token_bytes / GIB),
    )
    others = [] if not beside else [*OTHERS] if loaded.device.kind == "cuda" else ["generate"]
    found = {
        "model": settings.model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "concurrency": settings.concurrency,
        "threads": torch.get_num_threads(),
    }
    return found | compare_requests(loaded, settings, work, rounds, others)


def load_shape(settings: EngineSettings, context_tokens: int) -> LoadedModel:
    """Random weights of the shape that ``settings.model`` names, on the device of ``settings``."""
    device = open_device(settings.device, settings.threads)
    dtype = DTYPES.get(settings.dtype) or (torch.bfloat16 if device.kind == "cuda" else torch.float32)
    return from_config(shape_config(settings.model, context_tokens), device, dtype, context_tokens, settings.model)


def compare_requests(
    loaded: LoadedModel, settings: EngineSettings, work: Requests, rounds: int, others: Sequence[str]
) -> dict[str, Any]:
    """Output tokens a second of each side, medians of ``rounds``; ratios are medians of each round's own.

    ``others``: of ``OTHERS``, whom to run beside. ``same_answers`` counts requests whose token ids are equal on both.
    """
    prompts, answers = work.drawn(loaded.geometry.vocabulary)
    sides: dict[str, Side] = {"haulier": lambda *given: _haulier(loaded, settings, *given)}
    for name in others:
        sides[name] = lambda *given, run=OTHERS[name]: run(loaded.module, *given)
    took: dict[str, list[float]] = {name: [] for name in sides}
    said: dict[str, Answers] = {}
    for _ in range(rounds):
        for name, side in sides.items():
            gc.collect()
            seconds, said[name] = side(prompts, answers)
            took[name].append(sum(answers) / seconds)
    return {
        "requests": work.count,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(answers),
        "rounds": rounds,
        **{f"{name}_tokens_s": round(statistics.median(values), 2) for name, values in took.items()},
        **{f"of_{name}": _ratio(took["haulier"], took[name]) for name in others},
        **{
            f"same_answers_{name}": sum(one == other for one, other in zip(said["haulier"], said[name], strict=True))
            for name in others
        },
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3)


def _haulier(
    loaded: LoadedModel, settings: EngineSettings, prompts: Sequence[list[int]], answers: Sequence[int]
) -> tuple[float, Answers]:
    """All requests in one batch through the ring; start-up and end of the engine are not counted."""
    ring_bytes = 1 << max(16, (8 * sum(map(len, prompts))).bit_length())
    fresh = replace(loaded, device=open_device(settings.device, settings.threads))
    local = LocalEngine(fresh, settings, ring_bytes=ring_bytes)
    began = time.perf_counter()
    numbers = local.submit(prompts, [Sampling(max_tokens=count) for count in answers])
    finished = local.run()
    seconds = time.perf_counter() - began
    local.close()
    return seconds, [list(finished[number].token_ids) for number in numbers]


def _generate(module: Any, prompts: Sequence[list[int]], answers: Sequence[int]) -> tuple[float, Answers]:
    """One batch, padded on the left; as many steps as the longest answer needs."""
    wide, most = max(map(len, prompts)), max(answers)
    ids = torch.zeros((len(prompts), wide), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, wide - len(prompt) :] = torch.tensor(prompt)
        mask[row, wide - len(prompt) :] = 1
    place = module.device
    began = time.perf_counter()
    with torch.no_grad():
        found = module.generate(
            input_ids=ids.to(place), attention_mask=mask.to(place), do_sample=False, max_new_tokens=most,
            min_new_tokens=most, pad_token_id=0,
        )  # fmt: skip
    rows = found[:, wide:].tolist()
    return time.perf_counter() - began, [row[:count] for row, count in zip(rows, answers, strict=True)]


def _continuous(module: Any, prompts: Sequence[list[int]], answers: Sequence[int]) -> tuple[float, Answers]:
    """Its continuous batching (``generate_batch``), warmed up; one length of answer for all: the longest."""
    before = module.config._attn_implementation
    build: Any = transformers.GenerationConfig
    settings = build(max_new_tokens=max(answers), do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        module.generate_batch(
            inputs=list(prompts), generation_config=settings, progress_bar=False, persistent_manager=True
        )
        began = time.perf_counter()
        found = module.generate_batch(
            inputs=list(prompts), generation_config=settings, progress_bar=False, persistent_manager=True
        )
        seconds = time.perf_counter() - began
    finally:
        module.destroy_cached_continuous_batching_manager()
        module.set_attn_implementation(before)
    rows = [one.generated_tokens for _, one in sorted(found.items(), key=lambda item: int(item[0].rpartition("_")[2]))]
    return seconds, [row[:count] for row, count in zip(rows, answers, strict=True)]


OTHERS: dict[str, Callable[[Any, Sequence[list[int]], Sequence[int]], tuple[float, Answers]]] = {
    "generate": _generate,
    "continuous": _continuous,
}
"""How transformers runs requests, by name."""


def decode_rates(loaded: LoadedModel, contexts: int, length: int, steps: int, ours: float) -> dict[str, Any]:
    """Decode of transformers over ``contexts`` histories of ``length`` random rows, tokens a second, by cache:
    resident, and offloaded where there is a device to offload from; and ``ours`` as a multiple of each."""
    found: dict[str, Any] = {}
    for name in ("resident", "offloaded") if loaded.device.torch_device.type == "cuda" else ("resident",):
        seconds = _decode(loaded, contexts, length, steps, offloading=name == "offloaded")
        found[f"transformers_{name}_tokens_s"] = round(contexts * steps / seconds, 2)
        found[f"of_transformers_{name}"] = round(ours * seconds / (contexts * steps), 3)
        gc.collect()
        if loaded.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _decode(loaded: LoadedModel, contexts: int, length: int, steps: int, *, offloading: bool) -> float:
    geometry, place, module = loaded.geometry, loaded.device.torch_device, loaded.module
    cache = transformers.DynamicCache(config=module.config, offloading=offloading)
    parameters = inspect.signature(module.forward).parameters
    keyword = "cache" if "cache" in parameters else "past_key_values"  # renamed between releases
    shape = (contexts, geometry.kv_heads, length, geometry.head_dim)
    chance = torch.Generator(place)
    with torch.no_grad():
        for layer in range(geometry.layers):
            chance.manual_seed(layer)
            rows = torch.randn(shape, generator=chance, device=place, dtype=loaded.dtype)
            cache.update(rows, rows, layer)
        ids = torch.ones((contexts, 1), dtype=torch.int64, device=place)
        began = 0.0
        for step in range(-2, steps):
            if step == 0:
                _settled(place)
                began = time.perf_counter()
            logits = module(input_ids=ids, use_cache=True, **{keyword: cache}).logits
            ids = logits[:, -1:].argmax(-1)
        _settled(place)
    return time.perf_counter() - began


def _settled(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
