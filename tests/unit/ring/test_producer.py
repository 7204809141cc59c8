"""Publishing: ids written once and intact, books exact, cancellations in order, memory flat (R1-R6)."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvariantError
from ring.accounting import Accounting, OversizeError, word_of
from ring.consumer import Consumer
from ring.descriptor import FLAG_CANCEL, FLAG_SKIP, Descriptor, Entry, batch_key
from ring.handover import RingAborted
from ring.memory import ABORT, CONSUMED, DOORBELL, HostRingMemory
from ring.producer import Producer

Ring = tuple[HostRingMemory, Producer, Consumer]


def _ring(capacity: int = 4096, entries: int = 16, sequence: int = 1) -> Ring:
    memory = HostRingMemory(capacity, entries)
    producer = Producer(memory, Accounting(capacity, entries, first_sequence=sequence))
    return memory, producer, Consumer(producer)


def _ids(first: int, count: int) -> array[int]:
    return array("i", range(first, first + count))


def _read(memory: HostRingMemory, entry: Entry) -> list[list[int]]:
    return [memory.payload[r.offset_tokens : r.offset_tokens + r.token_count].tolist() for r in entry.requests]


class RingTraffic(RuleBasedStateMachine):
    """Both sides of a small ring under random traffic, against lists of what was published."""

    @initialize(sequence=st.sampled_from([1, 2**32 - 6]))
    def begin(self, sequence: int) -> None:
        self.memory, self.producer, self.consumer = _ring(512, 16, sequence)
        self.number = 0
        self.sent: list[tuple[Entry, list[list[int]]]] = []  # published, not taken
        self.held: list[tuple[Entry, list[list[int]]]] = []  # taken, not released
        self.unreturned: list[int] = []
        self.cancelled: set[int] = set()

    @rule(counts=st.lists(st.integers(0, 60), min_size=1, max_size=4))
    def publish(self, counts: list[int]) -> None:
        """A batch of one to four prompts."""
        requests = []
        for count in counts:
            self.number += 1
            requests.append((self.number, _ids(self.number * 1000, count)))
        if sum(counts) * 4 > 512:
            with pytest.raises(OversizeError):
                self.producer.publish("batch", requests)
            return
        credit = self.producer.credit()
        entry = self.producer.publish("batch", requests)
        fits = credit[0] > 0 and credit[1] >= (sum(counts) * 4 + 63) // 64 * 64
        assert (entry is not None) == fits, "backpressure exactly where credit ends"
        if entry is not None:
            self.sent.append((entry, [ids.tolist() for _, ids in requests]))
            self.unreturned.append(entry.sequence)

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Somebody changes their mind about some requests."""
        items = data.draw(st.sets(st.integers(1, self.number), min_size=1, max_size=6))
        entry = self.producer.cancel(sorted(items))
        for index, (sent, ids) in enumerate(self.sent):
            if sent.flags == 0 and {r.item for r in sent.requests} <= items:
                self.sent[index] = (sent._replace(flags=FLAG_SKIP), ids)
        if entry is None:
            self.cancelled |= items
        else:
            self._note_cancel(entry, self.cancelled | items)

    def _note_cancel(self, entry: Entry, items: set[int]) -> None:
        assert (entry.flags, entry.length, entry.padding) == (FLAG_CANCEL, 0, 0)
        assert {r.item for r in entry.requests} == items
        self.cancelled = set()
        self.sent.append((entry, [[] for _ in entry.requests]))
        self.unreturned.append(entry.sequence)

    @rule()
    def take(self) -> None:
        """The engine looks: everything published, first in first out, skips marked, ids as they were."""
        entries = self.consumer.take()
        assert entries == [entry for entry, _ in self.sent]
        for entry, ids in self.sent:
            self.consumer.await_doorbell(None, entry)
            assert _read(self.memory, entry) == ids
        self.held += self.sent
        self.sent = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """An entry was read for good, not always the oldest; until now its bytes were untouched."""
        entry, ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert _read(self.memory, entry) == ids, "a live entry was overwritten"
        self.consumer.release(entry)

    @rule()
    def poll(self) -> None:
        """The session comes round: what is released up to the first kept entry comes back, waiting cancels go out."""
        kept = {entry.sequence for entry, _ in self.held + self.sent}
        free = next((n for n, sequence in enumerate(self.unreturned) if sequence in kept), len(self.unreturned))
        waiting = self.cancelled
        before = len(self.producer.handover.published)
        assert self.producer.poll() == free
        del self.unreturned[:free]
        if len(self.producer.handover.published) > before:
            self._note_cancel(self.producer.handover.published[-1], waiting)

    @invariant()
    def books_agree(self) -> None:
        """What the producer took and has not got back is what the entries outside say."""
        if not hasattr(self, "producer"):
            return
        figures = self.producer.figures()
        assert figures.taken - figures.returned == figures.live
        assert figures.entries_live == len(self.unreturned)
        assert self.memory.words[DOORBELL] == word_of(self.producer.accounting.next_sequence - 1)
        for entry, _ in self.sent + self.held:
            at = entry.sequence % 16 * 64
            assert Descriptor.unpack(self.memory.descriptors[at : at + 64]) == entry.descriptor


RingTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRingTraffic = RingTraffic.TestCase


def test_a_published_batch_is_in_the_pages_before_its_doorbell() -> None:
    """R2: payload, descriptor, fence, doorbell, in this order; the device believes the doorbell alone."""
    memory, producer, _ = _ring()
    seen: list[tuple[int, list[int], int]] = []

    def fence() -> None:
        found = Descriptor.unpack(memory.descriptors[64:128])
        seen.append((memory.words[DOORBELL], memory.payload[0:3].tolist(), found.sequence))

    producer._fence = fence  # type: ignore[assignment]
    entry = producer.publish("b1", [("x", _ids(5, 3))])
    assert seen == [(0, [5, 6, 7], 1)]
    assert memory.words[DOORBELL] == 1
    assert entry is not None
    assert entry.descriptor == Descriptor(1, 0, 64, 0, 1, 3, batch_key("b1"), 0)


def test_ids_come_from_arrays_and_from_numpy() -> None:
    """The tokenizer's arrays and numpy's rows are written alike, strided ones too."""
    memory, producer, _ = _ring()
    rows: list[tuple[Any, Any]] = [(1, _ids(0, 4)), (2, np.arange(8, dtype=np.int32)[::2]), (3, array("i"))]
    entry = producer.publish("b", rows)
    assert entry is not None
    assert _read(memory, entry) == [[0, 1, 2, 3], [0, 2, 4, 6], []]


@pytest.mark.parametrize("ids", [array("q", [1, 2]), np.zeros((2, 2), np.int32), np.zeros(3, np.float32), [1, 2]])
def test_ids_of_another_kind_are_refused_and_what_was_taken_comes_back(ids: Any) -> None:
    """A bug upstream stops with its name; no byte stays taken behind it and no half batch is run."""
    _, producer, consumer = _ring()
    with pytest.raises(InvariantError, match="batch b are not int32"):
        producer.publish("b", [("good", _ids(0, 4)), ("bad", ids)])
    (void,) = consumer.take()
    assert void.is_skip
    assert void.requests == ()
    consumer.release(void)
    assert producer.poll() == 1
    figures = producer.figures()
    assert (figures.live, figures.items_unresolved, figures.tokens_pending) == (0, 0, 0)


def test_a_wrong_batch_in_a_burst_costs_those_behind_it_and_no_byte() -> None:
    """What stood before it is published whole; itself and the rest come back as skips."""
    memory, producer, consumer = _ring()
    burst = [("a", [(1, _ids(5, 4))]), ("b", [(2, array("q", [1]))]), ("c", [(3, _ids(0, 4))])]
    with pytest.raises(InvariantError, match="batch b are not int32"):
        producer.publish_all(burst)
    first, *voids = consumer.take()
    assert _read(memory, first) == [[5, 6, 7, 8]]
    assert [(one.is_skip, one.requests) for one in voids] == [(True, ()), (True, ())]
    consumer.release_all([first, *voids])
    assert producer.poll() == 3
    figures = producer.figures()
    assert (figures.live, figures.items_unresolved, figures.tokens_pending) == (0, 1, 0)


def test_what_stands_before_a_batch_that_can_never_fit_is_published() -> None:
    """A bug upstream, in life: nothing stays taken and unpublished, which would jam the ring for good."""
    _, producer, consumer = _ring()
    burst = [("a", [(1, _ids(0, 4))]), ("b", [(2, _ids(0, 5000))]), ("c", [(3, _ids(0, 4))])]
    assert [entry.batch_id for entry in producer.publish_all(burst)] == ["a"]
    with pytest.raises(OversizeError, match="set --ring-mib"):
        producer.publish_all(burst[1:])
    assert [entry.batch_id for entry in producer.publish_all(burst[2:])] == ["c"]
    taken = consumer.take()
    assert [entry.batch_id for entry in taken] == ["a", "c"]
    consumer.release_all(taken)
    assert producer.poll() == 2
    figures = producer.figures()
    assert (figures.live, figures.entries_live, figures.items_unresolved) == (0, 0, 2)


@pytest.mark.parametrize("burst", [True, False])
def test_a_batch_that_fails_in_an_unforeseen_way_says_so_and_gives_back(burst: bool) -> None:
    """A name that is no text: the error is its own, the entry comes back, the ring goes on."""
    _, producer, consumer = _ring()
    nameless: Any = 5
    requests = [("x", _ids(0, 4))]
    batches = [("a", requests), (nameless, requests), ("c", requests)]
    with pytest.raises(AttributeError, match="encode"):
        producer.publish_all(batches) if burst else producer.publish(nameless, requests)
    assert producer.publish("d", requests) is not None
    taken = consumer.take()
    assert [entry.batch_id for entry in taken] == (["a", "void", "void", "d"] if burst else ["void", "d"])
    consumer.release_all(taken)
    assert producer.poll() == len(taken)
    assert (producer.figures().live, producer.figures().items_unresolved) == (0, 2 if burst else 1)


def test_a_burst_goes_as_far_as_it_fits() -> None:
    """R3 and backpressure: the first that does not fit stops it, though a smaller one behind it would."""
    _, producer, consumer = _ring(capacity=512)
    burst = [("a", [(1, _ids(0, 60))]), ("b", [(2, _ids(0, 100))]), ("c", [(3, _ids(0, 4))])]
    assert [entry.batch_id for entry in producer.publish_all(burst)] == ["a"]
    consumer.release_all(consumer.take())
    producer.poll()
    assert [entry.batch_id for entry in producer.publish_all(burst[1:])] == ["b", "c"]


def test_a_burst_rings_the_doorbell_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fence for all payloads, and the word of the last entry: past it is past all before it (R2)."""
    memory, producer, _ = _ring()
    fences: list[int] = []
    monkeypatch.setattr(producer, "_fence", lambda: fences.append(memory.words[DOORBELL]))
    entries = producer.publish_all([(str(number), [(number, _ids(number, 8))]) for number in range(5)])
    assert fences == [0]
    assert memory.words[DOORBELL] == entries[-1].sequence == 5
    assert [Descriptor.unpack(memory.descriptors[slot * 64 : slot * 64 + 64]) for slot in range(1, 6)] == [
        entry.descriptor for entry in entries
    ]


def test_a_cancelled_batch_nobody_took_becomes_a_skip() -> None:
    """A user cancels while the engine is busy: the batch still travels, is skipped, and the stop comes behind it."""
    memory, producer, consumer = _ring()
    producer.publish("b1", [(1, _ids(0, 4)), (2, _ids(0, 4))])
    producer.publish("b2", [(3, _ids(0, 4)), (4, _ids(0, 4))])
    assert producer.figures().tokens_pending == 16
    producer.cancel([1, 2, 3])
    first, second, stop = consumer.take()
    assert first.is_skip
    assert not second.is_skip, "request 4 still runs"
    assert stop.is_cancel
    assert [r.item for r in stop.requests] == [1, 2, 3]
    assert producer.figures().tokens_pending == 8
    assert Descriptor.unpack(memory.descriptors[64:128]).flags == FLAG_SKIP


def test_a_batch_the_engine_took_is_stopped_by_the_descriptor_alone() -> None:
    """What the engine already holds is its own to end: its entry is not touched any more."""
    _, producer, consumer = _ring()
    producer.publish("b1", [(1, _ids(0, 4))])
    (taken,) = consumer.take()
    assert producer.cancel([1]) is not None
    (stop,) = consumer.take()
    assert not taken.is_skip
    assert stop.is_cancel
    assert producer.figures().tokens_pending == 4


def test_items_are_recognised_by_the_identity_given() -> None:
    """The session publishes requests and cancels lines: what both are known by is the caller's to say."""
    memory = HostRingMemory(4096, 16)
    producer = Producer(memory, Accounting(4096, 16), identity=lambda item: item["id"])
    consumer = Consumer(producer)
    producer.publish("b", [({"id": 1, "url": "/v1"}, _ids(0, 4))])
    producer.cancel([{"id": 1}])
    assert consumer.take()[0].is_skip


def test_cancellations_wait_for_an_entry_and_then_travel_together() -> None:
    """A table full to its last entry: no cancellation is lost, and the next poll sends them as one."""
    _, producer, consumer = _ring()
    while producer.publish("b", [(0, _ids(0, 4))]) is not None:
        pass
    assert producer.cancel([7]) is not None
    assert producer.cancel([8]) is not None
    assert producer.cancel([9]) is None
    assert producer.cancel([10]) is None
    entries = consumer.take()
    assert len(entries) == 16
    consumer.release(entries[0])
    assert producer.poll() == 1
    (stop,) = consumer.take()
    assert [r.item for r in stop.requests] == [9, 10]
    assert producer.cancel([]) is None, "nothing to stop is nothing to send"


def test_after_an_abort_nothing_is_published() -> None:
    """The engine died: the session hears of it at its next publish, from either side's abort, and may close twice."""
    memory, producer, consumer = _ring()
    consumer.abort()
    with pytest.raises(RingAborted):
        producer.publish("b", [(1, _ids(0, 4))])
    with pytest.raises(RingAborted):
        producer.publish_all([("b", [(1, _ids(0, 4))])])
    assert producer.cancel([1]) is None
    producer.close()
    producer.close()
    assert consumer.aborted
    assert memory.words[ABORT] == 1


def test_a_consumed_word_nobody_could_write_is_an_error() -> None:
    """R3: the consumer returns what was taken, and no more."""
    memory, producer, _ = _ring()
    producer.publish("b", [(1, _ids(0, 4))])
    memory.words[CONSUMED] = 2
    with pytest.raises(InvariantError, match="outside of the 1 live"):
        producer.poll()


def test_a_full_ring_with_nothing_in_it_is_found_with_its_holders() -> None:
    """R6: everything in the ring was skipped, the engine idles and never releases: the finding names it."""
    _, producer, consumer = _ring()
    while producer.publish("b", [(1, _ids(0, 64))]) is not None:
        pass
    assert producer.finding(engine_idle=True) is None, "tokens are pending: that is work, not a stall"
    producer.cancel([1])
    for entry in consumer.take()[:2]:
        consumer.hold(entry, "waits for a page")
    found = producer.finding(engine_idle=True)
    assert found is not None
    assert found.items_unresolved == 14 + 1, "fourteen in the ring and the one that was refused"
    assert [holder.by for holder in found.holders[:3]] == [
        "the engine: waits for a page",
        "the engine: waits for a page",
        "the engine: taken, not released",
    ]
    assert producer.finding(engine_idle=False) is None
    producer.resolve(14)
    assert producer.finding(engine_idle=True, waiting_items=0) is None


def test_the_watchdog_speaks_once_when_a_stall_lasts() -> None:
    """R6: the session asks at every poll; five seconds of a full, empty, idle ring are one log line."""
    _, producer, consumer = _ring()
    producer.publish("b", [(1, _ids(0, 64))])
    assert producer.stuck(0.0, engine_idle=True) is None
    consumer.release_all(consumer.take())
    producer.poll()
    told = [producer.stuck(1.0 + tenth / 10, engine_idle=True) is not None for tenth in range(100)]
    assert told.index(True) == 50
    assert told.count(True) == 1
    producer.resolve(1)
    assert producer.stuck(20.0, engine_idle=True) is None


def test_books_and_pages_of_different_size_are_refused() -> None:
    """A ring made with two sizes would hand out positions outside of its arena."""
    with pytest.raises(InvariantError, match="different size"):
        Producer(HostRingMemory(4096, 16), Accounting(8192, 16))


def test_memory_is_flat_after_warm_up() -> None:
    """R1: a worker that runs for a month holds what it held after its first minute, wraps and cancels included."""
    _, producer, consumer = _ring(64 * 1024, 64)
    batches = [[(0, _ids(0, 100 + n * 37 % 900))] for n in range(50)]

    def run(count: int) -> None:
        for number in range(count):
            while producer.publish("flat", batches[number % 50]) is None:
                consumer.release_all(consumer.take())
                producer.resolve(producer.poll())
            if number % 10 == 0:
                consumer.release_all(consumer.take())
                producer.resolve(producer.poll())
        consumer.release_all(consumer.take())
        producer.resolve(producer.poll())

    tracemalloc.start()
    try:
        run(2_000)
        before = tracemalloc.get_traced_memory()[0]
        run(4_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert producer.figures().wraps > 100
    assert grown < 2_000, f"{grown} bytes more after 4,000 batches: less than half a byte a batch is noise, more is not"


def test_the_producer_writes_each_payload_once() -> None:
    """R1: one store a token: publishing takes no memory of the payload's size, not even for a moment."""
    _, producer, consumer = _ring(8 * 1024 * 1024, 16)
    ids = array("i", bytes(4 * 1024 * 1024))
    producer.publish("warm", [(0, ids)])
    consumer.release_all(consumer.take())
    producer.poll()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        entry = producer.publish("one", [(0, ids)])
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert entry is not None
    assert peak < 100_000
