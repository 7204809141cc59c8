"""shell: the states of a hybrid's linear-attention layers: ours, one a segment and layer, on the device.

A context's states lie in the slot of its segment for as long as it has one, parked or not; those of a shared history
stay as they are at its end, and whoever starts behind it begins with a copy. The layers' modules are called as they
are, for one context's rows at a time or for all rows that decode together: their forward alone is replaced, by one that
cuts the packed step apart. Everything runs on the compute queue, whose order is all that the states need. Of a model
whose layers are all dense there is nothing to keep. Knows no history.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.errors import InvariantError, RefusedError
from worker.engine.contexts import StepPlan
from worker.engine.device import Device
from worker.engine.geometry import LinearLayers
from worker.engine.tables import StepTensors

KEYWORD = "haulier_states"
_CACHE_NAMES = ("cache", "cache_params")
"""How releases of transformers name the argument."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt's rows in a step: ``rows`` of them from row ``first`` on, whose state is in ``slot``. The first chunk of
    a context begins with the state in ``source``, or with none."""

    first: int
    rows: int
    slot: int
    begins: bool = False
    source: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Which rows of a step are whose: travels through the model as our second keyword."""

    chunks: tuple[Chunk, ...]
    decode_rows: torch.Tensor
    decode_slots: torch.Tensor
    """(rows that decode,) int64 on the device each: the row in the step, and the slot of its state."""


def chunks_of(plan: StepPlan) -> tuple[Chunk, ...]:
    """The prompts' part of a step."""
    found, first = [], 0
    for share in plan.shares:
        if share.prompt:
            shared = share.context.shared
            begins = share.start == share.context.base
            source = -1 if shared is None or shared.page is None else shared.page.index
            found.append(Chunk(first, share.rows, share.page.index, begins, source if begins else -1))
        first += share.rows
    return tuple(found)


@dataclass(slots=True, eq=False)
class _LayerStates:
    """One layer's states of the contexts of one call, (contexts, ...) each, written in place, under the names of
    transformers' own."""

    conv: torch.Tensor
    recurrent: torch.Tensor
    record_past: bool = False

    @property
    def conv_states(self) -> Mapping[int, torch.Tensor]:
        return {0: self.conv}

    @property
    def recurrent_states(self) -> Mapping[int, torch.Tensor]:
        return {0: self.recurrent}


class _Cache:
    """What a linear-attention module asks of a cache, over the states of one call: every release of transformers asks
    for some of it. Nothing is recorded for taking tokens back."""

    def __init__(self, layer: int, states: _LayerStates) -> None:
        self.layers = {layer: states}

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        return state_idx in self.layers[layer].conv_states

    def is_recording_past(self, layer: int) -> bool:
        return self.layers[layer].record_past

    def get_recurrent_states_to_keep(self, layer: int) -> int:
        return 0

    def increase_count(self, layer: int, state_idx: int = 0) -> None:
        """Where a context stands is the plan's to know."""

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor:
        return self.layers[layer].conv_states[state_idx]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor:
        return self.layers[layer].recurrent_states[state_idx]

    def update_conv_state(self, new: torch.Tensor, layer: int, **keywords: Any) -> torch.Tensor:
        """``new`` (contexts, channels, rows): what the convolution sees, the state before it; the newest stay."""
        held = self.layers[layer].conv
        seen = torch.cat([held, new], dim=-1)
        held.copy_(_fitting(seen[..., -held.shape[-1] :], held, "convolution"))
        return seen

    def update_recurrent_state(self, new: torch.Tensor, layer: int, **keywords: Any) -> torch.Tensor:
        held = self.layers[layer].recurrent
        return held.copy_(_fitting(new, held, "recurrent"))


def _fitting(new: torch.Tensor, held: torch.Tensor, what: str) -> torch.Tensor:
    if new.shape != held.shape or new.dtype != held.dtype:
        raise RefusedError(
            f"a linear-attention layer has a {what} state of {tuple(new.shape)} {new.dtype}, its config promises "
            f"{tuple(held.shape)} {held.dtype}; haulier cannot keep it"
        )
    return new


class LinearStates:
    """``conv`` (linear layers, slots, channels, width) and ``recurrent`` (linear layers, slots, heads, key dim, value
    dim) float32, zeroed once, one slot a segment. One thread, the engine's."""

    def __init__(self, device: Device, linear: LinearLayers | None, slots: int, dtype: torch.dtype) -> None:
        self._layers = () if linear is None else linear.layers
        if linear is None:
            return
        count, self._device = len(self._layers), device.torch_device
        self.conv = device.allocate_device((count, slots, linear.channels, linear.width), dtype)
        shape = (count, slots, linear.heads, linear.key_dim, linear.value_dim)
        self.recurrent = device.allocate_device(shape, torch.float32)

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """While it is entered the model's linear-attention layers keep their states here."""
        found = {
            part.layer_idx: part
            for part in model.modules()
            if hasattr(part, "conv1d") and getattr(part, "layer_idx", None) in self._layers
        }
        if tuple(sorted(found)) != self._layers:
            raise RefusedError(
                f"{type(model).__name__} has linear attention in layers {sorted(found)}, its config promises "
                f"{list(self._layers)}; haulier cannot keep their states"
            )
        for layer in self._layers:
            self._refuse_another_shape(layer, found[layer])
        for index, layer in enumerate(self._layers):
            part = found[layer]
            part.forward = partial(self._forward, index, layer, part.forward, _cache_name(part.forward))
        try:
            yield
        finally:
            for part in found.values():
                del part.forward

    def _refuse_another_shape(self, layer: int, part: Any) -> None:
        """A state of the wrong width would be taken without a word."""
        held = (*self.conv.shape[2:], *self.recurrent.shape[2:])
        there = (*part.conv1d.weight.shape[::2], part.num_v_heads, part.head_k_dim, part.head_v_dim)
        if held != there:
            raise RefusedError(
                f"layer {layer} has linear attention of channels, width, heads and their dimensions {there}, its "
                f"config promises {held}; haulier cannot keep its states"
            )

    def keywords(self, plan: StepPlan, tensors: StepTensors) -> dict[str, StepRows]:
        """What a step carries through the model for these layers."""
        if not self._layers:
            return {}
        return {KEYWORD: StepRows(chunks_of(plan), tensors["last_to"], tensors["last_from"])}

    def probe(self, rows: int) -> dict[str, StepRows]:
        """The same of a pass before the first step: ``rows`` of one context, which decodes if it is one."""
        if not self._layers:
            return {}
        decodes = torch.zeros(1 if rows == 1 else 0, dtype=torch.int64, device=self._device)
        return {KEYWORD: StepRows((Chunk(0, rows, 0, begins=True),) if rows > 1 else (), decodes, decodes)}

    def _forward(
        self, index: int, layer: int, module: Any, name: str, hidden_states: torch.Tensor, **keywords: Any
    ) -> torch.Tensor:
        """One layer of one step: ``hidden_states`` (1, tokens, hidden size); shaped alike."""
        step: StepRows | None = keywords.pop(KEYWORD, None)
        if step is None or keywords.pop("attention_mask", None) is not None:
            raise InvariantError("a linear-attention layer is called without our keyword, or with a mask")
        for cache in _CACHE_NAMES:
            if keywords.pop(cache, None) is not None:
                raise InvariantError(f"a linear-attention layer is called with a {cache} that is not ours")
        conv, recurrent = self.conv[index], self.recurrent[index]

        def call(rows: torch.Tensor, states: _LayerStates) -> torch.Tensor:
            out: torch.Tensor = module(hidden_states=rows, **{name: _Cache(layer, states)}, **keywords)
            return out

        answer = torch.empty_like(hidden_states)
        for chunk in step.chunks:
            part = slice(chunk.first, chunk.first + chunk.rows)
            one = slice(chunk.slot, chunk.slot + 1)
            states = _LayerStates(conv[one], recurrent[one])
            if chunk.begins:
                _begin(states, conv, recurrent, chunk.source)
            answer[:, part] = call(hidden_states[:, part], states)
        if step.decode_slots.numel():
            slots, where = step.decode_slots, step.decode_rows
            states = _LayerStates(conv.index_select(0, slots), recurrent.index_select(0, slots))
            decoded = call(hidden_states[0].index_select(0, where)[:, None], states)
            answer[0].index_copy_(0, where, decoded[:, 0])
            conv.index_copy_(0, slots, states.conv)
            recurrent.index_copy_(0, slots, states.recurrent)
        return answer


def _begin(states: _LayerStates, conv: torch.Tensor, recurrent: torch.Tensor, source: int) -> None:
    """A context's first rows: whatever the slot's last owner left is gone."""
    if source < 0:
        states.conv.zero_()
        states.recurrent.zero_()
    else:
        states.conv.copy_(conv[source : source + 1])
        states.recurrent.copy_(recurrent[source : source + 1])


def _cache_name(forward: Any) -> str:
    for name in _CACHE_NAMES:
        if name in inspect.signature(forward).parameters:
            return name
    raise RefusedError("this release of transformers gives linear-attention layers their states in a way that is new")
