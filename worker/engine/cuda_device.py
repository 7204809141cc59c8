"""shell: a CUDA device behind the port: real streams, pooled events, pinned mapped host memory (Q1, Q2, Q3, Q5).

Copies go through the driver (one call of about 2 us, certainly asynchronous); launches run under their queue's stream.
While ``running`` is entered the compute queue is the framework's current stream. Knows nothing of leases and layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from common.errors import RefusedError
from common.limits import EVENTS_COUNT
from worker.engine.device import (
    CaptureError,
    ComputeSynchroniseError,
    CopyRefusedError,
    DeviceError,
    Event,
    Queue,
    QueueName,
    Replay,
    TeardownError,
)
from worker.engine.driver_memory import DriverMemory
from worker.engine.event_pool import EventPool
from worker.engine.pinned import PinnedMemory, check
from worker.engine.recorder import Recorder
from worker.engine.streams import dedicated, refuse_capture

T = TypeVar("T")
CUDA: Any = torch.cuda
"""Some of its classes have types in one release and none in another."""


class CudaDevice:
    """The port on one GPU. ``check_capture`` False drops Q2's look at the capture state (about 1 us an operation).

    One thread owns it (``adopt``); ``synchronise`` and ``synchronise_everything`` may run on quarantine's.
    """

    kind = "cuda"

    def __init__(self, index: int = 0, *, events: int = EVENTS_COUNT, check_capture: bool = True) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise RefusedError(f"there is no cuda:{index} here; choose --device cpu")
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RefusedError("a CUDA device needs the cuda-bindings package: install haulier[cuda]") from error
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._driver = driver
        self._index = index
        self._check_capture = check_capture
        torch.cuda.set_device(index)
        torch.zeros(1, device=self.torch_device)  # the context exists and is current on this thread
        default = torch.cuda.default_stream(index).cuda_stream
        streams = dedicated(list(QueueName), lambda: CUDA.Stream(index), reserved={default, 0})
        taken = {default, 0} | {stream.cuda_stream for stream in streams.values()}
        self._recorder = Recorder(dedicated(["capture"], lambda: CUDA.Stream(index), reserved=taken)["capture"])
        self._queues = {name: Queue(name, stream.cuda_stream) for name, stream in streams.items()}
        self._streams = {stream.cuda_stream: stream for stream in streams.values()}
        self._compute = streams[QueueName.COMPUTE]
        self._pool: EventPool[torch.cuda.Event] = EventPool(events, self._make_event, threading.get_ident)
        self._pinned = PinnedMemory(driver, self.torch_device)
        self._chunks = DriverMemory(driver, self.torch_device)
        self._teardown: str | None = None
        self._uncertain: str | None = None

    def _make_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = CUDA.Event(enable_timing=False)
        event.record(self._compute)  # the framework makes the driver's event at its first recording: now, not later
        return event

    # -- ordering -------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Make the calling thread the engine's: the context becomes current there, the event pool its own."""
        torch.cuda.set_device(self._index)
        torch.zeros(1, device=self.torch_device)
        self._pool.adopt()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The compute queue is the current stream; what the current one did before comes first, on the device."""
        self._compute.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._compute):
            yield

    def queue(self, name: QueueName) -> Queue:
        """The managed queue of that name."""
        return self._queues[name]

    def raw(self, queue: Queue) -> int:
        """The stream's handle, for stream memory operations (the ring's doorbell)."""
        return queue.handle

    def record(self, queue: Queue) -> Event:
        """An event after all that ``queue`` holds. A capture on it is refused."""
        self._accept(queue, "record")
        event = self._pool.take()
        self._pool.raw(event).record(self._streams[queue.handle])
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        """What follows on ``queue`` runs after ``event``: the device waits."""
        if self._teardown is not None:
            raise TeardownError(f"the device accepts no work: {self._teardown}")
        self._streams[queue.handle].wait_event(self._pool.raw(event))

    def done(self, event: Event) -> bool:
        """Whether ``event`` is over; ``DeviceError`` if the device has failed."""
        try:
            raw: Any = self._pool.raw(event)
            return bool(raw.query())
        except RuntimeError as error:
            raise DeviceError(f"{self.name} failed: {error}") from error

    def release(self, event: Event) -> None:
        """Give the event back; a wait put on a stream keeps the recording it saw."""
        self._pool.release(event)

    # -- work -----------------------------------------------------------------------------------------------------
    def copy(self, queue: Queue, dst: torch.Tensor, src: torch.Tensor, label: str = "") -> None:
        """Copy bytes with the driver's asynchronous copy."""
        self._accept(queue, f"copy '{label}'")
        if not (dst.is_contiguous() and src.is_contiguous()):
            raise CopyRefusedError(f"copy '{label}' is strided: it would go through a synchronous path")
        if dst.dtype != src.dtype or dst.numel() != src.numel():
            raise CopyRefusedError(f"copy '{label}': {src.numel()} {src.dtype} into {dst.numel()} {dst.dtype}")
        for side in (dst, src):
            if not side.is_cuda and not self._pinned.is_pinned(side):
                raise CopyRefusedError(f"copy '{label}': its host memory is not pinned, so it would be synchronous")
        if not (dst.is_cuda or src.is_cuda):
            raise CopyRefusedError(f"copy '{label}' is from host to host")
        nbytes = src.numel() * src.element_size()
        if nbytes:
            driver = self._driver
            check(driver, driver.cuMemcpyAsync(dst.data_ptr(), src.data_ptr(), nbytes, queue.handle), f"copy '{label}'")

    def launch(
        self,
        queue: Queue,
        fn: Callable[[], T],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> T | None:
        """Run ``fn`` with ``queue`` as the current stream. Only the virtual device uses ``reads`` and ``writes``."""
        if self._recorder.recording:
            return self._recorder.launched(queue, fn, label)
        self._accept(queue, f"launch '{label}'")
        if queue.name is not QueueName.COMPUTE:
            with torch.cuda.stream(self._streams[queue.handle]):
                fn()
            return None
        if torch.cuda.current_stream(self._index).cuda_stream == queue.handle:
            return fn()
        with torch.cuda.stream(self._compute):
            return fn()

    def capture(self, fn: Callable[[], None]) -> Replay:
        """As a CUDA graph."""
        self._accept(self._queues[QueueName.COMPUTE], "capture")
        return self._recorder.record(fn)

    def replay(self, captured: Replay) -> None:
        """One launch for the whole of it."""
        self._accept(self._queues[QueueName.COMPUTE], "replay")
        with torch.cuda.stream(self._compute):
            captured.replay()

    def host_read(self, event: Event, tensor: torch.Tensor) -> None:
        """Nothing to check here but the handle."""
        self._pool.raw(event)

    def host_write(self, tensor: torch.Tensor, label: str = "") -> None:
        """Nothing to check here."""

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned, mapped, zeroed; exactly as large as asked for."""
        return self._pinned.allocate(shape, dtype)

    def free_host(self, tensor: torch.Tensor) -> None:
        """Free it; refused after an unproven fence (L7)."""
        if self._uncertain is not None:
            raise TeardownError(f"host memory is not freed: {self._uncertain}")
        self._pinned.free(tensor)

    def allocate_device(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory; every queue, and the current stream, come after the zeroing."""
        try:
            with torch.cuda.stream(self._compute):
                tensor = torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{self.name} has no room for {tuple(shape)} {dtype}: {error}") from error
        zeroed = self.record(self._queues[QueueName.COMPUTE])
        for queue in self._queues.values():
            self.wait(queue, zeroed)
        torch.cuda.current_stream(self._index).wait_event(self._pool.raw(zeroed))
        self.release(zeroed)
        return tensor

    def free_bytes(self) -> int:
        """As the driver says; what torch keeps for itself counts as taken."""
        return int(torch.cuda.mem_get_info(self._index)[0])

    def allocate_chunk(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """From the driver, beside torch's own memory: freeing it leaves that alone."""
        return self._chunks.allocate(shape, dtype)

    def free_chunk(self, tensor: torch.Tensor) -> None:
        """To the driver, which may wait for the device; refused after an unproven fence (L7)."""
        if self._uncertain is not None:
            raise TeardownError(f"device memory is not freed: {self._uncertain}")
        self._chunks.free(tensor)

    def host_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mapped alias of a tensor within ``allocate_host`` memory: a kernel's writes land in the host's pages."""
        return self._pinned.alias(tensor)

    # -- the end --------------------------------------------------------------------------------------------------
    def begin_teardown(self, reason: str) -> None:
        """Stop accepting operations; synchronising is no mistake from here on."""
        if self._teardown is None:
            self._teardown = reason
            torch.cuda.set_sync_debug_mode("default")

    def synchronise(self, queue: Queue) -> None:
        """Wait for one copy or materialisation stream."""
        if queue.name is QueueName.COMPUTE:
            raise ComputeSynchroniseError("a compute queue is never synchronised; wait for an event on the device")
        try:
            self._streams[queue.handle].synchronize()
        except RuntimeError as error:
            raise DeviceError(f"{queue.name.value} of {self.name}: {error}") from error

    def synchronise_everything(self) -> None:
        """Wait for the whole device (Q3)."""
        if self._teardown is None:
            raise TeardownError("everything is synchronised only once teardown has begun")
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def retain_everything(self, reason: str) -> None:
        """Give nothing back any more."""
        if self._uncertain is None:
            self._uncertain = reason
        self._pool.freeze(reason)

    def check(self) -> None:
        """Raise unless the event pool's books agree."""
        self._pool.check()

    @property
    def events_held(self) -> int:
        """Events in use."""
        return self._pool.held

    @property
    def events_capacity(self) -> int:
        """Events there are."""
        return self._pool.capacity

    def _accept(self, queue: Queue, what: str) -> None:
        if self._recorder.recording:
            raise CaptureError(f"{what}: a step that is being recorded does nothing but launch on the compute queue")
        if self._teardown is not None:
            raise TeardownError(f"{what}: the device accepts no work: {self._teardown}")
        if self._check_capture:
            status = check(self._driver, self._driver.cuStreamIsCapturing(queue.handle), what)
            refuse_capture(status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE, what)
