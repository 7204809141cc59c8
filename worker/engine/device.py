"""values: the port: everything that orders work on a device goes through here (Q1), on CUDA and on the CPU alike.

Names the queues, what an event is, the operations of a device and its errors. Knows no implementation: ``cuda_device``
has streams, ``virtual_device`` has queues whose operations run in any order that the recorded events allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from common.errors import HaulierError, InvariantError
from worker.engine.event_pool import Event

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = [
    "CaptureError",
    "ComputeSynchroniseError",
    "CopyRefusedError",
    "Device",
    "DeviceError",
    "Event",
    "Queue",
    "QueueName",
    "RaceError",
    "Replay",
    "SharedQueueError",
    "TeardownError",
    "Work",
]


class QueueName(StrEnum):
    """The managed queues of a device (Q1)."""

    H2D = "h2d"
    D2H = "d2h"
    COMPUTE = "compute"
    MATERIALISE = "materialise"


COPY_QUEUES = (QueueName.H2D, QueueName.D2H)
"""Quarantine synchronises these first (L6), then the materialisation queues, then the device."""
MATERIALISE_QUEUES = (QueueName.MATERIALISE,)


@dataclass(frozen=True, slots=True)
class Queue:
    """An ordered lane of a device; ``handle`` is the stream's on CUDA, and no two queues share one (Q5)."""

    name: QueueName
    handle: int


class DeviceError(HaulierError):
    """The device failed: an operation, an allocation or an unprovable completion."""


class RaceError(InvariantError):
    """Two operations touch the same bytes with no recorded order between them: a missing wait."""


class ComputeSynchroniseError(InvariantError):
    """Somebody asked the host to wait for a compute queue (Q2)."""


class CaptureError(InvariantError):
    """A managed queue is being captured into a graph (Q2)."""


class SharedQueueError(InvariantError):
    """Two queues that must be dedicated have one handle (Q5)."""


class TeardownError(InvariantError):
    """Work after teardown began, or the one function that waits for everything before it did (Q3)."""


class CopyRefusedError(InvariantError):
    """A copy that would not be asynchronous, or would not copy what its caller means."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One launch: ``fn`` and the shared memory it touches, as tensors (views are fine, exact bytes count)."""

    fn: Callable[[], object]
    reads: Sequence[torch.Tensor] = ()
    writes: Sequence[torch.Tensor] = ()
    label: str = ""


class Replay(Protocol):
    """What ``Device.capture`` gives."""

    def replay(self) -> None:
        """On the current queue; only ``Device.replay`` calls it."""


class Device(Protocol):
    """Queues, events, copies, launches and memory of one device. All methods belong to the engine's thread, except
    ``synchronise`` and ``synchronise_everything``, which quarantine calls on a thread that it watches."""

    @property
    def name(self) -> str:
        """What people call it: "cpu", "cuda:0"."""

    @property
    def kind(self) -> str:
        """ "cuda" or "virtual"."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of ``allocate_device`` live."""

    # -- ordering -------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Make the calling thread the engine's thread; before its first operation."""

    def running(self) -> AbstractContextManager[None]:
        """While it is entered the compute queue is the framework's current one: plain torch calls run there."""

    def queue(self, name: QueueName) -> Queue:
        """The managed queue of that name."""

    def record(self, queue: Queue) -> Event:
        """An event that is done when everything put on ``queue`` so far is done. Give it back with ``release``."""

    def wait(self, queue: Queue, event: Event) -> None:
        """What is put on ``queue`` from here on runs after ``event``; the device waits, the host does not. The event
        may be given back at once: the order stands."""

    def done(self, event: Event) -> bool:
        """Whether it is over. Never blocks. Once it said yes, the host and all it submits from then on come after."""

    def release(self, event: Event) -> None:
        """Give the event back to the pool; the handle is stale from here on."""

    # -- work -----------------------------------------------------------------------------------------------------
    def copy(self, queue: Queue, dst: torch.Tensor, src: torch.Tensor, label: str = "") -> None:
        """Copy all bytes of ``src`` to ``dst``, asynchronously: both contiguous, equal bytes, host memory pinned (on
        CUDA); else ``CopyRefusedError``. Both must live until an event recorded after it is done."""

    def launch(
        self,
        queue: Queue,
        fn: Callable[[], T],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> T | None:
        """Run ``fn`` on a queue. ``reads`` and ``writes`` name the memory that other queues or the host touch too
        (slots, pool pages, host rows, changed rows); what ``fn`` returns must not share memory with ``writes``.
        On the compute queue its value comes back; on any other queue None does, and ``fn`` may run later: it must
        depend on nothing that changes in between."""

    def capture(self, fn: Callable[[], None]) -> Replay:
        """What ``fn`` launches on the compute queue, to be run again and again: at each replay it finds other values in
        the same tensors. It has run once before, with the same shapes, and does nothing but launch; on CUDA it is
        recorded once, on a stream of its own (Q2), on the virtual device each replay calls it."""

    def replay(self, captured: Replay) -> None:
        """Run it on the compute queue."""

    def host_read(self, event: Event, tensor: torch.Tensor) -> None:
        """The host reads ``tensor`` because it saw ``event`` done. Checked on the virtual device; free elsewhere."""

    def host_write(self, tensor: torch.Tensor, label: str = "") -> None:
        """The host is about to write ``tensor``. Checked on the virtual device; free elsewhere."""

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, zeroed and pre-faulted; on CUDA pinned and mapped, exactly as large as asked for."""

    def free_host(self, tensor: torch.Tensor) -> None:
        """Free what ``allocate_host`` returned; never while a copy may read it, never after an unproven fence (L7)."""

    def allocate_device(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory, zeroed. The caller keeps it for the life of the process."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody has: on CUDA as the driver says, on the CPU what the machine has available.
        Costs host time, and waits for nothing."""

    def allocate_chunk(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory that ``free_chunk`` gives back, exactly as large as asked for; its bytes are anything.
        ``DeviceError`` when there is no room."""

    def free_chunk(self, tensor: torch.Tensor) -> None:
        """Give back what ``allocate_chunk`` returned: only once every step that may touch it is seen over, and never
        after an unproven fence (L7). On CUDA the driver may wait for the device here: rare, and no part of a step."""

    def host_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes of a tensor within ``allocate_host`` memory, as a tensor that device code may write."""

    # -- the end --------------------------------------------------------------------------------------------------
    def begin_teardown(self, reason: str) -> None:
        """No operation is accepted any more; ``synchronise_everything`` is."""

    def synchronise(self, queue: Queue) -> None:
        """The host waits for one copy or materialisation queue: for quarantine and measurements at start. The compute
        queue is refused (Q2)."""

    def synchronise_everything(self) -> None:
        """The one function that waits for all queues (Q3): only after ``begin_teardown``. Raises ``DeviceError`` when
        completion cannot be established."""

    def retain_everything(self, reason: str) -> None:
        """Completion could not be proved: from here on no event and no host memory is given back (L7)."""

    @property
    def events_held(self) -> int:
        """Events in use: a metric, and zero when all leases are retired."""

    @property
    def events_capacity(self) -> int:
        """Events there are."""

    def check(self) -> None:
        """Raise unless the event pool's books agree."""
