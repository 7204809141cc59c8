"""Our attention under its own name: restored afterwards, and what it cannot do is refused where it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import InvariantError, RefusedError
from tests.unit.worker.engine import rigs
from worker.engine.attention import KEYWORD, NAME, registered, staged_attention


class Step:
    """Attends by giving the query back."""

    context_tokens = 48

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        return query


class Module(torch.nn.Module):
    layer_idx = 1


def call(**keywords: Any) -> torch.Tensor:
    rows = torch.zeros(1, 2, 3, 8)
    return staged_attention(Module(), rows, rows, rows, **({"attention_mask": None, KEYWORD: Step()} | keywords))[0]


def test_the_models_own_attention_is_restored() -> None:
    """In life: the same module is used by others after the engine ended."""
    module = rigs.model().module
    with registered(module):
        assert module.config._attn_implementation == NAME
    assert module.config._attn_implementation == "sdpa"


def test_the_step_reaches_attention_as_a_keyword() -> None:
    """Shapes: (1, heads, tokens, dim) in, (1, tokens, heads, dim) out; without our keyword it is a bug."""
    assert call().shape == (1, 3, 2, 8)
    with pytest.raises(InvariantError, match=KEYWORD):
        call(**{KEYWORD: None})


@pytest.mark.parametrize("keywords", [{"attention_mask": torch.ones(1)}, {"dropout": 0.1}])
def test_a_mask_or_dropout_is_a_bug(keywords: dict[str, Any]) -> None:
    """Causality is ours: a mask that arrived would be ignored otherwise."""
    with pytest.raises(InvariantError):
        call(**keywords)


@pytest.mark.parametrize(
    "keywords", [{"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"sliding_window": 16}, {"is_causal": False}]
)
def test_what_we_do_not_do_is_refused_at_the_call(keywords: dict[str, Any]) -> None:
    """In life: a model whose config does not show it."""
    with pytest.raises(RefusedError):
        call(**keywords)


def test_a_window_beyond_every_context_is_full_attention() -> None:
    """Mistral hands its window down whatever the contexts are."""
    assert call(sliding_window=48).shape == (1, 3, 2, 8)
