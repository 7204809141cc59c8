"""The CUDA pages against a driver of our own: flags, addresses, stream operations and refusals, without a GPU (R1, R2).

What the real driver does is tested in ``tests/gpu``; here the calls we make are.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import RefusedError
from ring import cuda_memory
from ring.accounting import Accounting, reached
from ring.consumer import Consumer
from ring.cuda_memory import CudaRingMemory
from ring.memory import CONSUMED
from ring.producer import Producer

_DEVICE_SHIFT = 1 << 40
"""Device addresses of the fake differ from the host's, so that one cannot stand in for the other."""


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver(types.ModuleType):
    """Pinned memory from ctypes, and streams that do at once what they are asked."""

    CUresult = _Result
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CU_MEMHOSTALLOC_WRITECOMBINED = 4
    CUstreamWaitValue_flags = enum.IntEnum("CUstreamWaitValue_flags", {"CU_STREAM_WAIT_VALUE_GEQ": 0})
    CUstreamWriteValue_flags = enum.IntEnum("CUstreamWriteValue_flags", {"CU_STREAM_WRITE_VALUE_DEFAULT": 0})

    def __init__(self) -> None:
        super().__init__("driver")
        self.buffers: dict[int, Any] = {}
        self.flags: list[tuple[int, int]] = []
        self.operations: list[tuple[str, int, int]] = []
        self.refuse_above = 1 << 40
        self.retained = 0

    def cuInit(self, flags: int) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        return (_Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[_Result, int]:  # noqa: N802 (the driver's name)
        return _Result.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[_Result, str]:  # noqa: N802 (the driver's name)
        self.retained += 1
        return _Result.CUDA_SUCCESS, "context"

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        self.retained -= 1
        return (_Result.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context: str) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        return (_Result.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[_Result, int]:  # noqa: N802 (the driver's name)
        if size > self.refuse_above:
            return _Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        buffer = (ctypes.c_uint8 * size)(*[255] * 16)
        self.buffers[ctypes.addressof(buffer)] = buffer
        self.flags.append((size, flags))
        return _Result.CUDA_SUCCESS, ctypes.addressof(buffer)

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> tuple[_Result, int]:  # noqa: N802 (the driver's name)
        return _Result.CUDA_SUCCESS, host + _DEVICE_SHIFT

    def cuMemFreeHost(self, host: int) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        del self.buffers[host]
        return (_Result.CUDA_SUCCESS,)

    def _word(self, address: int) -> Any:
        return ctypes.c_uint32.from_address(address - _DEVICE_SHIFT)

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        assert reached(self._word(address).value, value), "the stream would wait for ever"
        self.operations.append(("wait", stream, value))
        return (_Result.CUDA_SUCCESS,)

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[_Result]:  # noqa: N802 (the driver's name)
        self._word(address).value = value
        self.operations.append(("write", stream, value))
        return (_Result.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Stands where ``cuda.bindings.driver`` would; everything is freed at the end."""
    fake = FakeDriver()
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(cuda_memory.platform, "machine", lambda: "x86_64")
    yield fake
    assert fake.buffers == {}, "pinned memory was left behind"
    assert fake.retained == 0, "the primary context was left retained"


def test_only_the_payload_is_write_combined(driver: FakeDriver) -> None:
    """The host polls the control page: uncached reads of it would cost what the ring saves."""
    memory = CudaRingMemory(8192, 16)
    assert driver.flags == [(4096, 3), (1024, 3), (8192, 7)]
    assert not any(memory.words)
    assert memory.payload[0] == 0, "prefaulted and cleared"
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="released"):
        memory.words[0]


def test_elsewhere_than_on_x86_pages_are_plain(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked operation drains write-combining buffers on x86; nobody has shown as much elsewhere."""
    monkeypatch.setattr(cuda_memory.platform, "machine", lambda: "aarch64")
    memory = CudaRingMemory(8192, 16)
    assert [flags for _, flags in driver.flags] == [3, 3, 3]
    memory.close()
    with pytest.raises(RefusedError, match="no proven fence on aarch64"):
        CudaRingMemory(8192, 16, write_combined=True)


def test_the_stream_waits_for_the_doorbell_and_writes_the_word(driver: FakeDriver) -> None:
    """R2, R3: one wait an entry, one write a move, on the stream given, at device addresses, across the 32-bit turn."""
    memory = CudaRingMemory(8192, 16)
    producer = Producer(memory, Accounting(8192, 16, first_sequence=2**32 - 1))
    consumer = Consumer(producer)
    for number in range(3):
        producer.publish("b", [(number, array("i", [number]))])
    entries = consumer.take()
    for entry in entries:
        consumer.await_doorbell(77, entry)
    consumer.release(entries[1], 77)
    consumer.release(entries[0], 77)
    assert producer.poll() == 2
    consumer.release(entries[2], 77)
    assert driver.operations == [
        ("wait", 77, 2**32 - 1),
        ("wait", 77, 0),
        ("wait", 77, 1),
        ("write", 77, 0),
        ("write", 77, 1),
    ]
    assert memory.words[CONSUMED] == 1
    assert producer.poll() == 1
    memory.close()


def test_memory_the_driver_refuses_is_named_and_nothing_stays_pinned(driver: FakeDriver) -> None:
    """memlock too low, or too large a ring: one line with the size, and the pages got before it are freed."""
    driver.refuse_above = 8192
    with pytest.raises(RefusedError, match=r"16384 bytes of pinned memory: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaRingMemory(16384, 16)


def test_without_cuda_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker installed without its CUDA part says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RefusedError, match=r"pip install 'haulier\[cuda\]'"):
        CudaRingMemory(8192, 16)
