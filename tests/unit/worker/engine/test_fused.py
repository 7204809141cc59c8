"""Fused operations of a model's layers: taken where they are right, left where they are not, put back at the end."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tests.unit.worker.engine import rigs
from worker.engine.fused import ROTARY, Kernels, fused, library
from worker.engine.model import LoadedModel


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return turn(q), turn(k)


RIGHT = Kernels(_norm, lambda a, b: silu(a) * b, _rotate)
ALL = {"Norm", "MLP", ROTARY}
WRONG = {
    "Norm": replace(RIGHT, norm=lambda x, weight, eps: _norm(x, weight + 1, eps)),
    "MLP": replace(RIGHT, gate=lambda a, b: a.relu() * b),
    ROTARY: replace(RIGHT, rotate=lambda q, k, cos, sin: _rotate(q, k, cos, -sin)),
}


def _kinds(names: tuple[str, ...]) -> set[str]:
    return {kind for kind in ALL for name in names if kind in name}


def _logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = loaded.module(torch.arange(12)[None]).logits
    return out


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_right_is_taken_and_put_back(model_type: str) -> None:
    """In life: the engine ends and the same model is used by something else in the process."""
    loaded = rigs.model(model_type=model_type)
    place = sys.modules[type(loaded.module).__module__]
    before, plain = getattr(place, ROTARY), _logits(loaded)
    with fused(loaded, RIGHT) as names:
        assert _kinds(names) == ALL
        assert getattr(place, ROTARY) is _rotate
        assert torch.allclose(_logits(loaded), plain, atol=1e-4)
        assert all("forward" in vars(one) for one in loaded.module.modules() if "Norm" in type(one).__name__)
    assert getattr(place, ROTARY) is before
    assert not any("forward" in vars(one) for one in loaded.module.modules())
    assert torch.equal(_logits(loaded), plain)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_what_differs_is_left_alone(kind: str) -> None:
    """In life: a model whose norm adds one to its weights, whose gate is another function, which rotates otherwise."""
    loaded = rigs.model()
    plain = _logits(loaded)
    with fused(loaded, WRONG[kind]) as names:
        assert _kinds(names) == ALL - {kind}
        assert torch.allclose(_logits(loaded), plain, atol=1e-4)


def test_an_engine_with_fused_kernels_has_equal_bits_on_both_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4, in life: the reference runs the same kernels."""
    monkeypatch.setattr("worker.engine.fused.library", lambda where: RIGHT)
    reference = rigs.run(rigs.model(model_type="qwen3"), rigs.CHURN, residency="full")
    staged = rigs.run(rigs.model(model_type="qwen3"), rigs.CHURN)
    assert rigs.same(staged, reference)


def test_a_cpu_has_none() -> None:
    """In life: the text of the default model is transformers' own, bit for bit."""
    assert library(torch.device("cpu")) is None
    loaded: Any = rigs.model()
    with fused(loaded, None) as names:
        assert names == ()
