"""shell: what ``haulier bench ring`` measures: rate beside the standard library's queues, a long wrap soak, latency.

Every figure is measured here, both sides in one run, in turns, so that a slow minute of the machine hits all of them.
Knows no command line.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import queue
import statistics
import sys
import threading
import time
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

from common.errors import InvariantError, RefusedError
from common.limits import RING_BURST_MAX_COUNT, RING_ENTRIES_COUNT
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import CONSUMED, HostRingMemory, RingMemory
from ring.producer import Producer
from ring.stall_control import PaddingForgotten, predicted_wraps, run_equal_batches

BATCH_TOKENS = 512
_RING_BYTES = 3 * 1024 * 1024 + 64
"""Room for about as many batches as there are descriptors, and no whole number of them: the run wraps and pads."""
_GIVE_UP_S = 60.0
_PAUSE_S = 0.0002
"""A producer without credit rests this long, as a session between two polls does."""


def _between_threads(put_all: Callable[[], None], get_all: Callable[[], None], count: int) -> float:
    """Batches a second from one thread to another, from the first put to the last get."""
    reader = threading.Thread(target=get_all, daemon=True)
    began = time.perf_counter()
    reader.start()
    put_all()
    reader.join(_GIVE_UP_S)
    if reader.is_alive():
        raise InvariantError(f"{count} batches did not arrive within {_GIVE_UP_S} s")
    return count / (time.perf_counter() - began)


def _ring_rate(memory: RingMemory, count: int, burst: int = 1) -> float:
    """Publish, take, release and poll ``count`` batches, producer and consumer on a thread each; ``burst`` batches a
    doorbell, as a session publishes what one round brought."""
    producer = Producer(memory, Accounting(memory.capacity_bytes, memory.entries))
    consumer = Consumer(producer)
    batches = [("bench", [(1, array("i", range(BATCH_TOKENS)))])] * burst

    def put_all() -> None:
        left = count
        while left:
            published = len(producer.publish_all(batches[:left]))
            left -= published
            if not published:
                given = producer.poll()
                producer.resolve(given)
                if not given:
                    time.sleep(_PAUSE_S)

    def get_all() -> None:
        left = count
        while left:
            consumer.wait(_GIVE_UP_S)
            entries = consumer.take()
            if entries:
                consumer.await_doorbell(None, entries[-1])  # past the newest doorbell is past all before it
            consumer.release_all(entries, None)
            left -= len(entries)

    rate = _between_threads(put_all, get_all, count)
    producer.resolve(producer.poll())
    if producer.figures().live:
        raise InvariantError(f"the bench left bytes in the ring: {producer.figures()}")
    return rate


def _queue_rate(count: int, bound: int) -> float:
    """The same count of one bytes object, which nobody copies, through ``queue.Queue(bound)``."""
    payload = bytes(BATCH_TOKENS * 4)
    line: queue.Queue[bytes] = queue.Queue(bound)

    def put_all() -> None:
        for _ in range(count):
            line.put(payload)

    def get_all() -> None:
        for _ in range(count):
            line.get()

    return _between_threads(put_all, get_all, count)


def _drain(line: Any, count: int, started: Any, done: Any) -> None:
    started.set()
    for _ in range(count):
        line.get()
    done.set()


def _process_queue_rate(count: int) -> float:
    """The same payloads through ``multiprocessing.Queue`` to another process, its start not counted."""
    context = multiprocessing.get_context("spawn")
    payload = bytes(BATCH_TOKENS * 4)
    line = context.Queue()
    started, done = context.Event(), context.Event()
    reader = context.Process(target=_drain, args=(line, count, started, done), daemon=True)
    reader.start()
    if not started.wait(_GIVE_UP_S):
        raise RefusedError(
            f"a second process did not start within {_GIVE_UP_S} s: the bench has nothing to compare with"
        )
    began = time.perf_counter()
    for _ in range(count):
        line.put(payload)
    if not done.wait(_GIVE_UP_S):
        raise InvariantError(f"{count} batches did not cross the process queue within {_GIVE_UP_S} s")
    rate = count / (time.perf_counter() - began)
    reader.join(_GIVE_UP_S)
    return rate


def rates(count: int = 100_000, rounds: int = 3, memory: RingMemory | None = None) -> dict[str, Any]:
    """Batches of 512 tokens a second through ring, thread queue and process queue: medians of ``rounds``.

    The ring twice: a doorbell for each batch, and one for each burst. The ratios are medians of each round's own, the
    thread queue's against the faster of bounded and unbounded.
    """
    pages = memory or HostRingMemory(_RING_BYTES, RING_ENTRIES_COUNT)
    took: dict[str, list[float]] = {
        "ring": [], "ring_burst": [], "queue": [], "queue_unbounded": [], "multiprocessing": []
    }  # fmt: skip
    _ring_rate(pages, min(count, 5_000))
    for _ in range(rounds):
        took["ring"].append(_ring_rate(pages, count))
        took["ring_burst"].append(_ring_rate(pages, count, RING_BURST_MAX_COUNT))
        took["queue"].append(_queue_rate(count, pages.entries))
        took["queue_unbounded"].append(_queue_rate(count, 0))
        took["multiprocessing"].append(_process_queue_rate(max(1, count // 10)))
    median = {name: statistics.median(values) for name, values in took.items()}
    queues = [max(lines) for lines in zip(took["queue"], took["queue_unbounded"], strict=True)]

    def ratio(name: str, others: list[float]) -> float:
        return statistics.median(one / other for one, other in zip(took[name], others, strict=True))

    return {
        "batch_tokens": BATCH_TOKENS,
        "batches": count,
        "rounds": rounds,
        **{f"{name}_batches_s": round(rate) for name, rate in median.items()},
        "batches_a_burst": RING_BURST_MAX_COUNT,
        "of_queue": round(ratio("ring", queues), 3),
        "of_multiprocessing": round(ratio("ring", took["multiprocessing"]), 2),
        "burst_of_queue": round(ratio("ring_burst", queues), 3),
        "burst_of_multiprocessing": round(ratio("ring_burst", took["multiprocessing"]), 2),
    }


def soak(batches: int, capacity_bytes: int = 1 << 20, entries: int = 256) -> dict[str, Any]:
    """``batches`` of changing length, many in flight, taken = returned + live checked at every step, summed anew often.

    One thread plays both sides, so that the order is the same on every run. Raises ``InvariantError`` if the books ever
    disagree, and if a live entry's bytes are not what was published (each batch carries its own number).
    """
    memory = HostRingMemory(capacity_bytes, entries)
    books = Accounting(capacity_bytes, entries)
    producer = Producer(memory, books)
    consumer = Consumer(producer)
    pieces = [array("i", [length] * length) for length in range(1, 1025)]
    held: list[Any] = []
    chance = 1
    began = time.perf_counter()
    for number in range(batches):
        chance = (chance * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        ids = pieces[chance >> 8 & 1023]
        while producer.publish("soak", [(number, ids)]) is None:
            _read_back(memory, consumer, held)
            if not producer.poll():
                raise InvariantError(f"batch {number}: the ring is full and nothing comes back: {producer.figures()}")
        producer.resolve(1)
        held.extend(consumer.take())
        if chance & 64:
            _read_back(memory, consumer, held)
            producer.poll()
        if number & 1023 == 0:
            books.audit()
    _read_back(memory, consumer, held)
    producer.poll()
    took_s = time.perf_counter() - began
    figures = producer.figures()
    if figures.live or figures.taken != figures.returned or figures.entries_returned != batches:
        raise InvariantError(f"the soak did not end where it began: {figures}")
    return {
        "batches": batches,
        "seconds": round(took_s, 1),
        "batches_s": round(batches / took_s) if took_s else 0,
        "taken": figures.taken,
        "returned": figures.returned,
        "live": figures.live,
        "wraps": figures.wraps,
        "padding_taken": figures.padding_taken,
        "doorbell_word": memory.words[CONSUMED],
    }


def _read_back(memory: RingMemory, consumer: Consumer, held: list[Any]) -> None:
    """Release what is held, newest first (out of order), after a look at both ends of its payload."""
    payload = memory.payload
    for entry in reversed(held):
        _, start, count = entry.requests[0]
        if payload[start] != count or payload[start + count - 1] != count:
            raise InvariantError(f"entry {entry.sequence} was overwritten while it was live")
        consumer.release(entry, None)
    held.clear()


def stall() -> dict[str, Any]:
    """The published failure by its control, and the same work with the padding given back."""
    capacity, length = 65_536, 640
    without = run_equal_batches(PaddingForgotten(capacity, RING_ENTRIES_COUNT), length, 100_000)
    with_padding = run_equal_batches(Accounting(capacity, RING_ENTRIES_COUNT), length, 100_000)
    return {
        "predicted_wraps": predicted_wraps(capacity, length),
        "wraps": without.wraps,
        "stalled": without.stalled,
        "items_unresolved": without.finding.items_unresolved if without.finding else 0,
        "with_padding_stalled": with_padding.stalled,
    }


def growth(count: int = 5_000) -> dict[str, Any]:
    """Net bytes Python holds more after ``count`` batches than before, after a warm-up of as many (tracemalloc)."""
    memory = HostRingMemory(_RING_BYTES, RING_ENTRIES_COUNT)
    producer = Producer(memory, Accounting(memory.capacity_bytes, memory.entries))
    consumer = Consumer(producer)
    batch = [(1, array("i", range(BATCH_TOKENS)))]

    def turn() -> None:
        for _ in range(count):
            producer.publish("growth", batch)
            for entry in consumer.take():
                consumer.release(entry, None)
            producer.poll()
            producer.resolve(1)

    tracemalloc.start()
    try:
        turn()
        before = tracemalloc.get_traced_memory()[0]
        turn()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return {"batches": count, "net_bytes": grown}


def latency(device: int = 0, rounds: int = 1_000) -> dict[str, Any]:
    """Doorbell to kernel on GPU ``device``: microseconds from ringing it until the host sees the consumed word.

    Once with nothing between wait and write, once with a kernel that reads 512 ids from the mapped pages: it starts
    before the second figure. Also counts what framework and driver allocated while it ran. Raises ``RefusedError``
    without a GPU.
    """
    import torch

    from ring.cuda_memory import CudaRingMemory

    if not torch.cuda.is_available():
        raise RefusedError("no CUDA device: doorbell latency needs one")
    memory = CudaRingMemory(_RING_BYTES, RING_ENTRIES_COUNT, device=device)
    try:
        with torch.cuda.device(device):
            return _latency_on(memory, device, rounds)
    finally:
        torch.cuda.synchronize(device)
        memory.close()


def _latency_on(memory: RingMemory, device: int, rounds: int) -> dict[str, Any]:
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch ships no type for it
    handle = stream.cuda_stream
    view = memory.payload_device_view()
    row = torch.empty(BATCH_TOKENS, dtype=torch.int32, device=view.device)
    producer = Producer(memory, Accounting(memory.capacity_bytes, memory.entries))
    batch = [(1, array("i", range(BATCH_TOKENS)))]
    took: dict[str, list[float]] = {"bare": [], "kernel": []}
    words = memory.words
    # a kernel is loaded by its first launch, which may synchronise: behind a stream that waits, that is for ever
    with torch.cuda.stream(stream):
        torch.add(view[:BATCH_TOKENS], 0, out=row)
    torch.cuda.synchronize(device)

    def once(number: int, name: str, *, kernel: bool) -> None:
        # The stream waits first, so that the doorbell finds it waiting; the ring's own consumer never does this. The
        # books know where the payload will lie before it is published.
        value = producer.accounting.next_sequence & 0xFFFF_FFFF
        placement = producer.accounting.fit(BATCH_TOKENS * 4)
        if placement is None:
            raise InvariantError("an empty ring refused a batch")
        start = placement.position % memory.capacity_bytes // 4
        memory.wait_doorbell(handle, value)
        if kernel:
            with torch.cuda.stream(stream):
                torch.add(view[start : start + BATCH_TOKENS], number, out=row)
        memory.write_consumed(handle, value)
        began = time.perf_counter()
        if producer.publish("latency", batch) is None:
            raise InvariantError("an empty ring refused a batch")
        rung = time.perf_counter()
        while words[CONSUMED] != value:
            if time.perf_counter() - began > _GIVE_UP_S:
                raise InvariantError(f"the device did not answer doorbell {value} within {_GIVE_UP_S} s")
        took[name].append((time.perf_counter() - rung) * 1e6)
        producer.handover.take()
        producer.poll()
        producer.resolve(1)

    for number in range(64):
        once(number, "bare", kernel=False)
        once(number, "kernel", kernel=True)
    if int(row[5]) != 5 + 63:
        raise InvariantError(f"the kernel read {int(row[5])} from the ring, not {5 + 63}")
    for values in took.values():
        values.clear()
    torch.cuda.synchronize(device)
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    free = torch.cuda.mem_get_info(device)[0]
    for number in range(rounds):
        once(number, "bare", kernel=False)
        once(number, "kernel", kernel=True)
    torch.cuda.synchronize(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "rounds": rounds,
        **{f"{name}_us_{mark}": round(value, 2) for name in took for mark, value in _spread(took[name]).items()},
        "framework_allocations": torch.cuda.memory_stats(device)["allocation.all.allocated"] - allocations,
        "driver_bytes_allocated": free - torch.cuda.mem_get_info(device)[0],
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


def bench(batches: int = 100_000, soak_batches: int = 1_000_000, device: int | None = None) -> dict[str, Any]:
    """Everything above in one dictionary for ``--json``; ``device`` None leaves the GPU out."""
    return {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
        },
        "rate": rates(batches),
        "growth": growth(),
        "stall_control": stall(),
        "soak": soak(soak_batches) if soak_batches else None,
        "latency": latency(device) if device is not None else None,
    }
