"""shell: where a step's rows lie in the arena, layer by layer: made once a step from the packed rows, on the device.

A layer's staging slot and a layer's pages begin at rows that are known at start; a context's place within them is the
same in every layer: one small sum a step gives all layers' addresses, and a layer costs no host time of its own.
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
    ``shared`` for the one over shared histories, whose queries begin at ``first_shared_row`` (H5)."""

    slot_first: int
    """Arena row at which its slot begins; 0 with ``--residency full``."""
    page_first: int
    """Arena row at which its pages begin."""
    rows: torch.Tensor
    spans: Spans
    shared: Spans | None = None
    first_shared_row: int = 0


class Addresses:
    """Of one engine. ``of`` on the engine's thread."""

    def __init__(self, device: Device, fit: Fit, layers: int) -> None:
        self._cuda = device.torch_device.type == "cuda"
        self._layers = layers
        pages = [fit.layer_first(layer) for layer in range(layers)]
        slots = [[fit.slot_first((first + layer) % SLOTS) for layer in range(layers)] for first in range(SLOTS)]
        self._firsts = np.array([*slots, pages], np.int64)
        where = device.torch_device
        self._long = torch.tensor(self._firsts, device=where)[:, :, None]
        self._int = self._long.int()
        self.pages = self._long[SLOTS]
        """(layers, 1) int64: the arena row at which each layer's pages begin."""

    def of(self, packed: PackedStep, tensors: StepTensors, first_slot: int) -> tuple[LayerAddress, ...]:
        """Each layer's addresses, when the step's first layer is staged in ``first_slot`` and the others in turn."""
        in_place = packed.ints["in_place"]
        rows = self._sum(self._long, tensors["rows"], tensors["rows_in_place"], first_slot, in_place)
        slots, pages = self._firsts[first_slot], self._firsts[SLOTS]
        longest = packed.longest_query, packed.longest_history
        own = self._spans(packed, tensors, first_slot, "", in_place, longest)
        shared: Sequence[Spans | None] = [None] * self._layers
        if packed.plan.joined:
            longest = packed.longest_shared_query, packed.longest_shared_history
            in_place = packed.ints["shared_in_place"]
            shared = self._spans(packed, tensors, first_slot, "shared_", in_place, longest)
        return tuple(
            LayerAddress(
                int(slots[layer]), int(pages[layer]), rows[layer], own[layer], shared[layer], packed.first_shared_row
            )
            for layer in range(self._layers)
        )

    def _spans(
        self,
        packed: PackedStep,
        tensors: StepTensors,
        first_slot: int,
        which: str,
        in_place: Ints,
        longest: tuple[int, int],
    ) -> Sequence[Spans]:
        """One a layer: of the contexts' own histories, or with ``which`` of those they share."""
        history, place, queries, lengths = (
            which + name for name in ("history_starts", "in_place", "query_starts", "lengths")
        )
        starts = self._sum(self._int, tensors[history], tensors[place], first_slot, in_place)
        hosts = self._host_starts(packed.ints[history], first_slot, in_place)
        host_queries = () if self._cuda else packed.ints[queries].tolist()
        host_lengths = () if self._cuda else packed.ints[lengths].tolist()
        return [
            Spans(host_queries, hosts[layer], host_lengths, tensors[queries], starts[layer], tensors[lengths], *longest)
            for layer in range(self._layers)
        ]

    def _sum(
        self, firsts: torch.Tensor, rows: torch.Tensor, mixed: torch.Tensor, first_slot: int, in_place: Ints
    ) -> tuple[torch.Tensor, ...]:
        """(layers,) of ``rows``, counted from the arena's start. ``in_place`` (histories + 1,): the last is the end."""
        slots, pages = firsts[first_slot], firsts[SLOTS]
        if not in_place[:-1].any():
            return (rows + slots).unbind(0)
        if (in_place[:-1] == 1).all():
            return (rows + pages).unbind(0)
        return (rows + torch.where(mixed == 1, pages, torch.where(mixed == 0, slots, 0))).unbind(0)

    def _host_starts(self, starts: Ints, first_slot: int, in_place: Ints) -> list[list[int]]:
        """The same as lists, for a CPU's kernel; empty on CUDA."""
        if self._cuda:
            return [[]] * self._layers
        kinds = np.stack((self._firsts[first_slot], self._firsts[SLOTS], np.zeros(self._layers, np.int64)))
        found: list[list[int]] = (starts + kinds.T[:, in_place]).tolist()
        return found
