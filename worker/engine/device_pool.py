"""shell: the device page pool: one allocation of a whole number of GiB for all dense layers (A1), cut into rows.

Staging slots, retained pages and resident regions are rows of one arena, and attention always gets the whole of it:
streamed, retained and resident histories differ in their first row alone. Knows no context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.errors import InvariantError
from worker.engine.device import Device
from worker.engine.fit import SLOTS, Fit
from worker.engine.geometry import Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """K and V of some rows: (..., rows, kv heads, head dim) each."""

    key: torch.Tensor
    value: torch.Tensor

    def views(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``count`` rows from row ``first`` on: (count, kv heads, head dim) each, of the same memory."""
        return self.key[first : first + count], self.value[first : first + count]


class DevicePool:
    """``slots`` are empty with ``--residency full``; ``layers``, each layer's pages, are when nothing is retained."""

    def __init__(self, device: Device, geometry: Geometry, fit: Fit, dtype: torch.dtype) -> None:
        arena = device.allocate_device((2, fit.arena_rows, geometry.kv_heads, geometry.head_dim), dtype)
        self.arena = Rows(arena[0], arena[1])
        self.nbytes = arena.nbytes
        self.slots = self._cut([fit.slot_first(slot) for slot in range(SLOTS)], fit.slot_rows)
        self.layers = self._cut([fit.layer_first(layer) for layer in range(geometry.layers)], fit.pages * fit.page_rows)

    def _cut(self, firsts: list[int], rows: int) -> tuple[Rows, ...]:
        if not rows:
            return ()
        if firsts[-1] + rows > self.arena.key.shape[0]:
            raise InvariantError(f"{firsts[-1]} + {rows} rows do not fit into an arena of {self.arena.key.shape[0]}")
        return tuple(Rows(*self.arena.views(first, rows)) for first in firsts)
