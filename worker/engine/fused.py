"""shell: small operations of a model's layers in one kernel each, on a GPU, by liger-kernel: norms, rotation, gate.

A decode step of few rows spends its time in launches of such operations, not in arithmetic. Each kind of module is
replaced only if the fused kernel gives what the module itself gives, up to rounding, on numbers tried at start: nothing
is known of models by name. Both routes run the same kernels (H4). Everything is put back when the engine ends.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.engine.attention import registered
from worker.engine.model import LoadedModel

ROTARY = "apply_rotary_pos_emb"
"""What modelling files of transformers call their rotation by."""
_TRIED_ROWS = 3
_ROUNDING = 2.0**-5
"""Two bf16 results of the same formula, rounded in another order, are closer than this, relative and absolute."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Fused operations. ``norm(x, weight, eps)`` is RMSNorm over the last dimension, ``gate(a, b)`` is silu(a) x b,
    ``rotate(q, k, cos, sin)`` turns (1, heads, rows, head dim) of each and may write over them."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def library(where: torch.device) -> Kernels | None:
    """liger-kernel's on CUDA, if it is installed (``haulier[cuda]``)."""
    if where.type != "cuda":
        return None
    try:
        from liger_kernel.ops.rms_norm import rms_norm_forward
        from liger_kernel.ops.rope import rope_forward
        from liger_kernel.ops.swiglu import swiglu_forward
    except ImportError:
        return None

    # the functions behind the library's autograd wrappers, which cost more host time than the kernels take
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor = rms_norm_forward(x.contiguous(), weight, eps, 0.0, "llama", None)[0]
        return out

    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = swiglu_forward(a.contiguous(), b.contiguous())[-1]
        return out

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, _, _ = rope_forward(q, k, cos, sin)
        return query, key

    return Kernels(norm, gate, rotate)


@contextmanager
def adapted(loaded: LoadedModel) -> Iterator[tuple[str, ...]]:
    """While it is entered the model's attention is ours and its small operations are fused; gives what was fused: not
    where transformers' tensor-parallel plan has put its own calls around them."""
    kernels = library(loaded.device.torch_device) if loaded.ranks == 1 else None
    with registered(loaded.module, loaded.geometry.dense), fused(loaded, kernels) as names:
        yield names


@contextmanager
def fused(loaded: LoadedModel, kernels: Kernels | None) -> Iterator[tuple[str, ...]]:
    """While it is entered, modules that the kernels compute as well run those; gives the names of their classes."""
    if kernels is None:
        yield ()
        return
    names, replaced, restore = [], [], _rotation(loaded, kernels)
    kinds: dict[type, list[Any]] = {}
    for module in loaded.module.modules():
        kinds.setdefault(type(module), []).append(module)
    for kind, modules in kinds.items():
        forwards = [_forward(module, kernels) for module in modules]
        if forwards[0] is None or not _close(modules[0], forwards[0]):
            continue
        names.append(kind.__name__)
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward
            replaced.append(module)
    try:
        yield (*names, *([ROTARY] if restore else []))
    finally:
        for module in replaced:
            del module.forward
        for place, before in restore:
            setattr(place, ROTARY, before)


def _forward(module: Any, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The fused form of a module that looks like RMSNorm or like a gated MLP, and takes one tensor as those do."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if isinstance(eps, float) and isinstance(weight, nn.Parameter) and weight.dim() == 1:
        return lambda x: kernels.norm(x, weight, eps)
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(isinstance(part, nn.Linear) for part in parts) and hasattr(module, "act_fn"):
        gate, up, down = parts
        return lambda x: down(kernels.gate(gate(x), up(x)))  # type: ignore[misc]
    return None


def _close(module: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether both give the same for some rows of numbers, up to rounding."""
    weight = module.weight if hasattr(module, "weight") else module.gate_proj.weight
    rows = _numbers((1, _TRIED_ROWS, weight.shape[-1]), weight)
    return _same(forward(rows), module(rows))


def _rotation(loaded: LoadedModel, kernels: Kernels) -> list[tuple[Any, Any]]:
    """Replace the rotation of the files that the model's layers come from, where it is the kernel's; what it was."""
    files = {type(module).__module__ for module in loaded.module.modules()}
    places = [place for name in sorted(files) if hasattr(place := sys.modules[name], ROTARY)]
    geometry, like = loaded.geometry, next(loaded.module.parameters())
    heads = [_numbers((1, _TRIED_ROWS, count, geometry.head_dim), like) for count in (geometry.query_heads, 1)]
    angles = _numbers((1, _TRIED_ROWS, geometry.head_dim // 2), like).repeat(1, 1, 2)
    query, key = (one.transpose(1, 2) for one in heads)

    found = []
    for place in places:
        before = getattr(place, ROTARY)
        wanted = before(query, key, angles.cos(), angles.sin())
        given = kernels.rotate(query.clone(), key.clone(), angles.cos(), angles.sin())
        if all(_same(one, other) for one, other in zip(given, wanted, strict=True)):
            found.append((place, before))
            setattr(place, ROTARY, kernels.rotate)
    return found


def _numbers(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=chance).to(like.device, like.dtype)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=_ROUNDING, atol=_ROUNDING)
