"""shell: where a step's rows lie in the arena, layer by layer: made once a step from the packed rows, on the device.

A layer's staging slot and a layer's pages begin at rows that are known at start; a context's place within them is the
same in every layer: one small sum a step gives all layers' addresses, and a layer costs no host time of its own. What
is launched depends on the step's shape alone, so that it can be captured.
Knows no queue: the sums run on the current one, over tensors that are private to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.engine.device import Device
from worker.engine.fit import SLOTS, Fit
from worker.engine.kernels import Spans
from worker.engine.step import Ints, PackedStep
from worker.engine.tables import StepTensors


@dataclass(frozen=True, slots=True, eq=False)
class LayerAddress:
    """One layer of one step. ``rows`` (T,) int64: the arena rows of the new rows; ``spans`` for the attention call, and
    ``shared`` for the one over shared histories, whose queries begin at ``first_shared_row`` (H5). Where the step is
    cut in parts, ``spans`` are of the rows before ``first_prompt_row``, None if there are none, ``prompts`` of those
    behind, and ``blocks`` have their first row, rows, first arena row of the history, and rows of it before theirs."""

    slot_first: int
    """Arena row at which its slot begins; 0 with ``--residency full``."""
    page_first: int
    """Arena row at which its pages begin."""
    rows: torch.Tensor
    spans: Spans | None
    shared: Spans | None = None
    first_shared_row: int = 0
    prompts: Spans | None = None
    first_prompt_row: int = 0
    blocks: tuple[tuple[int, int, int, int], ...] = ()


class Addresses:
    """Of one engine. ``of`` on the engine's thread."""

    def __init__(self, device: Device, fit: Fit, layers: int) -> None:
        self._cuda = device.torch_device.type == "cuda"
        self._layers = layers
        pages = [fit.layer_first(layer) for layer in range(layers)]
        slots = [[fit.slot_first((first + layer) % SLOTS) for layer in range(layers)] for first in range(SLOTS)]
        self._firsts = np.array([np.array([of_slot, pages, [0] * layers]).T for of_slot in slots], np.int64)
        """(SLOTS, layers, 3): by the slot of the step's first layer, and by ``in_place``."""
        self._long = torch.tensor(self._firsts, device=device.torch_device)
        self._int = self._long.int()
        self.pages = self._long[0, :, 1:2]
        """(layers, 1) int64: the arena row at which each layer's pages begin."""

    def of(self, packed: PackedStep, tensors: StepTensors, first_slot: int) -> tuple[LayerAddress, ...]:
        """Each layer's addresses, when the step's first layer is staged in ``first_slot`` and the others in turn."""
        rows = self._sum(self._long[first_slot], tensors["rows"], tensors["rows_in_place"])
        slots, pages, _ = self._firsts[first_slot].T.tolist()
        parts, none = packed.parts, [None] * self._layers
        own: Sequence[Spans | None] = none
        shared: Sequence[Spans | None] = none
        prompts: Sequence[Spans | None] = none
        if parts is None or parts.decode_rows:
            own = self._spans(packed, tensors, first_slot, "", (packed.longest_query, packed.longest_history))
        if packed.plan.joined:
            longest = packed.longest_shared_query, packed.longest_shared_history
            shared = self._spans(packed, tensors, first_slot, "shared_", longest)
        if parts is not None and parts.longest_query:
            longest = parts.longest_query, parts.longest_history
            prompts = self._spans(packed, tensors, first_slot, "prompt_", longest)
        cut = 0 if parts is None else parts.decode_rows
        return tuple(
            LayerAddress(
                slots[layer], pages[layer], rows[layer], own[layer], shared[layer], packed.first_shared_row,
                prompts[layer], cut, self._blocks(packed, first_slot, layer),
            )
            for layer in range(self._layers)
        )  # fmt: skip

    def _blocks(self, packed: PackedStep, first_slot: int, layer: int) -> tuple[tuple[int, int, int, int], ...]:
        if packed.parts is None:
            return ()
        firsts, starts, places = self._firsts[first_slot, layer], packed.ints["history_starts"], packed.ints["in_place"]
        return tuple(
            (one.first, one.rows, int(firsts[places[one.share]] + starts[one.share]), one.known)
            for one in packed.parts.blocks
        )

    def _spans(
        self,
        packed: PackedStep,
        tensors: StepTensors,
        first_slot: int,
        which: str,
        longest: tuple[int, int],
    ) -> Sequence[Spans]:
        """One a layer: of the contexts' own histories, or with ``which`` of those they share."""
        history, place, queries, lengths = (
            which + name for name in ("history_starts", "in_place", "query_starts", "lengths")
        )
        count = len(packed.ints[lengths]) if which or packed.parts is None else packed.parts.decodes
        starts = self._sum(self._int[first_slot], tensors[history][: count + 1], tensors[place][: count + 1])
        hosts = self._host_starts(packed.ints[history], first_slot, packed.ints[place])
        host_queries = () if self._cuda else packed.ints[queries][: count + 1].tolist()
        host_lengths = () if self._cuda else packed.ints[lengths][:count].tolist()
        ours, long = tensors[queries][: count + 1], tensors[lengths][:count]
        return [
            Spans(host_queries, hosts[layer], host_lengths, ours, starts[layer], long, *longest)
            for layer in range(self._layers)
        ]

    @staticmethod
    def _sum(firsts: torch.Tensor, rows: torch.Tensor, in_place: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(layers,) of ``rows``, counted from the arena's start; ``firsts`` (layers, 3), ``in_place`` as ``rows``."""
        return (rows + firsts.index_select(1, in_place)).unbind(0)

    def _host_starts(self, starts: Ints, first_slot: int, in_place: Ints) -> list[list[int]]:
        """The same as lists, for a CPU's kernel; empty on CUDA."""
        if self._cuda:
            return [[]] * self._layers
        found: list[list[int]] = (starts + self._firsts[first_slot][:, in_place]).tolist()
        return found
