"""The ring on a real GPU: mapped pages read in place, doorbell and consumed word in stream order (R1-R3)."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from ring.accounting import Accounting
from ring.bench import latency
from ring.consumer import Consumer
from ring.memory import CONSUMED, DOORBELL
from ring.producer import Producer

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPACITY = 1 << 20
ENTRIES = 64


@pytest.fixture
def memory() -> Iterator[object]:
    """Pages of one ring on the first GPU, freed after the device has ended."""
    from ring.cuda_memory import CudaRingMemory

    pages = CudaRingMemory(CAPACITY, ENTRIES)
    yield pages
    torch.cuda.synchronize()
    pages.close()


def _open(memory, sequence: int = 1):
    producer = Producer(memory, Accounting(CAPACITY, ENTRIES, first_sequence=sequence))
    return producer, Consumer(producer), torch.cuda.Stream()


def test_the_view_is_the_pages_themselves(memory) -> None:
    """R1: torch reads the mapped pages; had it copied them, later stores would not be seen."""
    view = memory.payload_device_view()
    assert view.is_cuda
    assert view.dtype == torch.int32
    assert view.shape == (CAPACITY // 4,)
    memory.payload[0:4] = np.array([4, 3, 2, 1], dtype=np.int32)
    memory.fence()
    assert view[:4].tolist() == [4, 3, 2, 1]
    memory.payload[0:1] = np.array([9], dtype=np.int32)
    memory.fence()
    assert int(view[0]) == 9


def test_a_stream_that_waits_sees_the_payload_published_later(memory) -> None:
    """R2: the stream is told to wait first, the batch comes after: the kernel behind the wait reads the new ids."""
    producer, _, stream = _open(memory)
    view = memory.payload_device_view()
    row = torch.zeros(512, dtype=torch.int32, device="cuda")
    for turn in range(200):
        start = producer.accounting.fit(2048).position % CAPACITY // 4
        value = producer.accounting.next_sequence & 0xFFFF_FFFF
        memory.wait_doorbell(stream.cuda_stream, value)
        with torch.cuda.stream(stream):
            row.copy_(view[start : start + 512])
        memory.write_consumed(stream.cuda_stream, value)
        assert memory.words[CONSUMED] != value, "the word was written before the doorbell rang"
        producer.publish("b", [(turn, array("i", [turn]) * 512)])
        stream.synchronize()
        assert memory.words[CONSUMED] == value
        assert torch.equal(row.cpu(), torch.full((512,), turn, dtype=torch.int32))
        assert producer.poll() == 1


def test_the_32_bit_turn_on_the_device(memory) -> None:
    """The driver compares cyclically, as we do: 0 and 1 are past 4,294,967,295."""
    producer, consumer, stream = _open(memory, sequence=2**32 - 3)
    for number in range(8):
        producer.publish("b", [(number, array("i", [number]))])
        (entry,) = consumer.take()
        consumer.await_doorbell(stream.cuda_stream, entry)
        consumer.release(entry, stream.cuda_stream)
    stream.synchronize()
    assert memory.words[DOORBELL] == memory.words[CONSUMED] == 4
    assert producer.poll() == 8


def test_no_id_is_lost_or_overwritten_under_backpressure(memory) -> None:
    """Session and engine at full speed, the ring wrapping under a device that is always behind: sums agree exactly."""
    producer, consumer, stream = _open(memory)
    count = 2_000
    view = memory.payload_device_view()
    sums = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def engine() -> None:
        left = count
        try:
            with torch.cuda.stream(stream):
                while left:
                    assert consumer.wait(30.0)
                    for entry in consumer.take():
                        consumer.await_doorbell(stream.cuda_stream, entry)
                        ((item, start, tokens),) = entry.requests
                        sums[item].copy_(view[start : start + tokens].sum(dtype=torch.int64))
                        consumer.release(entry, stream.cuda_stream)
                        left -= 1
        except BaseException as error:  # noqa: BLE001 (handed to the test's own thread)
            failures.append(error)

    thread = threading.Thread(target=engine)
    thread.start()
    expected = []
    for number in range(count):
        tokens = 1 + number * 7919 % 9000
        expected.append(number * tokens)
        while producer.publish("b", [(number, array("i", [number]) * tokens)]) is None and thread.is_alive():
            time.sleep(0.0005)  # a session sleeps on its socket: spinning here, it would keep the lock from the engine
            producer.poll()
    thread.join(60.0)
    stream.synchronize()
    assert failures == []
    producer.poll()
    figures = producer.figures()
    assert (figures.live, figures.entries_returned) == (0, count)
    assert figures.wraps > 20
    assert sums.tolist() == expected


def _read_late(memory, *, in_stream_order: bool) -> tuple[bool, int]:
    """Fill the ring with 1s, hold the stream before it reads them, give back, try to fill it with 3s, let it read.

    Returns whether the second batch was let in, and the first id the device read for the first batch.
    """
    producer, consumer, stream = _open(memory)
    view = memory.payload_device_view()
    row = torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.add(view[:4], 0, out=row)  # the kernel is loaded before anything is held
    torch.cuda.synchronize()
    producer.publish("old", [(1, array("i", [1]) * (CAPACITY // 4))])
    (entry,) = consumer.take()
    memory.wait_doorbell(stream.cuda_stream, entry.sequence + 1)  # the next doorbell holds it, as a slow kernel would
    with torch.cuda.stream(stream):
        torch.add(view[:4], 0, out=row)
    if in_stream_order:
        consumer.release(entry, stream.cuda_stream)
    else:
        memory.words[CONSUMED] = entry.sequence
    producer.poll()
    let_in = producer.publish("new", [(3, array("i", [3]) * (CAPACITY // 4))]) is not None
    if not let_in:
        producer.cancel([1])  # rings the doorbell that the stream waits for, without a payload
    stream.synchronize()
    return let_in, int(row[0])


def test_bytes_come_back_only_when_the_stream_has_read_them(memory) -> None:
    """R3: while the device still has to read a batch, its place is given to nobody."""
    assert _read_late(memory, in_stream_order=True) == (False, 1)


def test_control_a_consumed_word_stored_by_the_host_lets_live_ids_be_overwritten(memory) -> None:
    """The control: given back outside of the stream's order, the first batch reads the second one's ids."""
    assert _read_late(memory, in_stream_order=False) == (True, 3)


def test_nothing_is_allocated_after_warm_up() -> None:
    """R1: neither the framework nor the driver allocates while batches flow."""
    found = latency(rounds=200)
    assert found["framework_allocations"] == 0
    assert found["driver_bytes_allocated"] == 0
