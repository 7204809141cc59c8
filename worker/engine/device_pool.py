"""shell: the device page pool: one allocation of a whole number of GiB for all dense layers (A1), cut into rows.

Staging slots and resident regions are views of the same arena: streamed and resident attention read the same tensor
type with the same strides, at other addresses. Knows no context.
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


class DevicePool:
    """``slots`` with ``--residency staged``, ``layers`` with ``--residency full``; the other one is empty."""

    def __init__(self, device: Device, geometry: Geometry, fit: Fit, dtype: torch.dtype) -> None:
        arena = device.allocate_device((2, fit.arena_rows, geometry.kv_heads, geometry.head_dim), dtype)
        self.arena = Rows(arena[0], arena[1])
        self.nbytes = arena.nbytes
        if fit.slot_rows:
            self.slots = self._cut(SLOTS, fit.slot_rows)
            self.layers: tuple[Rows, ...] = ()
        else:
            self.slots = ()
            self.layers = self._cut(geometry.layers, fit.concurrency * fit.context_rows)

    def _cut(self, pieces: int, rows: int) -> tuple[Rows, ...]:
        if pieces * rows > self.arena.key.shape[0]:
            raise InvariantError(f"{pieces} x {rows} rows do not fit into an arena of {self.arena.key.shape[0]}")
        return tuple(
            Rows(self.arena.key[start : start + rows], self.arena.value[start : start + rows])
            for start in range(0, pieces * rows, rows)
        )
