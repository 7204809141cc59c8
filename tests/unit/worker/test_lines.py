"""The books of held lines: one stage each, counted exactly, and credit that never promises too much."""

from __future__ import annotations

from array import array

import pytest

from common import limits
from common.errors import InvariantError
from common.messages import BatchLine, LineRef
from worker.inputs import Snapshot
from worker.lines import Lines, Stage, Wanted, target
from worker.structures import Prepared, Request, Sampling


def ref(index: int) -> LineRef:
    return LineRef("job", index, 1)


def prepared(index: int, tokens: int = 10) -> Prepared:
    return Prepared(Request(ref(index), "/v1/completions", "m", tokens, Sampling(1)), array("i", [1] * tokens))


def receive(lines: Lines, index: int, size: int = 100) -> None:
    lines.receive(BatchLine(ref(index), "/v1/completions", size, b"x" * size), "s")


def test_a_line_goes_down_and_up_once() -> None:
    """A line's whole life, its books checked at each stage."""
    lines = Lines()
    receive(lines, 0)
    lines.check()
    assert lines.tokenized(prepared(0))
    lines.check()
    lines.published([ref(0)])
    lines.check()
    assert lines.admitted([ref(0)]) == (ref(0),)
    assert lines.running(10) == (ref(0),)
    lines.check()
    assert lines.ended(ref(0), 50) is not None
    assert lines.ended(ref(0), 60) is None
    lines.check()
    assert lines.stored(ref(0)).size == 50
    lines.check()
    assert (lines.unfinished, lines.kept, lines.running(10)) == (0, 1, ())
    lines.forget(ref(0))
    lines.check()
    assert lines.kept == 0


def test_a_line_does_not_go_back() -> None:
    """A shell that reports a result stored twice, or one that never was."""
    lines = Lines([(ref(0), "s", 10)])
    with pytest.raises(InvariantError):
        lines.stored(ref(0))
    with pytest.raises(InvariantError):
        lines.stored(ref(1))
    with pytest.raises(InvariantError):
        lines.published([ref(0)])


def test_the_ring_gets_lines_in_order_and_as_many_as_fit() -> None:
    """A long prompt at the head waits for room; what comes behind it does not pass."""
    lines = Lines()
    for index, tokens in enumerate([10, 10, 1000, 10]):
        receive(lines, index)
        lines.tokenized(prepared(index, tokens))
    in_turn = [[one.request.ref.index for one in batch] for batch in lines.next_batches(100)]
    assert in_turn == [[0, 1], [2], [3]], "one at least, however long"
    lines.published([ref(0), ref(1)])
    assert [one.request.ref.index for one in lines.next_batches(100)[0]] == [2]
    with pytest.raises(InvariantError):
        lines.published([ref(3)])


def test_one_doorbell_is_for_a_bounded_number_of_entries() -> None:
    """A worker with many long prompts ready does not keep the engine waiting for the last of them."""
    lines = Lines()
    for index in range(limits.RING_BURST_MAX_COUNT + 5):
        receive(lines, index)
        lines.tokenized(prepared(index, 10))
    assert [len(batch) for batch in lines.next_batches(40)] == [1] * limits.RING_BURST_MAX_COUNT


def test_a_line_that_ends_before_the_ring_leaves_the_queue() -> None:
    """Cancelled while it waited for room."""
    lines = Lines()
    receive(lines, 0)
    lines.tokenized(prepared(0))
    lines.ended(ref(0), 0)
    lines.check()
    assert lines.next_batches(1000) == []


def test_credit_counts_what_is_promised_already() -> None:
    """The broker may use all of it at once: lines, entries and bytes must be there for each."""
    lines = Lines()
    free = Snapshot(free_entries=6, free_bytes=1000)
    assert lines.credit(8, free) == (6, 1000)
    receive(lines, 0, 300)
    assert lines.credit(8, free) == (5, 700)
    lines.tokenized(prepared(0, 10))
    assert lines.credit(8, free) == (5, 960)
    assert lines.credit(8, Snapshot(free_entries=6, free_bytes=40)) == (0, 0)
    assert target(8) == 8 + limits.PREFETCH_MIN_LINES
    assert target(400) == 500


def test_a_full_outbox_grants_nothing() -> None:
    """The broker refuses to take for days: finished work must not fill the disk without end."""
    lines = Lines([(ref(0), "s", limits.OUTBOX_MAX_BYTES)])
    assert lines.credit(8, Snapshot(free_entries=6, free_bytes=1000)) == (0, 0)


def test_only_what_would_be_answered_is_claimed() -> None:
    """D3: what is handed back or dropped is not listed, so it waits again at once."""
    lines = Lines()
    for index in range(3):
        receive(lines, index)
    for index, wanted in ((1, Wanted.HAND_BACK), (2, Wanted.DROP)):
        line = lines.get(ref(index))
        assert line is not None
        line.wanted = wanted
    assert [one.ref for one in lines.held("s")] == [ref(0)]
    assert lines.held("another") == []
    assert [line.stage for line in lines.before(Stage.READY)] == [Stage.TOKENIZING] * 3
