"""shell: the attention function a transformers model calls, under our own name; the step travels as a keyword.

Called once a dense layer; layers count the dense ones alone. Registers and restores; knows nothing of how history gets
to the device: a ``Route`` does. No mask function is registered, so that the mask arrives as None and causality is the
kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from common.errors import InvariantError, RefusedError

NAME = "haulier_staged"
KEYWORD = "haulier_step"
_ORDINAL = "haulier_dense_layer"
"""Of an attention module in a hybrid: which of the dense layers it is."""


class StepAttention(Protocol):
    """What travels through the model: attends for one layer of one step."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``query`` (tokens, query heads, head dim), ``key`` and ``value`` (tokens, kv heads, head dim): the new rows.
        Returns the shape of ``query``."""


def _refuse(module: torch.nn.Module, keywords: dict[str, Any], step: StepAttention) -> None:
    """What a model asks of attention beyond our call: refused, never approximated."""
    if keywords.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RefusedError("this model's attention sees later tokens too, which haulier does not do")
    for name, words in (("softcap", "soft-capped attention"), ("s_aux", "attention sinks")):
        if keywords.get(name) is not None:
            raise RefusedError(f"this model uses {words}, which haulier does not do")
    window = keywords.get("sliding_window")
    if window is not None and window < getattr(step, "context_tokens", 0):
        raise RefusedError(f"this model attends over a sliding window of {window} tokens, which haulier does not do")


def staged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: ``query`` (1, query heads, tokens, head dim) and the same of ``key``, ``value``.
    Returns (1, tokens, query heads, head dim) and no weights."""
    step: StepAttention | None = keywords.get(KEYWORD)
    if step is None:
        raise InvariantError(f"the model did not hand our keyword {KEYWORD} to its attention")
    if attention_mask is not None or dropout:
        raise InvariantError("a mask or dropout arrived at attention: causality is ours and nothing is dropped")
    _refuse(module, keywords, step)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, _ORDINAL, module.layer_idx)
    if not isinstance(layer, int):
        raise InvariantError(f"layer_idx is {layer!r}")
    out = step.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out[None], None


@contextmanager
def registered(model: Any, dense: Sequence[int] = ()) -> Iterator[None]:
    """While it is entered the model's attention is ours; its own implementation is restored afterwards. ``dense`` are
    the layers that attend densely, where that is not all of them."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, staged_attention)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise RefusedError(f"{type(model).__name__} does not let its attention be replaced, so haulier cannot stage it")
    ordinals = {layer: ordinal for ordinal, layer in enumerate(dense)}
    marked = [part for part in model.modules() if getattr(part, "layer_idx", None) in ordinals]
    for part in marked:
        setattr(part, _ORDINAL, ordinals[part.layer_idx])
    try:
        yield
    finally:
        for part in marked:
            delattr(part, _ORDINAL)
        model.set_attn_implementation(before)
