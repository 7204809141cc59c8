"""shell: the ring's pages: a control page, a descriptor table, a payload arena, made once (R1).

``RingMemory`` is what producer and consumer ask of them; ``HostRingMemory`` is the CPU's: the same layout in prefaulted
pages of this process. Knows no batch and no books.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.errors import InvariantError, RefusedError, UsageError
from common.limits import DESCRIPTOR_BYTES, PAYLOAD_ALIGN_BYTES
from ring.accounting import reached

if TYPE_CHECKING:
    import torch

CONTROL_BYTES = 4096
DOORBELL = 0
CONSUMED = 32
ABORT = 64
"""Indices of the 32-bit control words: each has 128 bytes of its own, since processors fetch lines in pairs."""


class Fence:
    """Orders everything stored before it ahead of everything stored after it, write-combining buffers included.

    Python has no fence, but it has locks, and on x86 a lock is taken and given by a locked instruction: CPython's
    ``threading.Lock`` is a POSIX semaphore up to 3.12 (``sem_post`` is ``lock xadd``, ``sem_trywait`` is ``lock
    cmpxchg``) and a byte taken with an atomic compare-and-exchange from 3.13 on. A locked instruction empties the
    write-combining buffers (Intel SDM 3A, "Buffering of Write Combining Memory Locations") and orders all stores
    ("Effects of the LOCK Prefix"), so the payload is in memory before the doorbell. The lock is held throughout: each
    call gives it back and takes it again, so that both instructions run. No other thread knows this lock, so the call
    never waits. Elsewhere than on x86 the pages are plain, not write-combined, and giving back then taking is a release
    followed by an acquire, which keeps the stores in order there too.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self._acquire = lock.acquire

    def __call__(self) -> None:
        self._release()
        self._acquire()


class RingMemory(Protocol):
    """Pages of one ring. Views are made once; storing through them copies nothing but the value stored."""

    capacity_bytes: int
    entries: int
    words: memoryview
    """Control words, uint32: ``DOORBELL``, ``CONSUMED``, ``ABORT``."""
    descriptors: memoryview
    """The table, bytes: entry ``sequence`` lies at ``(sequence % entries) * 64``."""
    payload: memoryview
    """The arena, int32: ``capacity_bytes / 4`` token ids. Written by the producer; never read on the host."""
    fence: Fence

    def wait_doorbell(self, stream: int | None, value: int) -> None:
        """What ``stream`` does from here on sees the payload published under doorbell ``value`` (any thread)."""
        ...

    def write_consumed(self, stream: int | None, value: int) -> None:
        """Set the consumed word to ``value`` once ``stream`` has come here (engine thread)."""
        ...

    def payload_device_view(self) -> torch.Tensor:
        """The payload arena as an int32 tensor ``(capacity_bytes / 4,)`` on the device, over the same pages."""
        ...

    def close(self) -> None:
        """Give the pages back. Only after the device has finished with them: this waits for nothing."""
        ...


def check_shape(capacity_bytes: int, entries: int) -> None:
    """Raise ``UsageError`` unless the sizes can be a ring's."""
    if capacity_bytes < PAYLOAD_ALIGN_BYTES or capacity_bytes % PAYLOAD_ALIGN_BYTES:
        raise UsageError(f"a ring of {capacity_bytes} bytes: must be a multiple of {PAYLOAD_ALIGN_BYTES} (--ring-mib)")
    if entries < 2 or entries & (entries - 1):
        raise UsageError(f"a ring of {entries} descriptors: must be a power of two, 2 or more")


class HostRingMemory:
    """The ring in ordinary pages: for the CPU as a device, where storing and loading are all there is to visibility."""

    def __init__(self, capacity_bytes: int, entries: int) -> None:
        check_shape(capacity_bytes, entries)
        self.capacity_bytes = capacity_bytes
        self.entries = entries
        table_bytes = -(-entries * DESCRIPTOR_BYTES // CONTROL_BYTES) * CONTROL_BYTES
        size = CONTROL_BYTES + table_bytes + capacity_bytes
        try:
            pages = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        except (OSError, OverflowError) as error:
            raise RefusedError(f"the system refused {size} bytes for the ring: {error}; lower --ring-mib") from error
        pages.fill(0)  # touches every page: no page fault after the start
        self._arena = pages[CONTROL_BYTES + table_bytes :].view(np.int32)
        self.words = pages[:CONTROL_BYTES].data.cast("I")
        self.descriptors = pages[CONTROL_BYTES : CONTROL_BYTES + entries * DESCRIPTOR_BYTES].data
        self.payload = self._arena.data
        self.fence = Fence()

    def wait_doorbell(self, stream: int | None, value: int) -> None:
        """The processor does not wait: a doorbell that has not come to ``value`` is a bug (``InvariantError``)."""
        word = self.words[DOORBELL]
        if not reached(word, value):
            raise InvariantError(f"waiting for doorbell {value} that was not rung: it stands at {word}")

    def write_consumed(self, stream: int | None, value: int) -> None:
        """Store the consumed word."""
        self.words[CONSUMED] = value

    def payload_device_view(self) -> torch.Tensor:
        """The arena as an int32 tensor ``(capacity_bytes / 4,)`` on the CPU, over the same pages."""
        import torch

        return torch.from_numpy(self._arena)

    def close(self) -> None:
        """Nothing to give back by hand: the pages go with their last view."""
