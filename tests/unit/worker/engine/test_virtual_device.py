"""The CPU device: every legal order, nothing illegal, and races found by clocks, by shadows and by bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from common.errors import InvariantError
from worker.engine.device import (
    ComputeSynchroniseError,
    CopyRefusedError,
    Device,
    DeviceError,
    QueueName,
    RaceError,
    TeardownError,
)
from worker.engine.event_pool import EventsExhaustedError, EventsFrozenError, ForeignThreadError, StaleEventError
from worker.engine.virtual_device import Temperament, VirtualDevice

LAGGING = [Temperament.EARLY, Temperament.LATE, Temperament.RANDOM]
H2D, D2H, COMPUTE = QueueName.H2D, QueueName.D2H, QueueName.COMPUTE


@pytest.fixture(params=list(Temperament), ids=lambda one: one.value)
def device(request: pytest.FixtureRequest) -> Iterator[VirtualDevice]:
    device = VirtualDevice(request.param, seed=11, events=16)
    yield device
    device.check()


def numbers(device: VirtualDevice, *values: float) -> torch.Tensor:
    tensor = device.allocate_host((len(values),), torch.float32)
    tensor.copy_(torch.tensor(values))
    return tensor


def keep(_: torch.Tensor) -> None:
    """A launch that writes in place returns nothing."""


def test_it_is_a_device(device: VirtualDevice) -> None:
    """The engine sees the port alone."""
    port: Device = device
    assert port.kind == "virtual"
    assert port.torch_device.type == "cpu"


def test_queues_have_handles_of_their_own(device: VirtualDevice) -> None:
    """Q5, here too."""
    assert len({device.queue(name).handle for name in QueueName}) == len(QueueName)


def test_a_copy_has_happened_when_its_event_is_done(device: VirtualDevice) -> None:
    """The host polls; no poll blocks, and each makes progress, so none is in vain."""
    source, target = numbers(device, 1, 2), device.allocate_device((2,), torch.float32)
    device.copy(device.queue(H2D), target, source)
    event = device.record(device.queue(H2D))
    polls = 1
    while not device.done(event):
        polls += 1
    device.host_read(event, target)
    assert target.tolist() == [1, 2]
    assert polls < 10
    device.release(event)
    assert device.events_held == 0


def test_late_copies_are_late() -> None:
    """Under LATE a copy nobody waits for has not happened: what reads it too soon reads old bytes."""
    device = VirtualDevice(Temperament.LATE, check_clocks=False)
    source, target = numbers(device, 1, 2), device.allocate_device((2,), torch.float32)
    device.copy(device.queue(H2D), target, source)
    seen = device.launch(device.queue(COMPUTE), lambda: target.clone())
    assert seen is not None
    assert seen.tolist() == [0, 0]
    device.drain()
    assert target.tolist() == [1, 2]


def test_early_copies_overtake_lagging_compute() -> None:
    """Under EARLY a copy runs at once, and compute's writes come last: an unordered write-back takes old bytes."""
    device = VirtualDevice(Temperament.EARLY, check_clocks=False)
    row, host = device.allocate_device((2,), torch.float32), numbers(device, 7, 7)
    device.launch(device.queue(COMPUTE), lambda: keep(row.fill_(5)), writes=(row,))
    device.copy(device.queue(D2H), host, row)
    assert host.tolist() == [0, 0]
    device.drain()
    assert row.tolist() == [5, 5]


def test_compute_sees_its_own_lagging_writes() -> None:
    """On one queue order needs no event, however far the queue lags."""
    device = VirtualDevice(Temperament.EARLY)
    row, compute = device.allocate_device((2,), torch.float32), device.queue(COMPUTE)
    for step in range(4):
        device.launch(compute, lambda step=step: keep(row.add_(step)), reads=(row,), writes=(row,))
    seen = device.launch(compute, lambda: row.clone(), reads=(row,))
    assert seen is not None
    assert seen.tolist() == [6, 6]
    assert row.tolist() == [0, 0]
    device.drain()
    assert row.tolist() == [6, 6]


@pytest.mark.parametrize("temperament", LAGGING)
def test_compute_gets_what_it_waited_for(temperament: Temperament) -> None:
    """The wait makes the copy happen before the value is computed, in every temperament."""
    device = VirtualDevice(temperament, seed=2)
    source, target = numbers(device, 1, 2), device.allocate_device((2,), torch.float32)
    device.copy(device.queue(H2D), target, source)
    event = device.record(device.queue(H2D))
    device.wait(device.queue(COMPUTE), event)
    device.release(event)
    total = device.launch(device.queue(COMPUTE), lambda: target.sum(), reads=(target,))
    assert total is not None
    assert float(total) == 3


def test_an_event_stands_for_its_recording_after_it_is_given_back() -> None:
    """A wait put on a queue keeps its meaning while the pooled event already serves another recording."""
    device = VirtualDevice(Temperament.LATE, events=1)
    source, target = numbers(device, 3), device.allocate_device((1,), torch.float32)
    device.copy(device.queue(H2D), target, source)
    first = device.record(device.queue(H2D))
    device.wait(device.queue(D2H), first)
    device.release(first)
    second = device.record(device.queue(COMPUTE))
    assert second.index == first.index
    device.copy(device.queue(D2H), source, target)
    device.drain()
    assert source.tolist() == [3]


@pytest.mark.parametrize("temperament", LAGGING)
def test_a_missing_wait_is_named_with_its_seed(temperament: Temperament) -> None:
    """The error alone is enough to run the same schedule again."""
    device = VirtualDevice(temperament, seed=77)
    source, target = numbers(device, 1), device.allocate_device((1,), torch.float32)
    device.copy(device.queue(H2D), target, source, "history of layer 3")
    with pytest.raises(RaceError, match=r"'attend'.*'history of layer 3'.*seed 77"):
        device.launch(device.queue(COMPUTE), lambda: target.sum(), reads=(target,), label="attend")


def test_a_shadow_finds_bytes_that_changed_under_compute() -> None:
    """With the clocks off: attention's shadow re-reads the slot after a copy overtook it."""
    device = VirtualDevice(Temperament.EARLY, check_clocks=False)
    source, slot = numbers(device, 1, 2), device.allocate_device((2,), torch.float32)
    device.launch(device.queue(COMPUTE), lambda: slot.sum(), reads=(slot,), label="attend")
    device.copy(device.queue(H2D), slot, source)
    with pytest.raises(RaceError, match=r"bytes that 'attend' reads changed while it ran \(early, seed 0\)"):
        device.drain()


def test_random_schedules_replay_by_seed() -> None:
    """The same seed makes the same choices: a failure found once is found again."""

    def trace(seed: int) -> list[str]:
        device, order = VirtualDevice(Temperament.RANDOM, seed), []
        for index in range(12):
            queue = device.queue((H2D, D2H)[index % 2])
            device.launch(queue, lambda index=index: order.append(str(index)))
        device.drain()
        return order

    assert trace(5) == trace(5)
    assert len({tuple(trace(seed)) for seed in range(20)}) > 5


def test_the_host_reads_only_what_it_polled() -> None:
    """A recorded event is not enough: the host must have seen it done."""
    device = VirtualDevice(Temperament.RANDOM, seed=1)
    target = device.allocate_device((1,), torch.float32)
    device.copy(device.queue(D2H), target, numbers(device, 4))
    event = device.record(device.queue(D2H))
    with pytest.raises(RaceError, match="has not seen"):
        device.host_read(event, target)


def test_the_host_reads_nothing_written_after_the_event() -> None:
    """It saw the first copy over; a second into the same row was put behind it."""
    device = VirtualDevice(Temperament.EARLY)
    target = device.allocate_device((1,), torch.float32)
    device.copy(device.queue(D2H), target, numbers(device, 4))
    event = device.record(device.queue(D2H))
    assert device.done(event)
    device.copy(device.queue(D2H), target, numbers(device, 5), "next step")
    with pytest.raises(RaceError, match="next step"):
        device.host_read(event, target)


@pytest.mark.parametrize("temperament", LAGGING)
def test_a_table_is_not_rewritten_while_its_copy_reads_it(temperament: Temperament) -> None:
    """The host runs a step ahead with one pinned buffer (TensorRT-LLM 15546); with the event polled it may."""
    device = VirtualDevice(temperament)
    table, rows = numbers(device, 1, 2), device.allocate_device((2,), torch.float32)
    device.copy(device.queue(H2D), rows, table, "table of step 1")
    event = device.record(device.queue(H2D))
    with pytest.raises(RaceError, match="table of step 1"):
        device.host_write(table, "table of step 2")
    while not device.done(event):
        pass
    device.host_write(table, "table of step 2")


def test_returning_declared_memory_is_refused() -> None:
    """Its bytes are taken back until the launch's time comes: the caller would read others."""
    device = VirtualDevice(Temperament.LATE)
    row = device.allocate_device((2,), torch.float32)
    with pytest.raises(InvariantError, match="declares as written"):
        device.launch(device.queue(COMPUTE), lambda: row.fill_(1), writes=(row,))


def test_copy_queues_run_their_launches_later() -> None:
    """A grouped scatter is work of its queue: it reads what is there when its time comes, and returns nothing."""
    device = VirtualDevice(Temperament.LATE)
    row, host = device.allocate_device((2,), torch.float32), device.allocate_host((2,), torch.float32)
    assert device.launch(device.queue(D2H), lambda: host.copy_(row), reads=(row,), writes=(host,)) is None
    assert device.pending == 1


@pytest.mark.parametrize("size", [(2, 3), (6,)])
def test_a_strided_copy_is_refused(device: VirtualDevice, size: tuple[int, ...]) -> None:
    """On CUDA it silently goes through a synchronous path; so the CPU refuses it too."""
    pool, row = device.allocate_host((6, 3), torch.float32), device.allocate_device(size, torch.float32)
    with pytest.raises(CopyRefusedError, match="strided"):
        device.copy(device.queue(H2D), row, pool[:, 1] if size == (6,) else pool.t()[:2, :3])


def test_a_copy_between_unequal_tensors_is_refused(device: VirtualDevice) -> None:
    """Neither a shorter history nor another dtype is copied as if it fitted."""
    host = device.allocate_host((4,), torch.float32)
    for target in (torch.zeros(3), torch.zeros(4, dtype=torch.float16)):
        with pytest.raises(CopyRefusedError, match="into"):
            device.copy(device.queue(H2D), target, host)


def test_synchronising_compute_is_refused(device: VirtualDevice) -> None:
    """Q2: in quarantine as on the hot path."""
    device.begin_teardown("test")
    with pytest.raises(ComputeSynchroniseError):
        device.synchronise(device.queue(COMPUTE))


def test_everything_is_synchronised_only_at_teardown(device: VirtualDevice) -> None:
    """Q3: the one function is refused while work goes on, and proves completion afterwards."""
    source, target = numbers(device, 1), device.allocate_device((1,), torch.float32)
    device.copy(device.queue(H2D), target, source)
    with pytest.raises(TeardownError, match="only once teardown has begun"):
        device.synchronise_everything()
    device.begin_teardown("test")
    device.synchronise_everything()
    assert target.tolist() == [1]
    assert device.pending == 0


def test_after_teardown_nothing_is_submitted(device: VirtualDevice) -> None:
    """A failed transport stops every submission, whoever tries."""
    event = device.record(device.queue(H2D))
    device.begin_teardown("a copy failed")
    row = torch.zeros(1)
    for submit in (
        lambda: device.copy(device.queue(H2D), row, row),
        lambda: device.launch(device.queue(COMPUTE), lambda: None),
        lambda: device.record(device.queue(H2D)),
        lambda: device.wait(device.queue(H2D), event),
    ):
        with pytest.raises(TeardownError, match="a copy failed"):
            submit()


def test_a_held_queue_proves_nothing() -> None:
    """An event that never completes: polls say no, synchronising raises, compute that needs it raises."""
    device = VirtualDevice(Temperament.LATE)
    device.hold(H2D)
    row = device.allocate_device((1,), torch.float32)
    device.copy(device.queue(H2D), row, numbers(device, 1))
    event = device.record(device.queue(H2D))
    assert not any(device.done(event) for _ in range(100))
    device.wait(device.queue(COMPUTE), event)
    for use in (
        lambda: device.launch(device.queue(COMPUTE), lambda: None, reads=(row,)),
        lambda: device.synchronise(device.queue(H2D)),
    ):
        with pytest.raises(DeviceError, match="held"):
            use()
    device.let_go(H2D)
    device.launch(device.queue(COMPUTE), lambda: None, reads=(row,))
    assert row.tolist() == [1]


def test_a_broken_queue_fails_what_runs_on_it(device: VirtualDevice) -> None:
    """A dead copy engine shows at the operation or at the poll, never as a wrong byte."""
    device.break_queue(H2D, "uncorrectable error")
    row, host = device.allocate_device((1,), torch.float32), numbers(device, 1)

    def use() -> None:
        device.copy(device.queue(H2D), row, host)
        event = device.record(device.queue(H2D))
        while not device.done(event):
            pass

    with pytest.raises(DeviceError, match="uncorrectable"):
        use()
    assert row.tolist() == [0]


def test_after_an_unproven_fence_nothing_is_given_back(device: VirtualDevice) -> None:
    """L7: neither an event nor host memory."""
    event, host = device.record(device.queue(H2D)), device.allocate_host((1,), torch.float32)
    device.retain_everything("no proof")
    with pytest.raises(EventsFrozenError, match="no proof"):
        device.release(event)
    with pytest.raises(TeardownError, match="no proof"):
        device.free_host(host)


def test_a_stale_event_is_neither_polled_nor_waited_for(device: VirtualDevice) -> None:
    """A lease that lives past its retirement is found out."""
    event = device.record(device.queue(H2D))
    device.release(event)
    for use in (lambda: device.done(event), lambda: device.wait(device.queue(COMPUTE), event)):
        with pytest.raises(StaleEventError):
            use()


def test_events_run_out_by_name(device: VirtualDevice) -> None:
    """Leases that are never retired end here."""
    with pytest.raises(EventsExhaustedError):
        [device.record(device.queue(H2D)) for _ in range(17)]


def test_the_engine_thread_adopts_it(device: VirtualDevice) -> None:
    """Made on the main thread; from the adoption on, the engine's alone."""
    thread = threading.Thread(target=device.adopt)
    thread.start()
    thread.join()
    with pytest.raises(ForeignThreadError):
        device.record(device.queue(H2D))


def test_running_needs_nothing(device: VirtualDevice) -> None:
    """Plain torch calls run where they stand; host rows are the rows themselves."""
    host = device.allocate_host((2,), torch.float32)
    with device.running():
        device.host_rows(host).fill_(3)
    assert host.tolist() == [3, 3]
