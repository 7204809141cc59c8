"""shell: the ring's pages on CUDA: mapped host memory the GPU reads in place, and stream memory operations (R1, R2).

Control page and descriptor table are mapped and cached (the host reads them); the payload arena is write-combined on
x86 (the host only writes it). The driver's interface comes from cuda-bindings, since torch exposes none of this; both
are imported when a ring is made. Knows no batch, no books, and no order between streams.
"""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.errors import InvariantError, RefusedError
from common.limits import DESCRIPTOR_BYTES
from ring.memory import CONSUMED, CONTROL_BYTES, DOORBELL, Fence, check_shape

if TYPE_CHECKING:
    import torch

_WORD_BYTES = 4
_X86 = ("x86_64", "AMD64", "i686")


class _Mapping:
    """One driver allocation of pinned, mapped, prefaulted host memory, seen from both sides."""

    def __init__(self, driver: Any, size_bytes: int, *, write_combined: bool) -> None:
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        if write_combined:
            flags |= driver.CU_MEMHOSTALLOC_WRITECOMBINED
        self.size_bytes = size_bytes
        self.host = int(_ask(driver, f"{size_bytes} bytes of pinned memory", driver.cuMemHostAlloc(size_bytes, flags)))
        self.device = int(_ask(driver, "the device's address", driver.cuMemHostGetDevicePointer(self.host, 0)))
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.host))
        self.bytes.fill(0)


class _DeviceArray:
    """What torch reads (``__cuda_array_interface__`` version 3) to make a tensor over memory it does not own."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i4",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _ask(driver: Any, what: str, answer: tuple[Any, ...]) -> Any:
    """The value in a driver's answer ``(CUresult, value...)``; raises ``RefusedError`` naming the call's purpose."""
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RefusedError(f"the CUDA driver refused {what}: {result.name} ({int(result)}); see --ring-mib and memlock")
    return values[0] if values else None


class CudaRingMemory:
    """Pages of one ring that device ``device`` reads in place. Made and closed by the thread that owns the device.

    The device's primary context, which torch uses, is made current on the calling thread. Streams are raw handles
    (``torch.cuda.Stream.cuda_stream``); None is the legacy default stream.
    """

    def __init__(
        self, capacity_bytes: int, entries: int, *, device: int = 0, write_combined: bool | None = None
    ) -> None:
        check_shape(capacity_bytes, entries)
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RefusedError(
                f"a ring on CUDA needs cuda-bindings 13: pip install 'haulier[cuda]' ({error})"
            ) from error
        if write_combined is None:
            write_combined = platform.machine() in _X86  # design: elsewhere plain pages until shown safe
        elif write_combined and platform.machine() not in _X86:
            raise RefusedError(f"write-combined pages have no proven fence on {platform.machine()}: use plain ones")
        self.capacity_bytes = capacity_bytes
        self.entries = entries
        self.device = device
        self._driver = driver
        _ask(driver, "to start", driver.cuInit(0))
        self._handle = _ask(driver, f"device {device}", driver.cuDeviceGet(device))
        self._mappings: list[_Mapping] = []
        context = _ask(driver, "the primary context", driver.cuDevicePrimaryCtxRetain(self._handle))
        try:
            _ask(driver, "to use the primary context", driver.cuCtxSetCurrent(context))
            control = self._map(CONTROL_BYTES, write_combined=False)
            table = self._map(entries * DESCRIPTOR_BYTES, write_combined=False)
            self._arena = self._map(capacity_bytes, write_combined=write_combined)
        except RefusedError:
            self._free()
            raise
        self.words = control.bytes.data.cast("I")
        self.descriptors = table.bytes.data
        self.payload = self._arena.bytes.view(np.int32).data
        self.fence = Fence()
        self._doorbell_address = control.device + DOORBELL * _WORD_BYTES
        self._consumed_address = control.device + CONSUMED * _WORD_BYTES
        self._wait_flag = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        # the default write carries a barrier: what the stream did before is finished before the word is seen
        self._write_flag = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)

    def _map(self, size_bytes: int, *, write_combined: bool) -> _Mapping:
        mapping = _Mapping(self._driver, size_bytes, write_combined=write_combined)
        self._mappings.append(mapping)
        return mapping

    def wait_doorbell(self, stream: int | None, value: int) -> None:
        """``stream`` goes on once the doorbell is at ``value`` or past it, by the driver's 32-bit cyclic compare."""
        answer = self._driver.cuStreamWaitValue32(stream or 0, self._doorbell_address, value, self._wait_flag)
        _ask(self._driver, "a wait for the doorbell", answer)

    def write_consumed(self, stream: int | None, value: int) -> None:
        """``stream`` writes ``value`` to the consumed word when it comes here, after all it did before."""
        answer = self._driver.cuStreamWriteValue32(stream or 0, self._consumed_address, value, self._write_flag)
        _ask(self._driver, "a write of the consumed word", answer)

    def payload_device_view(self) -> torch.Tensor:
        """The arena as an int32 CUDA tensor ``(capacity_bytes / 4,)``: kernels read the host's pages over the link."""
        import torch

        count = self.capacity_bytes // _WORD_BYTES
        view = torch.as_tensor(_DeviceArray(self._arena.device, count), device=f"cuda:{self.device}")
        if view.data_ptr() != self._arena.device or view.dtype != torch.int32:
            raise InvariantError("torch copied the ring's payload instead of viewing it")
        return view

    def close(self) -> None:
        """Free the pages. Only when the device is proven to have finished with them (L7): this waits for nothing, and
        nothing here is freed by a destructor. Any later use of the views raises ``ValueError``. May be called again.
        """
        if not self._mappings:
            return
        for view in (self.words, self.descriptors, self.payload):
            view.release()
        self._free()

    def _free(self) -> None:
        while self._mappings:
            mapping = self._mappings.pop()
            _ask(self._driver, "to free pinned memory", self._driver.cuMemFreeHost(mapping.host))
        _ask(self._driver, "to leave the primary context", self._driver.cuDevicePrimaryCtxRelease(self._handle))
