"""What is read from a config, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import RefusedError
from tests.unit.worker.engine import rigs
from worker.engine.geometry import geometry_of
from worker.engine.model import shape_config


def test_shapes_of_the_benchmarks() -> None:
    """D16 has 64 KiB of history a token, L8B twice that, as published."""
    d16 = geometry_of(shape_config("d16", 32_000), 2, 32_000)
    l8b = geometry_of(shape_config("l8b", 32_000), 2, 32_000)
    assert (d16.layers, d16.query_heads, d16.kv_heads, d16.head_dim, d16.token_bytes) == (16, 24, 4, 256, 65_536)
    assert (l8b.layers, l8b.kv_heads, l8b.head_dim, l8b.token_bytes) == (32, 8, 128, 131_072)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("gemma2", {}, "soft-capped attention"),
        ("gpt_oss", {}, "sinks"),
        ("llama", {"layer_types": ["full_attention", "conv", "full_attention"]}, "layers of type conv"),
        ("mistral", {"sliding_window": 16}, "sliding window of 16"),
        ("llama", {"kv_lora_rank": 16}, "latent attention"),
        ("llama", {"linear_num_value_heads": 4}, "linear attention"),
        ("llama", {"rope_parameters": LONGROPE}, "rope type longrope.*--context-tokens 32"),
        ("llama", {"max_position_embeddings": 40}, "--context-tokens 48"),
        ("llama", {"num_key_value_heads": 3}, "evenly"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(model_type: str, changes: dict[str, Any], words: str) -> None:
    """In life: a model that would run and answer wrongly is refused at start."""
    config = rigs.config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(RefusedError, match=words):
        geometry_of(config, 4, rigs.CONTEXT)


def test_a_window_no_context_can_reach_is_none() -> None:
    """In life: Mistral's window of 4,096 with shorter contexts is full attention."""
    assert geometry_of(rigs.config("mistral", sliding_window=64), 4, rigs.CONTEXT).layers == 3


def test_positions_that_a_longer_neighbour_would_change_are_served_as_far_as_none_does() -> None:
    """In life: Phi-3 of 128k positions, made from one of 4k: exact up to 4k, refused beyond."""
    config = rigs.config()
    config.rope_parameters = LONGROPE
    assert geometry_of(config, 4, 32).layers == 3
    with pytest.raises(RefusedError, match="more than 32 tokens"):
        geometry_of(config, 4, 33)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert geometry_of(config, 4, 256).layers == 3
