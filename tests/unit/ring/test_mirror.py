"""A further rank's ring: entries where rank 0 has them, in its order, and how far the device has read."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from common.errors import InvariantError
from ring.accounting import Accounting
from ring.descriptor import FLAG_CANCEL, FLAG_SKIP, Entry
from ring.memory import HostRingMemory
from ring.mirror import Mirror, MirrorConsumer
from ring.producer import Producer

CAPACITY, ENTRIES = 4096, 16


def ids_of(memory: HostRingMemory, entry: Entry) -> list[list[int]]:
    payload = memory.payload_device_view().numpy()
    return [payload[one.offset_tokens : one.offset_tokens + one.token_count].tolist() for one in entry.requests]


def test_entries_lie_where_they_lie_in_rank_0s_ring() -> None:
    """Through wraps and padding, at any place: a step's tables name the same rows on both."""
    source, twin = HostRingMemory(CAPACITY, ENTRIES), HostRingMemory(CAPACITY, ENTRIES)
    producer = Producer(source, Accounting(CAPACITY, ENTRIES))
    mirror = Mirror(twin)
    consumer, chance = MirrorConsumer(mirror), np.random.default_rng(3)
    for turn in range(40):
        prompts = [array("i", chance.integers(1, 999, size).tolist()) for size in chance.integers(1, 150, 2)]
        entry = producer.publish(f"b{turn}", [(number, ids) for number, ids in enumerate(prompts)])
        assert entry is not None
        (taken,) = producer.handover.take()
        mirror.put(taken, array("i", [token for ids in prompts for token in ids]))
        (found,) = consumer.take()
        consumer.await_doorbell(None, found)
        assert found == entry
        assert ids_of(twin, found) == ids_of(source, found) == [ids.tolist() for ids in prompts]
        consumer.release(found)
        assert consumer.read_through == entry.sequence
        producer.handover.release([entry.sequence])
        source.write_consumed(None, entry.sequence)
        producer.poll()
    assert producer.figures().wraps > 2


def entry(sequence: int, flags: int = 0) -> Entry:
    return Entry(sequence, "b", (), 0, 0, 0, 0, flags)


def test_read_is_what_the_device_has_read_in_order() -> None:
    """One that is read before those ahead of it is not said to be; nor one whose word the device has not written."""
    memory = HostRingMemory(CAPACITY, ENTRIES)
    mirror = Mirror(memory)
    consumer = MirrorConsumer(mirror)
    for sequence in (1, 2, 3):
        mirror.put(entry(sequence), array("i"))
    first, second, third = consumer.take()
    assert consumer.read_through == -1
    consumer.release(second)
    assert consumer.read_through == -1
    written: list[int] = []
    memory.write_consumed = lambda stream, value: written.append(value)  # type: ignore[method-assign]
    consumer.release(first)
    assert (written, consumer.read_through) == ([2], -1)  # on its way on the stream
    HostRingMemory.write_consumed(memory, None, 2)
    assert consumer.read_through == 2
    consumer.release(third)
    HostRingMemory.write_consumed(memory, None, 3)
    assert consumer.read_through == 3


def test_an_entry_out_of_order_or_with_other_ids_is_an_error() -> None:
    """Rank 0 and this one would compute from different prompts."""
    source = HostRingMemory(CAPACITY, ENTRIES)
    producer = Producer(source, Accounting(CAPACITY, ENTRIES))
    published = producer.publish("b", [(0, array("i", [1, 2, 3]))])
    assert published is not None
    mirror = Mirror(HostRingMemory(CAPACITY, ENTRIES))
    with pytest.raises(InvariantError, match="entry 2 came where 1 was next"):
        mirror.put(published._replace(sequence=2), array("i", [1, 2, 3]))
    with pytest.raises(InvariantError, match="came with 4 token ids, its requests have 3"):
        mirror.put(published, array("i", [1, 2, 3, 4]))


@pytest.mark.parametrize("flags", [FLAG_CANCEL, FLAG_SKIP])
def test_what_will_not_be_run_writes_nothing(flags: int) -> None:
    """A cancel has no prompt, and a skip's place may be read as anything."""
    memory = HostRingMemory(CAPACITY, ENTRIES)
    mirror = Mirror(memory)
    before = memory.payload.tolist()
    mirror.put(entry(1, flags), array("i"))
    assert memory.payload.tolist() == before
    assert [one.flags for one in MirrorConsumer(mirror).take()] == [flags]
