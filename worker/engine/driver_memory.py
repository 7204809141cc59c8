"""shell: device memory straight from the driver, freed piece by piece when told to, beside torch's allocator.

Emptying torch's cache instead would take the workspaces of the running model with it, and whole blocks alone. Memory is
freed by ``free`` only, never by a destructor (L7). Knows no queue and no pool of pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from worker.engine.device import CopyRefusedError, DeviceError
from worker.engine.pinned import Mapped, check


class DriverMemory:
    """Of one device. ``driver`` is ``cuda.bindings.driver``; the device's context is current."""

    def __init__(self, driver: Any, torch_device: torch.device) -> None:
        self._driver = driver
        self._torch_device = torch_device
        self._pieces: set[int] = set()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the device; its bytes are anything. ``DeviceError`` when there is no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = int(check(self._driver, self._driver.cuMemAlloc(nbytes), f"{nbytes / 2**30:.3f} GiB of device memory"))
        flat = torch.as_tensor(Mapped(start, nbytes), device=self._torch_device)
        if flat.data_ptr() != start:
            raise DeviceError("the framework copied device memory instead of aliasing it")
        self._pieces.add(start)
        return flat.view(dtype).view(tuple(shape))

    def free(self, tensor: torch.Tensor) -> None:
        """Give memory back to the driver; no view of it may be used any more."""
        start = tensor.data_ptr()
        if start not in self._pieces:
            raise CopyRefusedError("this tensor is not what allocate_chunk returned")
        self._pieces.remove(start)
        check(self._driver, self._driver.cuMemFree(start), "free device memory")
