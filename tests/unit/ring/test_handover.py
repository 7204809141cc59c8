"""Between two threads: nothing lost, nothing twice, in order, and nobody sleeps through a publish or an abort."""

from __future__ import annotations

import threading

import pytest

from common.errors import InvariantError
from ring.descriptor import Entry
from ring.handover import Handover


def _handover(count: int, first: int = 1) -> Handover:
    handover = Handover(first)
    handover.published.extend(Entry(first + n, f"b{n}", (), 0, 0, 0, 0) for n in range(count))
    return handover


def test_releases_in_any_order_move_the_word_in_ring_order() -> None:
    """A short request behind a long one ends first: its bytes come back only after the long one's."""
    handover = _handover(4)
    handover.take()
    assert handover.release([3]) is None
    assert handover.release([2]) is None
    assert handover.holder(2) == "entry 1: released, given back in order behind it"
    assert handover.release([1]) == 3
    assert handover.release([4]) == 4


def test_several_releases_at_once_are_one_move() -> None:
    """A step that read many entries gives them back with one word."""
    handover = _handover(5)
    handover.take()
    assert handover.release([5, 2, 1, 3]) == 3
    assert handover.release([]) is None
    assert handover.release([4]) == 5


@pytest.mark.parametrize("sequences", [[1, 1], [9], [0], [2, 2]])
def test_releasing_twice_or_unseen_is_an_error(sequences: list[int]) -> None:
    """Bytes given back twice would be handed to a batch while another still uses them."""
    handover = _handover(3)
    handover.take()
    with pytest.raises(InvariantError, match="released twice or never taken"):
        handover.release(sequences)


def test_an_entry_still_in_the_ring_cannot_be_released_or_held() -> None:
    """Only what the engine took is in its hands."""
    handover = _handover(1)
    with pytest.raises(InvariantError, match="never taken"):
        handover.release([1])
    with pytest.raises(InvariantError, match="cannot be held"):
        handover.hold(1, "no page")


def test_every_holder_has_a_name() -> None:
    """R6: the log line says for each descriptor whether ring, engine or device has it, and why the engine keeps it."""
    handover = _handover(3)
    assert handover.holder(1).startswith("the ring")
    handover.take()
    assert handover.holder(1) == "the engine: taken, not released"
    handover.hold(1, "waits for 3 pages")
    handover.hold(2, "chunk 4 of 9")
    assert handover.holder(1) == "the engine: waits for 3 pages"
    handover.release([1])
    assert handover.holder(1).startswith("the device")
    assert handover.holder(2) == "the engine: chunk 4 of 9"
    assert handover.is_taken(3)
    assert not handover.is_taken(4)


def test_waiting_ends_with_time_work_or_abort() -> None:
    """An idle engine sleeps; it wakes for a batch at once, and for the other side's end too."""
    handover = Handover(1)
    assert not handover.wait(0.001)
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(handover.wait(30.0)))
    sleeper.start()
    with handover.lock:
        handover.published.append(Entry(1, "b", (), 0, 0, 0, 0))
        if handover.sleeping:
            handover.ready.notify()
    sleeper.join(30.0)
    assert woken == [True]
    handover.take()
    sleeper = threading.Thread(target=lambda: woken.append(handover.wait(30.0)))
    sleeper.start()
    handover.abort()
    sleeper.join(30.0)
    assert woken == [True, False]
    assert not handover.wait(30.0), "after an abort nobody sleeps"
