"""shell: the CPU as a device: queues whose operations run in any order that the recorded events allow.

EAGER runs everything at once, in order: the way haulier runs on a CPU in earnest. The other temperaments put operations
on queues and a seeded scheduler picks what runs next, so that a missing wait corrupts a result in an ordinary test. As
torch computes eagerly here, a launch on the compute queue yields its value at once and leaves a *shadow*: at its
scheduled time its reads are compared with what it saw (a byte that differs is a race), and only then do its writes
become visible to other queues. Beside it ``shadow.ClockCheck`` looks for missing order whatever the schedule. Keeps Q1,
Q2 and Q3 like the real device; knows nothing of leases.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from common.errors import InvariantError
from common.limits import EVENTS_COUNT
from common.machine import available_bytes
from worker.engine.device import (
    ComputeSynchroniseError,
    CopyRefusedError,
    DeviceError,
    Event,
    Queue,
    QueueName,
    RaceError,
    Replay,
    TeardownError,
)
from worker.engine.event_pool import EventPool
from worker.engine.footprint import host_bytes, ranges_of, returned_tensors
from worker.engine.lanes import Lane, Mark, Operation, RawEvent, Scheduler, Temperament
from worker.engine.shadow import ClockCheck, Ranges, overlap

__all__ = ["Temperament", "VirtualDevice"]

T = TypeVar("T")
ALIGN_BYTES = 64


class Again:
    """A function to be called at each replay."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self.replay = fn


class VirtualDevice:
    """The port on a CPU. ``seed`` feeds RANDOM. ``check_clocks`` False leaves finding races to the bytes alone, which
    tests use to show that they really corrupt. One thread, as the port says."""

    kind = "virtual"

    def __init__(
        self,
        temperament: Temperament = Temperament.EAGER,
        seed: int = 0,
        *,
        events: int = EVENTS_COUNT,
        check_clocks: bool = True,
    ) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.temperament = temperament
        self.seed = seed
        self.eager = temperament is Temperament.EAGER
        self._pool: EventPool[RawEvent] = EventPool(events, RawEvent, threading.get_ident)
        self._queues = {name: Queue(name, index + 1) for index, name in enumerate(QueueName)}
        self._scheduler = Scheduler(list(self._queues.values()), temperament, seed)
        self._lanes = self._scheduler.lanes
        lanes = [name.value for name in QueueName]
        self._clocks = None if self.eager or not check_clocks else ClockCheck(lanes, self._race)
        self._teardown: str | None = None
        self._uncertain: str | None = None
        self.spare_bytes: int | None = None
        """What ``free_bytes`` starts from, for tests of memory pressure; None for what the machine has."""

    # -- ordering -------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Make the calling thread the owner of the event pool."""
        self._pool.adopt()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing to enter: plain torch calls run where they stand."""
        yield

    def queue(self, name: QueueName) -> Queue:
        """The managed queue of that name."""
        return self._queues[name]

    def record(self, queue: Queue) -> Event:
        """An event after all that ``queue`` holds."""
        self._open()
        event = self._pool.take()
        lane = self._lanes[queue.handle]
        mark = self._pool.raw(event).mark = Mark(lane, done=self.eager)
        if not self.eager:
            if self._clocks is not None:
                mark.clock = self._clocks.mark(lane.index)

            def run() -> None:
                mark.done = True

            self._scheduler.put(lane, Operation(f"record {event}", run))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        """What follows on ``queue`` runs after ``event``."""
        self._open()
        mark = self._mark(event)
        if self.eager:
            return
        lane = self._lanes[queue.handle]
        if self._clocks is not None:
            self._clocks.wait(lane.index, mark.clock)
        self._scheduler.put(lane, Operation(f"wait for {event}", None, until=mark))

    def done(self, event: Event) -> bool:
        """Whether ``event`` is over; each poll makes at least one operation of progress towards it, if any can run."""
        mark = self._mark(event)
        if not mark.done:
            self._scheduler.step(mark.lane)
            if self.temperament is Temperament.RANDOM:
                self._scheduler.progress()
        if mark.done and not mark.seen:
            mark.seen = True
            if self._clocks is not None:
                self._clocks.observe(mark.clock)
        return mark.done

    def release(self, event: Event) -> None:
        """Give the event back; waits already put on queues keep their meaning."""
        self._pool.release(event)

    # -- work -----------------------------------------------------------------------------------------------------
    def copy(self, queue: Queue, dst: torch.Tensor, src: torch.Tensor, label: str = "") -> None:
        """Copy all bytes of ``src`` to ``dst``."""
        self._open()
        if dst.dtype != src.dtype or dst.numel() != src.numel():
            raise CopyRefusedError(f"copy '{label}': {src.numel()} {src.dtype} into {dst.numel()} {dst.dtype}")
        if not (dst.is_contiguous() and src.is_contiguous()):
            raise CopyRefusedError(f"copy '{label}' is strided: on CUDA it would not be asynchronous")
        lane = self._lanes[queue.handle]
        if self.eager:
            lane.alive()
            dst.view(-1).copy_(src.view(-1))
            return
        self._touched(lane, (src,), (dst,), label)

        def run() -> None:
            dst.view(-1).copy_(src.view(-1))

        self._scheduler.put(lane, Operation(label, run))

    def launch(
        self,
        queue: Queue,
        fn: Callable[[], T],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> T | None:
        """Compute: at once, with a shadow. Other queues: the whole of it at its scheduled time."""
        self._open()
        lane = self._lanes[queue.handle]
        if self.eager:
            lane.alive()
            value = fn()
            return value if queue.name is QueueName.COMPUTE else None
        self._touched(lane, reads, writes, label)
        if queue.name is not QueueName.COMPUTE:

            def run() -> None:
                fn()

            self._scheduler.put(lane, Operation(label, run))
            return None
        self._scheduler.settle(lane)
        lane.alive()
        hide = [operation.show() for operation in lane.operations if operation.show is not None]
        try:
            operation, value = self._compute(fn, reads, writes, label)
        finally:
            for undo in reversed(hide):
                undo()
        self._scheduler.put(lane, operation)
        return value

    def capture(self, fn: Callable[[], None]) -> Replay:
        """``fn`` itself: torch computes eagerly here."""
        self._open()
        return Again(fn)

    def replay(self, captured: Replay) -> None:
        """Call it."""
        self._open()
        captured.replay()

    def host_read(self, event: Event, tensor: torch.Tensor) -> None:
        """Raise ``RaceError`` unless the host saw an event after the last write of ``tensor``."""
        mark = self._mark(event)
        if not mark.seen and not self.eager:
            raise self._race(f"the host reads although it has not seen {event} done")
        if self._clocks is not None:
            self._clocks.host([(*self._key(tensor), False, tensor)], f"host read after {event}")

    def host_write(self, tensor: torch.Tensor, label: str = "") -> None:
        """Raise ``RaceError`` unless the host saw everything over that touches ``tensor``."""
        if self._clocks is not None:
            self._clocks.host([(*self._key(tensor), True, tensor)], label)

    # -- memory ---------------------------------------------------------------------------------------------------
    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory; filling it faults its pages in."""
        return torch.empty(tuple(shape), dtype=dtype).zero_()

    def free_host(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the interpreter frees it with its last reference. Refused after an unproven fence."""
        if self._uncertain is not None:
            raise TeardownError(f"host memory is not freed: {self._uncertain}")

    def allocate_device(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory that costs nothing until it is touched: a page pool is whole GiB, a small model uses little of
        it. Aligned like the framework's own, so that equal rows meet equal vector kernels."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = torch.from_numpy(np.zeros(nbytes + ALIGN_BYTES, np.uint8))
        start = -raw.data_ptr() % ALIGN_BYTES
        return raw[start : start + nbytes].view(dtype).view(tuple(shape))

    def free_bytes(self) -> int:
        """What the machine has available, or ``spare_bytes``, which chunks are taken from."""
        return available_bytes() if self.spare_bytes is None else self.spare_bytes

    def allocate_chunk(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that costs nothing until it is touched."""
        chunk = self.allocate_device(shape, dtype)
        if self.spare_bytes is not None:
            if chunk.nbytes > self.spare_bytes:
                raise DeviceError(f"{self.name} has no room for {chunk.nbytes} bytes")
            self.spare_bytes -= chunk.nbytes
        return chunk

    def free_chunk(self, tensor: torch.Tensor) -> None:
        """The interpreter frees it with its last reference. Whoever still reads it meets a race, or wrong bytes."""
        if self._uncertain is not None:
            raise TeardownError(f"device memory is not freed: {self._uncertain}")
        self.host_write(tensor, "chunk given back")
        if not self.eager:
            tensor.view(torch.uint8).fill_(0xFF)
        if self.spare_bytes is not None:
            self.spare_bytes += tensor.nbytes

    def host_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Itself: host and device are one."""
        return tensor

    # -- the end --------------------------------------------------------------------------------------------------
    def begin_teardown(self, reason: str) -> None:
        """Stop accepting operations."""
        if self._teardown is None:
            self._teardown = reason

    def synchronise(self, queue: Queue) -> None:
        """Run one queue dry; raises ``DeviceError`` if it cannot be."""
        if queue.name is QueueName.COMPUTE:
            raise ComputeSynchroniseError("a compute queue is never synchronised; wait for an event on the device")
        self._scheduler.force(self._lanes[queue.handle])
        self._lanes[queue.handle].alive()

    def synchronise_everything(self) -> None:
        """Run all queues dry (Q3)."""
        if self._teardown is None:
            raise TeardownError("everything is synchronised only once teardown has begun")
        for lane in self._lanes.values():
            self._scheduler.force(lane)
            lane.alive()

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

    # -- what only tests use ----------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """Operations that have not run."""
        return self._scheduler.pending

    def drain(self) -> None:
        """Let everything that can run do so, in the scheduler's order."""
        self._scheduler.drain()

    def hold(self, name: QueueName) -> None:
        """Close a gate: nothing on this queue runs until ``let_go``."""
        self._lanes[self._queues[name].handle].held = True

    def let_go(self, name: QueueName) -> None:
        """Open the gate."""
        self._lanes[self._queues[name].handle].held = False

    def break_queue(self, name: QueueName, reason: str) -> None:
        """From here on whatever runs on this queue fails, as after a device error."""
        self._lanes[self._queues[name].handle].broken = reason

    def _compute(
        self,
        fn: Callable[[], T],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        label: str,
    ) -> tuple[Operation, T]:
        """Run ``fn`` now, take its writes back, and leave them and the check of its reads for their time."""
        saw = [host_bytes(tensor) for tensor in reads]
        before = [tensor.clone() for tensor in writes]
        value = fn()
        self._no_alias(value, writes, label)
        after = [tensor.clone() for tensor in writes]
        _write(writes, before)

        def run() -> None:
            for tensor, old in zip(reads, saw, strict=True):
                now = host_bytes(tensor)
                if not torch.equal(now, old):
                    wrong = int((now != old).sum())
                    raise self._race(f"{wrong} of {old.numel()} bytes that '{label}' reads changed while it ran")
            _write(writes, after)

        def show() -> Callable[[], None]:
            hidden = [tensor.clone() for tensor in writes]
            _write(writes, after)
            return lambda: _write(writes, hidden)

        return Operation(label, run, show=show), value

    # -- checks -----------------------------------------------------------------------------------------------------
    def _touched(self, lane: Lane, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], label: str) -> None:
        if self._clocks is not None:
            touches = [(*self._key(tensor), False, tensor) for tensor in reads]
            touches += [(*self._key(tensor), True, tensor) for tensor in writes]
            self._clocks.operate(lane.index, touches, label)

    @staticmethod
    def _key(tensor: torch.Tensor) -> tuple[int, Ranges]:
        return tensor.untyped_storage().data_ptr(), ranges_of(tensor)

    @staticmethod
    def _no_alias(value: object, writes: Sequence[torch.Tensor], label: str) -> None:
        for result in returned_tensors(value):
            for tensor in writes:
                if overlap(ranges_of(result), ranges_of(tensor)) is not None:
                    raise InvariantError(f"launch '{label}' returns memory that it declares as written")

    def _mark(self, event: Event) -> Mark:
        mark = self._pool.raw(event).mark
        if mark is None:
            raise InvariantError(f"{event} was never recorded")
        return mark

    def _open(self) -> None:
        if self._teardown is not None:
            raise TeardownError(f"the device accepts no work: {self._teardown}")

    def _race(self, words: str) -> RaceError:
        return RaceError(f"{words} ({self.temperament.value}, seed {self.seed})")


def _write(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
