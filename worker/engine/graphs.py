"""shell: decode steps whose histories are all in place, replayed as a whole: one launch instead of some hundred.

Shapes of short histories are captured at start (``warm_up``). Any other runs as ever the first time, is captured the
second time and replayed from then on. A captured pass finds its inputs in tensors of one place; what it gives is valid
until the next one. The same launches run either way, so that the bits are those of the pass as it runs as ever (H4).
Sampling is no part of it. Knows no request and no page.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from common.config import EngineSettings
from common.errors import InvariantError
from common.limits import GRAPHS_MAX_COUNT
from worker.engine.addresses import Addresses, LayerAddress
from worker.engine.device import Replay
from worker.engine.fit import Fit
from worker.engine.model import LoadedModel
from worker.engine.padded_step import blank
from worker.engine.padding import padded_history, shapes
from worker.engine.routes import LiveStep, Route
from worker.engine.step import PackedStep
from worker.engine.tables import StepTensors

_ROWS = ("positions", "rows", "rows_in_place")
_CONTEXTS = ("history_starts", "in_place", "lengths")
"""What changes from step to step, beside the token ids: int64 one a row, int32 one a context."""


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """A whole step on its way through the model (``attention.StepAttention``): every layer attends where it lies."""

    route: Route
    packed: PackedStep
    layers: tuple[LayerAddress, ...]
    context_tokens: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        return self.route.call(self.packed, self.layers[layer], query, key, value, scale)


def graphs_of(
    settings: EngineSettings, loaded: LoadedModel, route: Route, addresses: Addresses, fit: Fit
) -> Graphs | None:
    """As the settings have it. A hybrid's steps are never whole: its states are found by lists that a step carries."""
    if loaded.geometry.linear is not None or settings.graphs == "off":
        return None
    if settings.graphs == "auto" and loaded.device.kind != "cuda":
        return None
    return Graphs(loaded, route, addresses, fit, settings.context_tokens)


class Graphs:
    """Of one engine. One thread, the engine's."""

    def __init__(self, loaded: LoadedModel, route: Route, addresses: Addresses, fit: Fit, context_tokens: int) -> None:
        self._fit = fit
        self._loaded, self._device, self._route, self._addresses = loaded, loaded.device, route, addresses
        self._context_tokens = context_tokens
        self._shapes = shapes(fit.concurrency)
        most = self._shapes[0]
        where = loaded.device.torch_device
        self._inputs = {
            **{name: loaded.device.allocate_device((most,), torch.int64) for name in ("ids", *_ROWS)},
            **{name: loaded.device.allocate_device((most + 1,), torch.int32) for name in _CONTEXTS},
            "sample_rows": torch.arange(most, device=where),
            "query_starts": torch.arange(most + 1, dtype=torch.int32, device=where),
        }
        self._outputs: torch.Tensor | None = None
        self._captured: OrderedDict[tuple[int, int], Replay | None] = OrderedDict()
        """By rows and longest history; None after the first time."""
        self._now: PackedStep | None = None
        self.captures = self.replays = 0

    def forward(self, live: LiveStep, ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocabulary) of a whole step, valid until the next one. ``ids`` (rows,)."""
        packed = self._now = live.packed
        self._inputs["ids"][: packed.tokens].copy_(ids)
        for name in (*_ROWS, *_CONTEXTS):
            array = live.tensors[name]
            self._inputs[name][: array.numel()].copy_(array)
        shape = packed.tokens, packed.longest_history
        with self._route.whole(live):
            if shape not in self._captured:
                logits = self._first(shape)
            else:
                self._device.replay(self._captured[shape] or self._capture(shape))
                logits = self._kept(packed.tokens)
                self.replays += 1
        self._captured.move_to_end(shape)
        self._route.attended += self._loaded.geometry.layers
        return logits

    def warm_up(self) -> None:
        """Capture each shape of short histories, before the first step, where capturing saves anything."""
        if self._device.kind != "cuda":
            return
        history = padded_history(1)
        for rows in self._shapes:
            packed = self._now = blank(rows, history, self._fit)
            for name, array in (packed.longs | packed.ints).items():
                self._inputs[name][: array.size].copy_(torch.from_numpy(array))
            self._first((rows, history))
            self._capture((rows, history))

    def _first(self, shape: tuple[int, int]) -> torch.Tensor:
        """The step as it runs as ever: loads every kernel of its shape."""
        self._captured[shape] = None
        logits = self._pass()
        if self._outputs is None:
            size = self._shapes[0], logits.shape[1]
            self._outputs = torch.empty(size, dtype=logits.dtype, device=logits.device)
        return logits

    def _kept(self, rows: int) -> torch.Tensor:
        """Where a captured step leaves its logits."""
        if self._outputs is None:
            raise InvariantError("a step is replayed before any ran")
        return self._outputs[:rows]

    def _capture(self, shape: tuple[int, int]) -> Replay:
        def run() -> None:
            logits = self._pass()
            self._kept(logits.shape[0]).copy_(logits)

        captured = self._captured[shape] = self._device.capture(run)
        self.captures += 1
        if len(self._captured) > GRAPHS_MAX_COUNT:
            self._captured.popitem(last=False)  # used longest ago: no step of it is on the queue any more
        return captured

    def _pass(self) -> torch.Tensor:
        """The model over the step whose inputs are in place."""
        packed = self._now
        if packed is None:
            raise InvariantError("a step is replayed before its inputs are there")
        rows = packed.tokens
        inputs = {name: tensor[: rows + (tensor.dtype is torch.int32)] for name, tensor in self._inputs.items()}
        inputs["lengths"] = inputs["lengths"][:rows]
        layers = self._addresses.of(packed, StepTensors(inputs, None), 0)
        step = InPlace(self._route, packed, layers, self._context_tokens)
        return self._loaded.logits(inputs["ids"], inputs["positions"], inputs["sample_rows"], step)
