"""The transport's own rules: retirement, failure, quarantine, cancellation. The order of bytes is in test_edges."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import worker.engine
from worker.engine.device import (
    COPY_QUEUES,
    CopyRefusedError,
    DeviceError,
    Event,
    Queue,
    QueueName,
    TeardownError,
    Work,
)
from worker.engine.event_pool import EventsFrozenError
from worker.engine.leases import ForeignOwnerError, Lease, SlotBusyError, StaleTailError, State
from worker.engine.page_leases import ContextSet, HostPage, PageHeldError, PageLeases, StaleGenerationError
from worker.engine.transport import RetirementLateError, Transport, TransportFailedError
from worker.engine.virtual_device import Temperament, VirtualDevice

ROWS, WIDTH = 4, 2


class Bench:
    """A transport over one host page, with the moves of one layer."""

    def __init__(self, device: VirtualDevice | None = None) -> None:
        self.device = device if device is not None else VirtualDevice(Temperament.LATE)
        self.pages = PageLeases(2)
        self.transport = Transport(self.device, 2, self.pages, retire_deadline_s=10)
        self.host = self.device.allocate_host((3, ROWS, WIDTH), torch.float32)
        self.slots = self.device.allocate_device((2, ROWS, WIDTH), torch.float32)
        self.page = self.pages.current(0)
        self.contexts = ContextSet((7,), (self.page,))

    def stage(self, layer: int = 0) -> Lease:
        slot = self.slots[self.transport.next_slot]
        return self.transport.stage(0, layer, self.contexts, [(slot, self.host[layer], self.page)])

    def attend(self, lease: Lease) -> Event:
        self.transport.before_attention(lease)
        slot = self.slots[lease.slot]
        self.device.launch(self.device.queue(QueueName.COMPUTE), lambda: slot.sum(), reads=(slot,))
        return self.transport.attended(lease)

    def write_back(self, lease: Lease, tail: int = 1) -> None:
        rows, changed = self.host[lease.layer, -1:], self.slots[lease.slot, -1:]
        work = Work(lambda: rows.copy_(changed), reads=(changed,), writes=(rows,))
        self.transport.write_back(lease, self.contexts, tail, work)

    def sealed(self, layer: int = 0) -> Lease:
        lease = self.stage(layer)
        attention = self.attend(lease)
        self.write_back(lease)
        self.transport.seal(lease, 1, attention)
        return lease

    def retire_all(self) -> None:
        for _ in range(1_000):
            if not self.transport.book.live:
                return
            self.transport.retire(0.0)
        pytest.fail("leases never retired")


@pytest.fixture(params=list(Temperament), ids=lambda one: one.value)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(VirtualDevice(request.param, seed=3))
    yield bench
    bench.transport.check()


def test_a_layer_ends_in_a_receipt_and_nothing_is_held(bench: Bench) -> None:
    """Counts return to zero (LMCache 1034): leases, events, page holds."""
    bench.sealed()
    receipts = []
    for _ in range(1_000):
        receipts += bench.transport.retire(0.0)
    row = WIDTH * 4
    assert [(one.nbytes, one.published) for one in receipts] == [(ROWS * row + row, (7,))]
    assert (bench.transport.bytes_in, bench.transport.bytes_back) == (ROWS * row, row)
    assert not bench.transport.book.live
    assert bench.device.events_held == 0
    assert bench.pages.holds == 0


def test_retirement_polls_and_never_blocks() -> None:
    """L4: an unfinished lease stays; the step goes on."""
    bench = Bench()
    bench.device.hold(QueueName.D2H)
    lease = bench.sealed()
    assert bench.transport.retire(0.0) == []
    assert lease.state is State.SEALED
    bench.device.let_go(QueueName.D2H)
    bench.retire_all()


def test_retirement_keeps_the_order_of_steps() -> None:
    """Receipts come oldest first, however the events come."""
    bench = Bench(VirtualDevice(Temperament.RANDOM, 5))
    bench.sealed(0)
    bench.sealed(1)
    receipts = []
    for _ in range(1_000):
        receipts += bench.transport.retire(0.0)
    assert [one.layer for one in receipts] == [0, 1]


def test_an_event_that_never_completes_is_named_after_its_deadline() -> None:
    """L4: not an endless wait (LMCache 2942): the transport fails with the lease in its reason."""
    bench = Bench()
    bench.device.hold(QueueName.D2H)
    bench.sealed()
    bench.transport.retire(100.0)
    bench.transport.retire(109.0)
    with pytest.raises(RetirementLateError, match=r"step 0, layer 0.*11.0 s"):
        bench.transport.retire(111.0)
    assert bench.transport.failed is not None
    bench.device.let_go(QueueName.D2H)


def test_idle_time_is_not_counted_against_a_lease() -> None:
    """An engine with nothing to do for an hour does not fail at its next step boundary."""
    bench = Bench()
    bench.transport.retire(0.0)
    bench.sealed()
    bench.transport.retire(3_600.0)
    assert bench.transport.failed is None
    bench.retire_all()


def test_a_cancelled_context_is_not_published_but_its_page_stays_held() -> None:
    """L8: cancelled in the middle of a staged copy: publication ends at once, memory waits for every fence."""
    bench = Bench()
    bench.sealed()
    bench.transport.revoke(7)
    with pytest.raises(PageHeldError):
        bench.pages.recycle(bench.page)
    receipts = []
    for _ in range(1_000):
        receipts += bench.transport.retire(0.0)
    assert [one.published for one in receipts] == [()]
    bench.pages.recycle(bench.page)


def test_a_step_in_place_holds_its_pages_until_its_rows_are_written() -> None:
    """L5: nothing is copied for it, and its rows go to the host all the same."""
    bench = Bench()
    lease = bench.transport.begin_whole(0, (0, 1), bench.contexts)
    with pytest.raises(PageHeldError):
        bench.pages.recycle(bench.page)
    attention = bench.attend(lease)
    bench.write_back(lease)
    bench.transport.seal(lease, 1, attention)
    with pytest.raises(PageHeldError):
        bench.pages.recycle(bench.page)
    bench.retire_all()
    bench.pages.recycle(bench.page)


def test_a_copy_from_a_foreign_owner_is_refused(bench: Bench) -> None:
    """L2: another prompt's rows (TensorRT-LLM 8813) never reach the slot."""
    copies = [(bench.slots[0], bench.host[1], HostPage(1, 0))]
    with pytest.raises(ForeignOwnerError):
        bench.transport.stage(0, 0, bench.contexts, copies)
    assert "HostPage(index=1" in str(bench.transport.failed)


def test_a_stage_with_a_recycled_page_is_refused(bench: Bench) -> None:
    """L5: the plan holds a page that went to another context."""
    bench.pages.recycle(bench.page)
    with pytest.raises(StaleGenerationError):
        bench.stage()
    assert bench.transport.failed is not None


def test_a_wrong_use_fails_the_transport(bench: Bench) -> None:
    """L6: any failure marks it failed: our own bug as much as the device's."""
    lease = bench.stage()
    attention = bench.attend(lease)
    bench.write_back(lease, tail=2)
    with pytest.raises(StaleTailError):
        bench.transport.seal(lease, 1, attention)
    with pytest.raises(TransportFailedError, match="tail"):
        bench.stage(1)


def test_a_slot_is_not_staged_over_an_open_lease(bench: Bench) -> None:
    """A prefetch two layers too far ahead."""
    bench.stage(0)
    bench.stage(1)
    assert not bench.transport.may_stage(2)
    with pytest.raises(SlotBusyError):
        bench.stage(2)


def failing_moves() -> dict[str, Callable[[Bench], object]]:
    """Every door of the transport."""

    def lease(bench: Bench) -> Lease:
        return bench.transport.book.live[0]

    return {
        "stage": lambda bench: bench.stage(1),
        "before_attention": lambda bench: bench.transport.before_attention(lease(bench)),
        "attended": lambda bench: bench.transport.attended(lease(bench)),
        "write_back": lambda bench: bench.write_back(lease(bench)),
        "seal": lambda bench: bench.transport.seal(lease(bench), 1, Event(0, 1)),
        "retire": lambda bench: bench.transport.retire(0.0),
    }


@pytest.mark.parametrize("move", failing_moves().values(), ids=failing_moves().keys())
def test_after_a_failure_no_door_is_open(bench: Bench, move: Callable[[Bench], object]) -> None:
    """Submission stops everywhere, and the first reason is what everybody reads."""
    bench.stage()
    bench.transport.fail("the first reason")
    bench.transport.fail("the second")
    with pytest.raises(TransportFailedError, match="the first reason"):
        move(bench)


def test_a_copy_that_raises_leaves_a_partial_submission_in_quarantine() -> None:
    """The second copy of a stage fails: the first may run, so lease, page and buffer stay until it is proved over."""
    bench = Bench()
    slot = bench.slots[0]
    copies = [(slot[:2], bench.host[0, :2], bench.page), (slot, bench.host[0, :2], bench.page)]
    with pytest.raises(CopyRefusedError, match="into"):
        bench.transport.stage(0, 0, bench.contexts, copies)
    assert [lease.state for lease in bench.transport.book.live] == [State.QUARANTINED]
    with pytest.raises(PageHeldError):
        bench.pages.recycle(bench.page)
    end = bench.transport.quarantine("a copy failed")
    assert end.proved
    assert bench.device.pending == 0
    bench.pages.recycle(bench.page)


def test_quarantine_proves_in_order_and_frees_unpublished(bench: Bench) -> None:
    """L6: both copy queues, the materialisation queue, then the device; then nothing is held, nothing was published."""
    bench.sealed()
    bench.stage(1)
    rung: list[str] = []
    end = bench.transport.quarantine("the engine stops", abort=lambda: rung.append("abort"))
    assert end.proved
    assert end.established == ("h2d", "d2h", "materialise", "device")
    assert end.reason == "the engine stops"
    assert rung == ["abort"]
    assert end.retained == 0
    assert bench.device.events_held == 0
    assert bench.pages.holds == 0


@pytest.mark.parametrize("name", [*COPY_QUEUES, QueueName.MATERIALISE, QueueName.COMPUTE])
def test_quarantine_without_proof_retains_everything(name: QueueName) -> None:
    """L6, L7: one queue cannot establish completion: every lease, event and page stays for good."""
    bench = Bench(VirtualDevice(Temperament.EARLY))
    bench.sealed()
    held = bench.device.events_held
    bench.device.break_queue(name, "lost")
    end = bench.transport.quarantine("a device error")
    assert not end.proved
    assert "lost" in end.reason
    assert end.retained == 1
    assert bench.device.events_held == held
    lease = bench.transport.book.live[0]
    assert lease.tickets
    with pytest.raises(PageHeldError):
        bench.pages.recycle(bench.page)
    with pytest.raises(TeardownError, match="lost"):
        bench.device.free_host(bench.host)
    with pytest.raises(EventsFrozenError):
        bench.device.release(lease.tickets[0].event)
    bench.transport.check()


def test_quarantine_has_a_deadline() -> None:
    """A device that never answers: the watched thread is left behind, all is retained, the caller ends the process."""
    release = threading.Event()

    class Stuck(VirtualDevice):
        def synchronise(self, queue: Queue) -> None:
            release.wait()

    bench = Bench(Stuck(Temperament.LATE))
    bench.sealed()
    end = bench.transport.quarantine("stuck", deadline_s=0.05)
    release.set()
    assert not end.proved
    assert "no proof" in end.reason
    assert end.retained == 1


def test_a_device_error_at_a_poll_fails_the_transport() -> None:
    """A sticky error shows at the next step boundary, as a failure and not as an answer."""
    bench = Bench()
    bench.sealed()
    bench.device.break_queue(QueueName.D2H, "uncorrectable error")
    with pytest.raises(DeviceError, match="uncorrectable"):
        bench.retire_all()
    assert "uncorrectable" in str(bench.transport.failed)


def test_destructors_do_nothing() -> None:
    """L7: dropping a transport with leases open neither waits, nor submits, nor gives back; and no class of the engine
    has a destructor at all."""
    bench = Bench()
    bench.sealed()
    pending, held = bench.device.pending, bench.device.events_held
    device, bench.transport = bench.device, Transport(bench.device)
    assert (device.pending, device.events_held) == (pending, held)
    for path in Path(next(iter(worker.engine.__path__))).glob("*.py"):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert "__del__" not in names, path
