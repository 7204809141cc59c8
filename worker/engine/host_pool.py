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
        flat = Rows(device.host_rows(self.key.flatten(0, 1)), device.host_rows(self.value.flatten(0, 1)))
        self.device_flat = flat
        """The same bytes as device code may write them, one row a token, layer behind layer."""
        self.device_rows = tuple(Rows(*flat.views(layer * fit.rows, fit.rows)) for layer in range(geometry.layers))
        """Of each layer: what write-back scatters into."""
        self.firsts = torch.arange(geometry.layers, device=device.torch_device)[:, None] * fit.rows
        """(layers, 1) int64 on the device: the row at which each layer begins."""

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.key.nbytes + self.value.nbytes

    def close(self) -> None:
        """Give the memory back: only once the device is proved done with it (L7)."""
        self.device_rows = self.layers = ()
        del self.device_flat
        self._device.free_host(self.key)
        self._device.free_host(self.value)
