"""The ring's pages on the CPU: one layout, views over it, and a device side that sees what was stored (R1, R2)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from common.errors import InvariantError, RefusedError, UsageError
from ring.memory import ABORT, CONSUMED, DOORBELL, Fence, HostRingMemory

torch = pytest.importorskip("torch")


def test_control_words_lie_on_lines_of_their_own() -> None:
    """Host and device write different words: were they on one line, each would take it from the other."""
    memory = HostRingMemory(4096, 16)
    assert sorted((DOORBELL, CONSUMED, ABORT)) == [0, 32, 64]
    assert memory.words.itemsize == 4
    assert (len(memory.descriptors), len(memory.payload)) == (16 * 64, 1024)
    assert not any(memory.words)
    assert not any(memory.descriptors)


def test_the_device_view_is_the_same_memory() -> None:
    """R1: what the producer stored is what a kernel reads; nobody copies it across."""
    memory = HostRingMemory(4096, 16)
    view = memory.payload_device_view()
    assert view.dtype == torch.int32
    assert view.shape == (1024,)
    memory.payload[10:13] = np.array([7, 8, 9], dtype=np.int32)  # type: ignore[assignment]
    assert view[10:13].tolist() == [7, 8, 9]
    assert view.data_ptr() == memory.payload_device_view().data_ptr()


def test_waiting_for_a_doorbell_nobody_rang_is_an_error() -> None:
    """R2: a stream waits for what was published, never for something that may not come."""
    memory = HostRingMemory(4096, 16)
    memory.words[DOORBELL] = 2**32 - 1
    memory.wait_doorbell(None, 2**32 - 1)
    with pytest.raises(InvariantError, match="not rung"):
        memory.wait_doorbell(None, 3)
    memory.words[DOORBELL] = 3
    memory.wait_doorbell(None, 2**32 - 1)
    memory.write_consumed(None, 3)
    assert memory.words[CONSUMED] == 3
    memory.close()


@pytest.mark.parametrize(("capacity", "entries"), [(0, 16), (100, 16), (4096, 1), (4096, 12)])
def test_sizes_that_cannot_be_a_ring_are_refused(capacity: int, entries: int) -> None:
    """A mistyped size stops at start, with the flag to change."""
    with pytest.raises(UsageError, match="must be a"):
        HostRingMemory(capacity, entries)


def test_a_fence_can_be_called_for_ever() -> None:
    """The lock inside is given and taken by the same thread: it never waits and never counts up."""
    fence = Fence()
    for _ in range(1000):
        fence()


def test_the_ring_imports_without_torch_and_cuda() -> None:
    """A machine without either still runs the books, the tests and the echo worker."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['cuda'] = None\n"
        "import ring, ring.consumer, ring.cuda_memory, ring.commands, ring.bench\n"
        "assert ring.bench.growth(100)['batches'] == 100\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("size", [1 << 50, 1 << 66])
def test_pages_that_cannot_be_had_are_a_refusal(size: int) -> None:
    """--ring-mib far beyond the machine: the setting is named, and it is no bug of ours."""
    with pytest.raises(RefusedError, match="--ring-mib"):
        HostRingMemory(size, 16)
