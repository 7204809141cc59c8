"""Taking and releasing: across threads, in one stream's order, never waiting for what was not published (R2, R3)."""

from __future__ import annotations

import threading
import time
from array import array

import pytest

from common.errors import InvariantError
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import CONSUMED, HostRingMemory
from ring.producer import Producer


def _ring(capacity: int = 4096, entries: int = 16) -> tuple[HostRingMemory, Producer, Consumer]:
    memory = HostRingMemory(capacity, entries)
    producer = Producer(memory, Accounting(capacity, entries))
    return memory, producer, Consumer(producer)


def test_a_stream_never_waits_for_an_entry_nobody_took() -> None:
    """R2: a wait for something that may not come would hold the stream, and everything behind it, for ever."""
    _, producer, consumer = _ring()
    entry = producer.publish("b", [(1, array("i", [1]))])
    assert entry is not None
    with pytest.raises(InvariantError, match="nobody took"):
        consumer.await_doorbell(None, entry)
    consumer.take()
    consumer.await_doorbell(None, entry)


def test_releases_of_two_streams_are_refused() -> None:
    """One stream's word would give back an earlier entry that the other stream still reads."""
    _, producer, consumer = _ring()
    for number in range(2):
        producer.publish("b", [(number, array("i", [1]))])
    first, second = consumer.take()
    consumer.release(second, 7)
    with pytest.raises(InvariantError, match="on stream 8, while earlier ones were on 7"):
        consumer.release(first, 8)
    consumer.release(first, 7)
    assert producer.poll() == 2


def test_the_word_is_written_once_for_many_and_only_in_order() -> None:
    """A long prompt holds the head: what ended behind it comes back when it does, with one write."""
    memory, producer, consumer = _ring()
    for number in range(4):
        producer.publish("b", [(number, array("i", [number]))])
    entries = consumer.take()
    consumer.release_all(entries[1:])
    assert memory.words[CONSUMED] == 0
    assert producer.poll() == 0
    consumer.release(entries[0])
    assert memory.words[CONSUMED] == 4
    assert producer.poll() == 4
    with pytest.raises(InvariantError, match="released twice"):
        consumer.release(entries[0])


def test_two_threads_hand_over_everything_in_order_and_intact() -> None:
    """Session and engine at full speed on a ring far too small: backpressure, wraps, sleeps, and no id lost."""
    memory, producer, consumer = _ring(2048, 16)
    count = 3_000
    problems: list[str] = []

    def engine() -> None:
        expected = 0
        while expected < count and not consumer.aborted:
            if not consumer.wait(30.0):
                problems.append(f"nothing came after batch {expected}")
                return
            for entry in consumer.take():
                consumer.await_doorbell(None, entry)
                (request,) = entry.requests
                end = request.offset_tokens + request.token_count
                if request.item != expected or set(memory.payload[request.offset_tokens : end]) != {expected}:
                    problems.append(f"batch {expected} came as {request.item}")
                expected += 1
                consumer.release(entry)

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for number in range(count):
            ids = array("i", [number]) * (1 + number * 7919 % 400)
            while producer.publish("b", [(number, ids)]) is None and thread.is_alive():
                if not producer.poll():
                    time.sleep(0.0001)  # gives the interpreter to the other thread
    finally:
        thread.join(60.0)
        producer.close()
    assert not thread.is_alive()
    assert problems == []
    producer.poll()
    figures = producer.figures()
    assert (figures.live, figures.entries_returned) == (0, count)
    assert figures.wraps > 10


def test_an_abort_wakes_a_sleeping_engine() -> None:
    """S2: the session ends: the engine must not sleep on beside it."""
    _, producer, consumer = _ring()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(consumer.wait(60.0)))
    thread.start()
    producer.close()
    thread.join(30.0)
    assert answers == [False]
    assert consumer.aborted
