"""The plan of a quantum: against brute force on small cases, its bounds, and the measured anchors it agrees with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.limits import FAIR_WAIT_S, QUANTUM_MIN_STEPS_COUNT
from worker.engine.quantum import Candidate, Groups, Rates, held_bytes, plan, step_seconds, tokens_s, turn_steps, ways

GB = 10**9
CARD = Rates(link_bytes_s=55.5 * GB, memory_bytes_s=4_000 * GB, step_s=0.004)
HISTORY = 2_080_000_000


def contexts(*sizes: int, remaining: int = 256) -> list[Candidate]:
    """Contexts with histories of so many bytes."""
    return [Candidate(number, size, remaining) for number, size in enumerate(sizes)]


def partitions(items: list[Candidate]) -> Iterator[list[list[Candidate]]]:
    """Every way to cut contexts into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for index in range(len(rest)):
            yield [*rest[:index], [items[0], *rest[index]], *rest[index + 1 :]]


def oracle(rates: Rates, pool: int, all_: list[Candidate]) -> float:
    """The most tokens a second that any grouping gives."""
    return max(tokens_s(rates, pool, tuple(tuple(group) for group in cut)) for cut in partitions(all_))


def test_plan_turns_win_where_a_history_fits_the_card() -> None:
    """In life, W3: four histories, room for one: decoding them in turns beats streaming all ninefold, as measured."""
    found = plan(CARD, HISTORY, contexts(*[HISTORY] * 4))
    assert len(found.runs) == 1
    assert found.way == "turns of 1"
    streamed = tokens_s(CARD, HISTORY, (tuple(contexts(*[HISTORY] * 4)),))
    assert found.tokens_s > 4 * streamed
    assert found.other_way
    assert found.other_tokens_s < found.tokens_s


def test_plan_all_at_once_wins_where_everything_fits() -> None:
    """In life: the pool holds all histories, or none at all: parking would only cost."""
    assert plan(CARD, 4 * HISTORY, contexts(*[HISTORY] * 4)).way == "all at once"
    assert len(plan(CARD, 0, contexts(*[1000] * 4)).runs) == 4


def test_plan_predicts_the_anchors() -> None:
    """Design figures of one card: four streamed 31,744-token histories of D16 take 150 ms, half retained 75 ms."""
    four = contexts(*[HISTORY] * 4)
    assert step_seconds(CARD, 0, four) == pytest.approx(0.150, rel=0.02)
    assert step_seconds(CARD, 2 * HISTORY, four) == pytest.approx(0.0766, rel=0.03)


def test_plan_of_one_context_runs_it_to_its_end() -> None:
    """In life: nobody else waits; there is no turn to end."""
    found = plan(CARD, 0, contexts(HISTORY, remaining=77))
    assert (found.runs, found.steps, found.other_way) == ((0,), 77, "")


def test_plan_gives_the_next_turn_to_who_waited_longest() -> None:
    """In life: the cycle goes round; nobody is forgotten."""
    four = contexts(*[HISTORY] * 4)
    waited = [Candidate(one.number, one.nbytes, one.remaining, 40 - 10 * one.number) for one in four]
    assert plan(CARD, HISTORY, waited).runs == (0,)
    waited[3] = Candidate(3, HISTORY, 256, 41)
    assert plan(CARD, HISTORY, waited).runs == (3,)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(10**8, 4 * GB), min_size=1, max_size=5),
    pool=st.integers(0, 6 * GB),
    remaining=st.integers(8, 5_000),
    step_ms=st.floats(1, 50),
)
@example([287703614, 473816949, 126615654, 313384349], 594239768, 8, 1.0)  # the order of turns alone decides
@example([100_000_000, 100_000_000, 157_800_000, 114_200_000], 200_309_886, 978, 1.0)  # no order of size is best
def test_plan_against_brute_force(sizes: list[int], pool: int, remaining: int, step_ms: float) -> None:
    """As good as the best of all groupings; never slower than the better of streaming all and turns of one."""
    rates = Rates(55 * GB, 4_000 * GB, step_ms / 1000)
    all_ = contexts(*sizes, remaining=remaining)
    found = plan(rates, pool, all_)
    alone: Groups = tuple((one,) for one in all_)
    assert found.tokens_s >= max(tokens_s(rates, pool, (tuple(all_),)), tokens_s(rates, pool, alone)) * (1 - 1e-9)
    assert found.tokens_s >= oracle(rates, pool, all_) * (1 - 1e-9)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(10**8, 4 * GB), st.integers(-1, 1)), min_size=1, max_size=5),
    shared=st.tuples(st.integers(10**8, 4 * GB), st.integers(10**8, 4 * GB)),
    pool=st.integers(0, 8 * GB),
    remaining=st.integers(8, 5_000),
)
def test_plan_with_shared_histories_against_brute_force(
    sizes: list[tuple[int, int]], shared: tuple[int, int], pool: int, remaining: int
) -> None:
    """H5: contexts on two documents and alone, whatever the sizes of both parts: as good as the best of all
    groupings, each counting a shared history once; never slower than all at once."""
    all_ = [
        Candidate(number, size, remaining, 0, which, shared[which] if which >= 0 else 0)
        for number, (size, which) in enumerate(sizes)
    ]
    found = plan(CARD, pool, all_)
    assert found.tokens_s >= tokens_s(CARD, pool, (tuple(all_),)) * (1 - 1e-9)
    assert found.tokens_s >= oracle(CARD, pool, all_) * (1 - 1e-9)


def test_plan_decodes_a_documents_questions_together() -> None:
    """In life: two documents, room for one: 64 short questions on each decode in turns by document; as histories of
    their own a group of one would have been the best."""
    on = [Candidate(n, 10**6, 256, 0, n % 2, HISTORY) for n in range(128)]
    found = plan(CARD, HISTORY + 64 * 10**6, on)
    assert found.runs == tuple(range(0, 128, 2))
    assert found.way == "turns of 1, by shared history"
    assert held_bytes(on) == 2 * HISTORY + 128 * 10**6
    alone = [Candidate(n, 10**6 + HISTORY, 256) for n in range(8)]
    assert len(plan(CARD, HISTORY + 64 * 10**6, alone).runs) == 1


def test_plan_of_many_weighs_few_ways() -> None:
    """In life: 256 requests: the plan is made within a step, so sizes are tried in steps, and those of equal turns."""
    many = [Candidate(number, 10**8 + number, 256) for number in range(256)]
    found = ways(many, HISTORY)
    sizes = {max(map(len, groups)) for _, groups in found}
    assert len(found) <= 32
    assert {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 43, 48, 64, 86, 96, 128, 192, 256} <= sizes
    assert {len(groups) for _, groups in found} >= {1, 2, 3, 4, 6, 8}
    assert all(sorted(one.number for group in groups for one in group) == [*range(256)] for _, groups in found)


def test_groups_that_fill_the_pool_hold_what_fits_and_no_more() -> None:
    """In life: each group is within the pool with its shared history counted once, and the next one would not be."""
    on = [Candidate(n, 10**8 * (1 + n % 7), 256, 0, n % 3 - 1, 10**9 if n % 3 else 0) for n in range(60)]
    ((_, filled),) = [way for way in ways(on, HISTORY) if way[0] == "turns that fill the pool"]
    assert len(filled) > 3
    assert all(held_bytes(group) <= HISTORY for group in filled)
    assert all(held_bytes([*group, following[0]]) > HISTORY for group, following in pairwise(filled))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 5), size=st.integers(10**8, 4 * GB), pool=st.integers(0, 9 * GB))
def test_plan_of_equal_contexts_is_the_best_there_is(count: int, size: int, pool: int) -> None:
    """In life: a job of documents of one length. Groups of one size, the last smaller: brute force finds no better but
    by cutting unevenly, which gives less than a twentieth."""
    all_ = contexts(*[size] * count)
    assert plan(CARD, pool, all_).tokens_s >= 0.95 * oracle(CARD, pool, all_)


@given(count=st.integers(2, 8), size=st.integers(10**8, 4 * GB), pool=st.integers(0, 9 * GB))
def test_plan_keeps_everybody_within_the_fair_wait(count: int, size: int, pool: int) -> None:
    """In life: a parked request runs again within the stated time, unless a least turn already takes longer."""
    groups: Groups = tuple((one,) for one in contexts(*[size] * count, remaining=10**6))
    steps = turn_steps([step_seconds(CARD, pool, group) for group in groups], groups)
    waits = sum(steps[1:]) * step_seconds(CARD, pool, groups[0])
    assert waits <= FAIR_WAIT_S * (1 + 1e-9) or max(steps) == QUANTUM_MIN_STEPS_COUNT


def test_plan_rates_follow_what_is_measured() -> None:
    """In life: the link gives 20 GB/s today, a step costs 10 ms: the belief follows, each from the steps it rules."""
    rates = CARD
    for _ in range(60):
        rates = rates.learned(8 * GB, 0, 0.4)
    assert rates.link_bytes_s == pytest.approx(20 * GB, rel=0.01)
    for _ in range(60):
        rates = rates.learned(0, GB, 0.01 + GB / CARD.memory_bytes_s)
    assert rates.step_s == pytest.approx(0.01, rel=0.01)
    assert rates.link_bytes_s == pytest.approx(20 * GB, rel=0.01)
