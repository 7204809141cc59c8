"""Pinned host memory: exact sizes, zeroed, freed once, aliased where it lies. The driver here is a small stand-in."""

from __future__ import annotations

import ctypes
from enum import Enum

import pytest
import torch

from worker.engine.device import CopyRefusedError, DeviceError
from worker.engine.pinned import PinnedMemory, check


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """The calls of the driver that pinned memory makes, over ordinary memory; remembers the sizes asked for."""

    CUresult = Result
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.buffers: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.full = False

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Result, int]:  # noqa: N802 - the driver's name
        if self.full:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.asked.append((nbytes, flags))
        buffer = (ctypes.c_uint8 * nbytes)(*([255] * min(nbytes, 64)))
        self.buffers[ctypes.addressof(buffer)] = buffer
        return Result.CUDA_SUCCESS, ctypes.addressof(buffer)

    def cuMemHostGetDevicePointer(self, pointer: int, flags: int) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, pointer

    def cuMemFreeHost(self, pointer: int) -> tuple[Result]:  # noqa: N802
        del self.buffers[pointer]
        return (Result.CUDA_SUCCESS,)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def memory(driver: Driver) -> PinnedMemory:
    return PinnedMemory(driver, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 3, 33, 1000, 1025])
def test_the_driver_is_asked_for_exactly_the_bytes(memory: PinnedMemory, driver: Driver, rows: int) -> None:
    """An odd size stays odd: nobody asks for 33 GiB and gets 64 (vllm 48436); portable and mapped."""
    tensor = memory.allocate((rows, 7), torch.bfloat16)
    assert driver.asked == [(rows * 7 * 2, 3)]
    assert memory.nbytes == rows * 14
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((rows, 7), torch.bfloat16, True)


def test_memory_comes_zeroed(memory: PinnedMemory) -> None:
    """The driver may hand out what somebody else freed."""
    assert not memory.allocate((100,), torch.float32).any()


def test_memory_full_names_size_and_setting(memory: PinnedMemory, driver: Driver) -> None:
    """A pool larger than memlock allows is an error with its size, at start."""
    driver.full = True
    with pytest.raises(DeviceError, match=r"0.004 GiB.*memlock.*OUT_OF_MEMORY"):
        memory.allocate((1 << 20,), torch.float32)
    assert memory.nbytes == 0


def test_no_bytes_need_no_driver(memory: PinnedMemory, driver: Driver) -> None:
    """A pool of no segments."""
    assert memory.allocate((0, 4), torch.float32).numel() == 0
    assert driver.asked == []


def test_memory_is_freed_once_and_by_its_owner(memory: PinnedMemory, driver: Driver) -> None:
    """A view is not an allocation, and what is freed is not ours any more."""
    tensor = memory.allocate((4, 4), torch.float32)
    with pytest.raises(CopyRefusedError):
        memory.free(tensor[1:])
    memory.free(tensor)
    assert driver.buffers == {}
    with pytest.raises(CopyRefusedError):
        memory.free(tensor)


def test_views_of_ours_are_pinned_and_others_are_not(memory: PinnedMemory) -> None:
    """Up to the last byte, between several allocations."""
    tensors = [memory.allocate((size,), torch.uint8) for size in (10, 1000, 33)]
    assert all(memory.is_pinned(tensor[-1:]) for tensor in tensors)
    assert not memory.is_pinned(torch.zeros(4))


def test_an_alias_needs_our_memory(memory: PinnedMemory) -> None:
    """Ordinary memory has no address on the device."""
    with pytest.raises(CopyRefusedError, match="allocate_host"):
        memory.alias(torch.zeros(4))


def test_an_alias_keeps_shape_strides_and_offset(memory: PinnedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any view land where the host reads them; the base alias is made once."""
    tensor = memory.allocate((4, 6), torch.bfloat16)
    made: list[int] = []

    def as_tensor(mapped: object, device: torch.device) -> torch.Tensor:
        made.append(1)
        return tensor.view(torch.uint8).view(-1)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    view = tensor[1:3, ::2]
    alias = memory.alias(view)
    alias.fill_(3)
    assert (alias.shape, alias.stride(), alias.dtype) == (view.shape, view.stride(), view.dtype)
    assert tensor.tolist() == [[0] * 6, [3, 0, 3, 0, 3, 0], [3, 0, 3, 0, 3, 0], [0] * 6]
    memory.alias(tensor)
    assert made == [1]


def test_a_failed_call_is_named() -> None:
    """The status's own name, and what was tried."""
    with pytest.raises(DeviceError, match="free it: CUDA_ERROR_OUT_OF_MEMORY"):
        check(Driver(), (Result.CUDA_ERROR_OUT_OF_MEMORY,), "free it")
    assert check(Driver(), (Result.CUDA_SUCCESS, 5), "ask") == 5
