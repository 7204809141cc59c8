"""Packing: where rows lie in a slot, in a resident region and on the host; the reference differs in addresses alone."""

from __future__ import annotations

from common.messages import LineRef
from worker.engine.contexts import Context, Joined, Share, StepPlan
from worker.engine.fit import Fit
from worker.engine.page_leases import HostPage
from worker.engine.step import PackedStep, pack
from worker.structures import Request, Sampling


def share(number: int, segment: int, start: int, rows: int, prompt: bool, sample: int, **sampling: float) -> Share:
    """A share of a context whose prompt begins at 100 x number."""
    request = Request(LineRef("j", number, 1), "u", "m", 7, Sampling(5, **sampling))  # type: ignore[arg-type]
    return Share(Context(number, request, 0, 100 * number, HostPage(segment, 0)), start, rows, prompt, sample)


def packed(slot_rows: int, **sampling: float) -> PackedStep:
    """A decode of context 1 at 9 rows, a chunk of context 2 from row 4 on."""
    shares = (share(1, 0, 9, 1, False, 2, **sampling), share(2, 2, 4, 3, True, 0))
    return pack(StepPlan(3, shares), Fit(3, 16, 4, slot_rows, 1000, 0, 0, ()))


def test_rows_in_a_slot_lie_back_to_back_in_whole_pages() -> None:
    """Staged: regions of 12 and 8 rows; new rows right behind the history."""
    step = packed(48)
    assert step.ints["history_starts"].tolist() == [0, 12, 20]
    assert step.ints["query_starts"].tolist() == [0, 1, 4]
    assert step.ints["lengths"].tolist() == [10, 7]
    assert step.longs["rows"].tolist() == [9, 16, 17, 18]
    assert step.longs["host_rows"].tolist() == [9, 36, 37, 38]
    assert step.longs["positions"].tolist() == [9, 4, 5, 6]
    assert [(run.host_first, run.first, run.rows, run.added) for run in step.runs] == [(0, 0, 9, 1), (32, 12, 4, 3)]
    assert step.tail == ((1, 10), (2, 7))


def test_resident_rows_lie_in_the_context_s_own_region() -> None:
    """--residency full: the same step, other addresses, starts that only grow."""
    staged, full = packed(48), packed(0)
    assert full.ints["history_starts"].tolist() == [0, 32, 48]
    assert full.longs["rows"].tolist() == full.longs["host_rows"].tolist()
    for name in ("query_starts", "lengths"):
        assert full.ints[name].tolist() == staged.ints[name].tolist()


def test_inputs_come_from_the_ring_or_from_the_last_token() -> None:
    """Prompt rows name their place in the ring's view, decode rows their context's."""
    step = packed(48)
    assert step.longs["prompt_to"].tolist() == [1, 2, 3]
    assert step.longs["prompt_from"].tolist() == [204, 205, 206]
    assert step.longs["last_to"].tolist() == [0]
    assert step.longs["last_from"].tolist() == [0]
    assert step.longs["sample_rows"].tolist() == [0, 3]
    assert step.longs["sample_segments"].tolist() == [0, 2]


def test_chances_travel_only_when_somebody_needs_them() -> None:
    """Greedy steps carry no chances; one warm row brings them for all."""
    assert packed(48).floats == {}
    step = packed(48, temperature=0.5, top_p=0.9)
    assert step.floats["temperature"].tolist() == [0.5, 0.0]
    assert step.longs["top_k"].tolist() == [0, 0]
    assert 0 <= step.floats["chance"][0] < 1


def sharing(slot_rows: int) -> PackedStep:
    """Context 1 alone at 9 rows; contexts 2 and 3 behind a shared history of 8 rows in the long segment 3: a decode at
    position 10, and a chunk of two rows from position 8 on."""
    history = Context(9, Request(LineRef("j", 9, 1), "u", "m", 8, Sampling(0)), 0, 200, HostPage(3, 0), prefilled=8)
    alone, decode, chunk = share(1, 0, 9, 1, False, 2), share(2, 1, 10, 1, False, 1), share(3, 2, 8, 2, True, 0)
    for one in (decode, chunk):
        one.context.shared = history
    fit = Fit(3, 16, 4, slot_rows, 1000, 0, 0, (), longs=1, short_rows=12)
    return pack(StepPlan(3, (alone, decode, chunk), joined=(Joined(history, 1, 2),)), fit)


def test_who_shares_has_own_rows_from_its_history_s_end_on() -> None:
    """H5: positions are absolute, own rows and lengths are not; the shared history lies behind, once, for both."""
    step = sharing(60)
    assert step.longs["positions"].tolist() == [9, 10, 8, 9]
    assert step.ints["history_starts"].tolist()[:3] == [0, 12, 16]
    assert step.ints["lengths"].tolist() == [10, 3, 2]
    assert step.longs["rows"].tolist() == [9, 14, 16, 17]
    assert step.longs["host_rows"].tolist() == [9, 12 + 2, 24, 25]
    assert step.longs["prompt_from"].tolist() == [308, 309]
    assert step.ints["shared_history_starts"].tolist()[:1] == [20]
    assert step.ints["shared_lengths"].tolist() == [8]
    assert step.ints["shared_query_starts"].tolist() == [0, 3]
    assert (step.first_shared_row, step.longest_shared_query, step.longest_shared_history) == (1, 3, 8)
    assert [(run.host_first, run.first, run.rows, run.added) for run in step.runs] == [
        (0, 0, 9, 1),
        (12, 12, 2, 1),
        (24, 16, 0, 2),
        (36, 20, 8, 0),
    ]
    assert step.contexts.ids == (1, 2, 3, 9)
    assert (step.staged_rows, step.spared_rows) == (9 + 2 + 8, 8)


def test_resident_rows_of_a_shared_history_lie_in_its_own_region() -> None:
    """--residency full: both kinds of segments as the host pool has them."""
    staged, full = sharing(60), sharing(0)
    assert full.longs["rows"].tolist() == full.longs["host_rows"].tolist()
    assert full.ints["history_starts"].tolist()[:3] == [0, 12, 24]
    assert full.ints["shared_history_starts"].tolist()[:1] == [36]
    for name in ("query_starts", "lengths", "shared_query_starts", "shared_lengths"):
        assert full.ints[name].tolist() == staged.ints[name].tolist()


def test_a_step_without_sharing_carries_nothing_of_it() -> None:
    """What is uploaded and called then is what it was before there was sharing."""
    step = packed(48)
    assert not [name for name in step.ints if "shared" in name]
    assert (step.first_shared_row, step.spared_rows) == (0, 0)
