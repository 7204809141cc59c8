"""values: small random models and scripted runs of the whole engine on the calling thread, for tests of many modules.

A scenario says which prompts arrive and which are cancelled before which step; the same scenario runs on either route,
under any temperament, and yields every step's plan and logits (``worker.engine.cells``, home of the table of cells).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from common.config import EngineSettings
from worker.engine import cells
from worker.engine.admission import PagePool
from worker.engine.cells import Outcome, Scenario, play, same, together
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel, from_config
from worker.engine.retention import Retention
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

__all__ = ["Outcome", "Scenario", "same", "together"]

HYBRID = {
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""Changes for a hybrid: layers 1 and 3 are dense, 0, 2 and 4 linear."""
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VOCABULARY = 97
CONTEXT = 48
PAGE = 4


def config(model_type: str = "llama", **changes: Any) -> Any:
    """A config of three layers, four query heads on two key heads of 8."""
    fields = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,
    }
    return transformers.AutoConfig.for_model(model_type, **(fields | changes))


def model(
    temperament: Temperament = Temperament.EAGER, seed: int = 0, model_type: str = "llama", **changes: Any
) -> LoadedModel:
    """A random float32 model behind a virtual device; the same weights each time."""
    return from_config(config(model_type, **changes), VirtualDevice(temperament, seed), torch.float32, CONTEXT)


def saved(
    folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any
) -> Path:
    """A random model with a tokenizer of one word a token, as transformers writes both to a folder; the same weights
    each time."""
    torch.manual_seed(0)
    build: Any = transformers.AutoModelForCausalLM.from_config
    build(config(model_type, **changes), dtype=dtype).save_pretrained(folder, max_shard_size=shard)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w0").save_pretrained(folder)
    return folder


def settings(**changes: Any) -> EngineSettings:
    """Three contexts of 48 tokens in pages of four, chunks of eight rows."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "host_pool_gib": 0.01,
        "concurrency": 3,
        "context_tokens": CONTEXT,
        "page_tokens": PAGE,
        "chunk_tokens": 8,
        "retain": "off",
    }
    return EngineSettings(**(fields | changes))


def prompt(length: int, salt: int = 0) -> list[int]:
    """Distinct data: no two prompts share rows."""
    return cells.prompt(length, salt, VOCABULARY)


CHURN = Scenario(
    prompts=(
        (9, Sampling(7)),
        (1, Sampling(4)),
        (17, Sampling(9)),
        (4, Sampling(1)),
        (12, Sampling(12)),
        (5, Sampling(3, temperature=0.8, seed=3)),
        (16, Sampling(6)),
        (3, Sampling(20)),
    ),
    arrive={0: (0, 1), 2: (2, 3, 4), 5: (5,), 9: (6, 7)},
    cancel={4: (2,), 7: (4,), 12: (7,)},
)
"""Contexts join, finish and are cancelled while others run, of unequal lengths, more than there are segments."""


def run(
    loaded: LoadedModel,
    scenario: Scenario,
    prepare: Callable[[LocalEngine], None] = lambda local: None,
    **changes: Any,
) -> Outcome:
    """Run a scenario to its end, books checked at every step, everything given back at the end."""
    return play(loaded, settings(**changes), scenario, prepare, at_rest)


def at_rest(local: LocalEngine) -> None:
    """Nothing is held once nothing runs: segments, leases, events, ring entries, answers."""
    engine = local.engine
    engine.scheduler.reclaim(engine.steps)
    engine.scheduler.shared.release(engine.scheduler.kept, engine.steps)
    engine.check()
    assert engine.scheduler.idle
    assert engine.scheduler.segments.held == 0
    assert engine.pages.holds == 0
    assert engine.device.events_held == 0
    assert engine.intake.entries == 0
    figures = local.producer.figures()
    assert figures.taken == figures.returned
    assert figures.entries_live == 0


def expected(loaded: LoadedModel, ids: list[int], tokens: int) -> list[int]:
    """The greedy answer of transformers' own generate."""
    return generated(loaded.module, ids, tokens)


def generated(module: Any, ids: list[int], tokens: int) -> list[int]:
    """The same of a module that no engine ever saw."""
    out = module.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def retaining(pages: int, target: int = 0, burst: int = 0) -> Callable[[LocalEngine], None]:
    """For ``prepare``: history is kept in so few pages; the smallest pool that settings allow holds far more."""

    def prepare(local: LocalEngine) -> None:
        local.engine.scheduler.kept.retention = Retention(PagePool(pages, target, burst), PAGE)

    return prepare
