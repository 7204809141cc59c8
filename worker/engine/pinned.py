"""shell: pinned, mapped host memory of exactly the size asked for, and its alias that device code may write.

The framework's pinned allocator rounds to powers of two; this asks the driver (``cuMemHostAlloc``). Knows no queue and
no pool of pages. Memory is freed only when told to, never by a destructor (L7).
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from worker.engine.device import CopyRefusedError, DeviceError


@dataclass(slots=True, eq=False)
class _Piece:
    """One allocation: its addresses on both sides, and the flat uint8 alias once somebody asked for it."""

    start: int
    nbytes: int
    device_start: int
    alias: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Mapped:
    """Shows memory that the device sees, of any owner, to the framework: ``torch.as_tensor`` of it is an alias."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class PinnedMemory:
    """All pinned host memory of one device. ``driver`` is ``cuda.bindings.driver``; the device's context is current."""

    def __init__(self, driver: Any, torch_device: torch.device) -> None:
        self._driver = driver
        self._torch_device = torch_device
        self._pieces: list[_Piece] = []
        self._starts: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes pinned."""
        return sum(piece.nbytes for piece in self._pieces)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed, contiguous CPU tensor in pinned memory, every page faulted in. ``DeviceError`` if it cannot be."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        driver = self._driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        what = f"{nbytes / 2**30:.3f} GiB of pinned host memory"
        start = int(check(driver, driver.cuMemHostAlloc(nbytes, flags), f"{what} (is memlock unlimited?)"))
        device_start = int(check(driver, driver.cuMemHostGetDevicePointer(start, 0), f"map {what}"))
        piece = _Piece(start, nbytes, device_start)
        at = bisect_right(self._starts, start)
        self._pieces.insert(at, piece)
        self._starts.insert(at, start)
        buffer = (ctypes.c_uint8 * nbytes).from_address(start)
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        flat.zero_()
        return flat.view(dtype).view(tuple(shape))

    def free(self, tensor: torch.Tensor) -> None:
        """Give memory back to the driver; no view of it may be used any more."""
        piece = self._piece(tensor)
        if piece is None or piece.start != tensor.data_ptr():
            raise CopyRefusedError("this tensor is not what allocate_host returned")
        at = self._starts.index(piece.start)
        del self._pieces[at], self._starts[at]
        piece.alias = None
        check(self._driver, self._driver.cuMemFreeHost(piece.start), "free pinned host memory")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from or to this CPU tensor are asynchronous: ours, or the framework's pinned memory."""
        return self._piece(tensor) is not None or tensor.is_pinned()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements as a tensor on the device: shape, strides and dtype of ``tensor``."""
        piece = self._piece(tensor)
        if piece is None:
            raise CopyRefusedError("only memory of allocate_host is mapped for the device")
        if piece.alias is None:
            piece.alias = torch.as_tensor(Mapped(piece.device_start, piece.nbytes), device=self._torch_device)
            if piece.alias.data_ptr() != piece.device_start:
                raise DeviceError("the framework copied mapped host memory instead of aliasing it")
        size = tensor.element_size()
        offset = tensor.data_ptr() - piece.start
        flat = piece.alias[: piece.nbytes - piece.nbytes % size].view(tensor.dtype)
        return flat.as_strided(tuple(tensor.shape), tuple(tensor.stride()), offset // size)

    def _piece(self, tensor: torch.Tensor) -> _Piece | None:
        pointer = tensor.data_ptr()
        at = bisect_right(self._starts, pointer) - 1
        if at >= 0 and pointer < self._pieces[at].end:
            return self._pieces[at]
        return None


def check(driver: Any, result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, which returns (status, value...); ``DeviceError`` naming the status if it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what}: {getattr(status, 'name', status)}")
    return values[0] if values else None
