"""Which results travel together (D1): bounded, in order, none twice, short ones never behind a long one."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common import limits
from common.messages import LineRef
from worker.delivery import Delivery, Part, Whole


def ref(index: int) -> LineRef:
    return LineRef("job", index, 1)


def test_results_told_twice_go_once() -> None:
    """A verdict asks for a result that is on its way already."""
    delivery = Delivery()
    delivery.add(ref(0), 10)
    delivery.add(ref(0), 10)
    assert delivery.next() == [Whole((ref(0),))]
    assert delivery.next() == []


def test_short_results_pass_a_long_one() -> None:
    """A 64 MB answer takes a minute over a slow link; the answers behind it do not wait that long."""
    delivery = Delivery()
    delivery.add(ref(0), 10 * limits.PART_MAX_BYTES)
    assert [step.offset for step in delivery.next() if isinstance(step, Part)] == [0, limits.PART_MAX_BYTES]
    delivery.add(ref(1), 100)
    assert delivery.next() == [], "two parts are on their way"
    delivery.part_taken(ref(0), limits.PART_MAX_BYTES)
    steps = delivery.next()
    assert Whole((ref(1),)) in steps
    delivery.check()


def test_a_long_result_passes_many_short_ones() -> None:
    """A stream of short answers does not starve a long one."""
    delivery = Delivery()
    for index in range(200):
        delivery.add(ref(index), 100_000)
    delivery.next()
    delivery.add(ref(999), 3 * limits.PART_MAX_BYTES)
    parts = 0
    for index in range(200):
        if delivery.settle(ref(index)):
            parts += sum(isinstance(step, Part) for step in delivery.next())
            delivery.check()
        if parts:
            break
    assert parts
    assert index < 25, "it went as soon as half of the way was free"


def test_a_confirmation_that_cannot_be_changes_nothing() -> None:
    """The broker confirms what was never sent."""
    delivery = Delivery()
    delivery.add(ref(0), 3 * limits.PART_MAX_BYTES)
    delivery.next()
    assert not delivery.part_taken(ref(0), 3 * limits.PART_MAX_BYTES)
    assert not delivery.part_taken(ref(1), 1)
    assert delivery.part_taken(ref(0), 2 * limits.PART_MAX_BYTES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * limits.PART_MAX_BYTES), min_size=1, max_size=40), st.data())
def test_everything_goes_once_within_the_bound(sizes: list[int], data: Any) -> None:
    """Any mixture of results, acknowledged in any order: all arrive whole, and the way is never too full."""
    delivery = Delivery()
    got: dict[LineRef, int] = {}
    whole: set[LineRef] = set()
    for index, size in enumerate(sizes):
        delivery.add(ref(index), size)
    for _ in range(1000):
        for step in delivery.next():
            if isinstance(step, Whole):
                assert not whole & set(step.refs)
                whole |= set(step.refs)
                got |= {one: sizes[one.index] for one in step.refs}
            else:
                assert step.offset == got.get(step.ref, 0)
                got[step.ref] = step.offset + step.length
        delivery.check()
        open_ = [one for one in got if one in delivery._known]
        if not open_:
            break
        one = data.draw(st.sampled_from(open_))
        if one in whole or got[one] == sizes[one.index]:
            assert delivery.settle(one)
        else:
            assert delivery.part_taken(one, got[one])
    assert got == {ref(index): size for index, size in enumerate(sizes)}
    assert delivery.pending == 0
