"""shell: the authoritative history: one segment a context a dense layer, in host memory we allocate ourselves, once.

K and V are each (layers, rows, kv heads, head dim), segment behind segment (``Fit.segment_first``): one context's
history of one layer, or what several share of theirs, is a single run of bytes, so that staging it is one large copy.
Who owns which segment is ``segments``' to say.
"""

from __future__ import annotations

import torch

from worker.engine.device import Device
from worker.engine.device_pool import Rows
from worker.engine.fit import Fit
from worker.engine.geometry import Geometry


class HostPool:
    """``fit.segments`` segments, ``fit.rows`` rows in each dense layer. Freed by ``close`` alone."""

    def __init__(self, device: Device, geometry: Geometry, fit: Fit, dtype: torch.dtype) -> None:
        shape = (geometry.layers, fit.rows, geometry.kv_heads, geometry.head_dim)
        self._device = device
        self.key = device.allocate_host(shape, dtype)
        self.value = device.allocate_host(shape, dtype)
        self.layers = tuple(Rows(key, value) for key, value in zip(self.key, self.value, strict=True))
        """For each layer, K and V (rows, kv heads, head dim): what staging copies from."""
        self.device_rows = tuple(
            Rows(device.host_rows(layer.key), device.host_rows(layer.value)) for layer in self.layers
        )
        """The same bytes as device code may write them, one row a token: what write-back scatters into."""

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.key.nbytes + self.value.nbytes

    def close(self) -> None:
        """Give the memory back: only once the device is proved done with it (L7)."""
        self.device_rows = self.layers = ()
        self._device.free_host(self.key)
        self._device.free_host(self.value)
