"""The CUDA device behind the port: Q1-Q5 on a real GPU, and every ordering edge with a queue held by a gate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from worker.engine.device import (
    CaptureError,
    ComputeSynchroniseError,
    CopyRefusedError,
    DeviceError,
    Event,
    QueueName,
    TeardownError,
)
from worker.engine.event_pool import EventsExhaustedError
from worker.engine.gate import Gate
from worker.engine.staged_program import EDGES, HELD, SHAPES, Program, Shape, omitted
from worker.engine.transport import Edge

torch = pytest.importorskip("torch")
driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

H2D, D2H, COMPUTE, MATERIALISE = QueueName.H2D, QueueName.D2H, QueueName.COMPUTE, QueueName.MATERIALISE
AHEAD_S = 0.2
"""How long a gate stays shut after the last submission: time for what should have waited to run ahead."""


@pytest.fixture
def device() -> Iterator[Any]:
    """A device of its own for each test; torn down through the one function that may wait for it."""
    from worker.engine.cuda_device import CudaDevice

    device = CudaDevice(0, events=256)
    yield device
    torch.cuda.set_sync_debug_mode("default")
    device.begin_teardown("the test is over")
    device.synchronise_everything()
    device.check()


def wait(device: Any, event: Event) -> None:
    """Poll, as the engine does, but in a row."""
    deadline = time.monotonic() + 30
    while not device.done(event):
        assert time.monotonic() < deadline, "the event never came"


def settle(device: Any, name: QueueName) -> None:
    event = device.record(device.queue(name))
    wait(device, event)
    device.release(event)


def test_queues_are_streams_of_their_own(device) -> None:
    """Q5: whatever was asked of the framework's round robin before; none is the default stream."""
    others = [torch.cuda.Stream() for _ in range(40)]
    handles = {device.queue(name).handle for name in QueueName}
    assert len(handles) == len(QueueName)
    assert torch.cuda.default_stream().cuda_stream not in handles
    assert {device.raw(device.queue(name)) for name in QueueName} == handles
    del others


@pytest.mark.parametrize("count", [1, 7, 4096, 1_000_003])
def test_bytes_go_down_and_come_back(device, count: int) -> None:
    """Both copy queues, ordered by an event alone; any size, odd ones too."""
    source = device.allocate_host((count,), torch.int16)
    source.copy_(torch.arange(count, dtype=torch.int64).to(torch.int16))
    back = device.allocate_host((count,), torch.int16)
    there = device.allocate_device((count,), torch.int16)
    device.copy(device.queue(H2D), there, source, "down")
    copied = device.record(device.queue(H2D))
    device.wait(device.queue(D2H), copied)
    device.release(copied)
    device.copy(device.queue(D2H), back, there, "back")
    settle(device, D2H)
    assert torch.equal(source, back)
    assert device.events_held == 0


def test_a_kernel_scatters_into_host_pages(device) -> None:
    """One grouped launch writes rows straight into the pinned host memory, through its mapped alias."""
    host = device.allocate_host((64, 8), torch.bfloat16)
    rows = torch.tensor([3, 60, 17], device=device.torch_device)
    values = torch.arange(24, device=device.torch_device).reshape(3, 8).to(torch.bfloat16)
    torch.cuda.synchronize()
    alias = device.host_rows(host)
    assert alias.is_cuda
    device.launch(device.queue(D2H), lambda: alias.index_copy_(0, rows, values), (values,), (alias,))
    settle(device, D2H)
    wanted = torch.zeros(64, 8, dtype=torch.bfloat16)
    wanted[rows.cpu()] = values.cpu()
    assert torch.equal(host, wanted)


def test_host_rows_of_a_view_are_that_view(device) -> None:
    """Shape, strides and offset within one allocation."""
    host = device.allocate_host((4, 6, 2), torch.float32)
    view = host[1:3, ::2]
    alias = device.host_rows(view)
    assert (alias.shape, alias.stride()) == (view.shape, view.stride())
    device.launch(device.queue(D2H), lambda: alias.fill_(2), (), (alias,))
    settle(device, D2H)
    assert float(host.sum()) == 2 * view.numel()
    assert bool((view == 2).all())


def test_host_memory_is_as_large_as_asked_for(device) -> None:
    """33 MiB and a bit stay 33 MiB and a bit (vllm 48436)."""
    count = 33 * 2**20 + 13
    host = device.allocate_host((count,), torch.uint8)
    assert device._pinned.nbytes == count
    assert not host.any()
    device.free_host(host)
    assert device._pinned.nbytes == 0


def test_what_would_be_synchronous_is_refused(device) -> None:
    """Strided or not pinned: refused by name instead of silently slow."""
    there = device.allocate_device((8, 4), torch.float32)
    pinned = device.allocate_host((8, 4), torch.float32)
    with pytest.raises(CopyRefusedError, match="not pinned"):
        device.copy(device.queue(H2D), there, torch.zeros(8, 4))
    with pytest.raises(CopyRefusedError, match="strided"):
        device.copy(device.queue(H2D), there[:, 0], pinned[:, 0])
    with pytest.raises(CopyRefusedError, match="host to host"):
        device.copy(device.queue(H2D), pinned, device.allocate_host((8, 4), torch.float32))


def test_compute_is_never_synchronised(device) -> None:
    """Q2, Q3: neither it alone, nor everything before teardown."""
    with pytest.raises(ComputeSynchroniseError):
        device.synchronise(device.queue(COMPUTE))
    with pytest.raises(TeardownError):
        device.synchronise_everything()
    device.synchronise(device.queue(H2D))


def test_a_captured_managed_stream_is_refused(device) -> None:
    """Q2: record, copy and launch, while somebody captures the stream; and all is well afterwards."""
    queue, row = device.queue(COMPUTE), device.allocate_device((4,), torch.float32)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    (status,) = driver.cuStreamBeginCapture(queue.handle, mode)
    assert status == driver.CUresult.CUDA_SUCCESS
    try:
        for use in (
            lambda: device.record(queue),
            lambda: device.copy(queue, row, row),
            lambda: device.launch(queue, lambda: None),
        ):
            with pytest.raises(CaptureError, match="captured"):
                use()
    finally:
        driver.cuStreamEndCapture(queue.handle)
    settle(device, COMPUTE)


def test_compute_is_the_current_stream_while_running(device) -> None:
    """Plain torch calls of the model run on the compute queue, and on nothing else afterwards."""
    with device.running():
        assert torch.cuda.current_stream().cuda_stream == device.queue(COMPUTE).handle
        inside = device.launch(device.queue(COMPUTE), lambda: torch.cuda.current_stream().cuda_stream)
    assert inside == device.queue(COMPUTE).handle
    assert torch.cuda.current_stream().cuda_stream != device.queue(COMPUTE).handle
    seen = []
    device.launch(device.queue(D2H), lambda: seen.append(torch.cuda.current_stream().cuda_stream))
    assert seen == [device.queue(D2H).handle]


def test_a_poll_sees_a_held_queue_and_does_not_wait(device) -> None:
    """An event behind a shut gate says no, then yes."""
    gate = Gate(device, H2D)
    event = device.record(device.queue(H2D))
    assert not any(device.done(event) for _ in range(100))
    gate.open()
    wait(device, event)
    device.release(event)


def test_a_wait_keeps_its_recording_when_the_event_is_reused(device) -> None:
    """Given back while a queue still waits for it, and recorded anew elsewhere: the order stands."""
    row, host = device.allocate_device((1,), torch.int32), device.allocate_host((1,), torch.int32)
    down = device.allocate_host((1,), torch.int32)
    down.fill_(7)
    gate = Gate(device, H2D)
    device.copy(device.queue(H2D), row, down)
    copied = device.record(device.queue(H2D))
    device.wait(device.queue(D2H), copied)
    device.release(copied)
    again = device.record(device.queue(MATERIALISE))
    assert again.index == copied.index
    device.copy(device.queue(D2H), host, row)
    back = device.record(device.queue(D2H))
    time.sleep(AHEAD_S)
    assert not device.done(back)
    gate.open()
    wait(device, back)
    assert int(host) == 7
    device.release(again)
    device.release(back)


def test_events_run_out_by_name(device) -> None:
    """Q4 on the card: the pool is bounded and all its events were made at start."""
    events = [device.record(device.queue(H2D)) for _ in range(device.events_capacity)]
    with pytest.raises(EventsExhaustedError):
        device.record(device.queue(H2D))
    for event in events:
        device.release(event)


def run(device: Any, shape: Shape, omit: set[Edge], held: QueueName | None) -> bool:
    """Run the staged program with one queue held while everything is submitted; whether it came out right."""
    program = Program(device, shape, omit)
    torch.cuda.synchronize()
    with device.running():
        gate = Gate(device, held) if held is not None else None
        program.run()
        if gate is not None:
            time.sleep(AHEAD_S)
            gate.open()
    torch.cuda.synchronize()
    program.finish()
    return program.equal()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("held", list(QueueName), ids=lambda one: one.value)
def test_with_every_edge_a_held_queue_changes_no_byte(device, shape: Shape, held: QueueName) -> None:
    """Whichever queue falls behind, the bytes are those of the resident arithmetic."""
    assert run(device, shape, set(), None)
    assert run(device, shape, set(), held)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name.lower())
def test_without_an_edge_a_held_queue_corrupts(device, edge: Edge) -> None:
    """The control: the same run, that one wait left out."""
    assert run(device, EDGES[edge], set(), None)
    assert not run(device, EDGES[edge], omitted(edge), HELD[edge])


def test_the_hot_path_never_synchronises(device) -> None:
    """Q1: the framework raises at any implicit synchronisation; a whole run of steps makes none."""
    program = Program(device, SHAPES["retained"])
    torch.cuda.synchronize()
    with device.running():
        torch.cuda.set_sync_debug_mode("error")
        try:
            program.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    program.finish()
    assert program.equal()


def test_quarantine_proves_the_device_done(device) -> None:
    """L6: submission stops, queues and device are waited for on a watched thread, and nothing stays held."""
    program = Program(device, SHAPES["deep"])
    torch.cuda.synchronize()
    with device.running():
        program.run()
    end = program.transport.quarantine("the test stops it")
    assert end.proved, end.reason
    assert device.events_held == 0


def test_quarantine_of_a_held_queue_retains_everything(device) -> None:
    """L6, L7: a queue that never gets done by the deadline: no proof, so nothing is given back."""
    assert run(device, SHAPES["deep"], set(), None), "all kernels are loaded before a queue is held"
    program = Program(device, SHAPES["deep"])
    torch.cuda.synchronize()
    with device.running():
        gate = Gate(device, D2H)
        program.run()
    end = program.transport.quarantine("stuck", deadline_s=0.5)
    assert not end.proved
    assert end.retained > 0
    assert device.events_held > 0
    gate.open()
    torch.cuda.synchronize()


def test_a_chunk_is_the_drivers_and_goes_back_to_it(device) -> None:
    """H2: what is taken is gone from the device's free memory, what is given back is there again at once."""
    before = device.free_bytes()
    chunk = device.allocate_chunk((2, 1 << 28), torch.bfloat16)
    assert chunk.is_cuda
    assert chunk.nbytes == 1 << 30
    assert device.free_bytes() <= before - (1 << 30)
    chunk.fill_(1)
    torch.cuda.synchronize()
    device.free_chunk(chunk)
    assert device.free_bytes() >= before - (1 << 22)
    with pytest.raises(CopyRefusedError):
        device.free_chunk(chunk)


def test_more_than_there_is_is_an_error(device) -> None:
    """A6: no room is said, nothing is half taken."""
    before = device.free_bytes()
    with pytest.raises(DeviceError, match="GiB of device memory"):
        device.allocate_chunk((before + (1 << 30),), torch.uint8)
    assert device.free_bytes() == before
