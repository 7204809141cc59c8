"""Turns: quanta follow each other, nobody is left out, and a parked context comes back with its bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker.engine import rigs
from worker.engine.admission import Reason
from worker.engine.contexts import StepPlan
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.quantum import Quantum, Rates
from worker.engine.turns import Decoding, Turns
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

TOKEN = 384
"""Bytes of history a token of the small model."""
SLOW_LINK = Rates(link_bytes_s=2e5, memory_bytes_s=1e9, step_s=0.001)
"""Streaming one history of 40 rows costs 77 steps: turns win wherever one history fits."""


def decoding(*rows: int, remaining: int = 50) -> list[Decoding]:
    """Contexts with so many rows."""
    return [Decoding(number, count, remaining) for number, count in enumerate(rows)]


def test_a_plan_lasts_its_steps_and_then_another_has_its_turn() -> None:
    """In life: two histories, pages for one: each decodes for its quantum; every plan and what it beat is on record."""
    turns = Turns(SLOW_LINK, 50 * TOKEN, TOKEN)
    runs = [turns.decide(step, decoding(40, 40)) for step in range(200)]
    assert all(one is not None and len(one.runs) == 1 for one in runs)
    assert Counter(one.runs[0] for one in runs if one is not None) == {0: 100, 1: 100}
    first = turns.records[0]
    assert (first.step, first.among, first.quantum.runs, first.quantum.following) == (0, (0, 1), (0,), (1,))
    assert first.quantum.other_way
    assert first.quantum.tokens_s > first.quantum.other_tokens_s


def test_no_plan_is_made_while_the_pool_holds_all() -> None:
    """In life: short requests; no step costs a plan."""
    turns = Turns(SLOW_LINK, 100 * TOKEN, TOKEN)
    assert turns.decide(0, decoding(40, 40)) is None
    assert turns.decide(1, decoding(400)) is None
    assert not turns.records


def test_a_plan_ends_when_somebody_comes_or_goes() -> None:
    """In life: a request finishes in the middle of a quantum: the next plan is made at once."""
    turns = Turns(SLOW_LINK, 50 * TOKEN, TOKEN)
    turns.decide(0, decoding(40, 40))
    turns.decide(1, decoding(40, 40))
    assert len(turns.records) == 1
    turns.decide(2, decoding(40, 40, 40))
    assert len(turns.records) == 2


def test_predicted_and_measured_stand_side_by_side() -> None:
    """H3: sums over decode steps; the rates follow what was measured."""
    turns = Turns(SLOW_LINK, 50 * TOKEN, TOKEN)
    for _ in range(80):
        turns.learn(40, 0, 0.01)
    assert turns.measured_s == pytest.approx(0.8)
    assert turns.rates.seconds(40 * TOKEN, 0) == pytest.approx(0.01, rel=0.01)
    assert turns.predicted_s > turns.measured_s


def test_rates_that_nobody_corrects_stay_wrong() -> None:
    """The control of the above: believed rates are far from what that machine measures."""
    assert SLOW_LINK.seconds(40 * TOKEN, 0) > 2 * 0.01


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(1, 60), min_size=2, max_size=5), pool=st.integers(1, 120), remaining=st.integers(1, 90)
)
def test_every_context_decodes_to_its_end(rows: list[int], pool: int, remaining: int) -> None:
    """No livelock, whatever the plan: all finish, and a parked one runs again before each other had two turns."""
    turns = Turns(SLOW_LINK, pool * TOKEN, TOKEN)
    left = dict.fromkeys(range(len(rows)), remaining)
    for step in range(len(rows) * remaining * 2):
        alive = [Decoding(number, rows[number], tokens) for number, tokens in left.items() if tokens]
        if not alive:
            break
        quantum = turns.decide(step, alive)
        for number in [one.number for one in alive] if quantum is None else quantum.runs:
            left[number] -= 1
    assert not any(left.values())


# -- the engine follows the plan ----------------------------------------------------------------------------------


class Replay:
    """A recorded schedule of turns: what the reference runs by."""

    def __init__(self, runs: dict[int, tuple[int, ...]]) -> None:
        self.runs = runs

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        return Quantum(self.runs[step], 1, "replayed", 1.0, 1.0) if step in self.runs else None

    def ahead_rows(self, quantum: Quantum) -> int:
        return 0


class InTurn:
    """One context after the other, so many steps each; ``ahead`` rows of the next one come in beside each step."""

    def __init__(self, steps: int, ahead: int) -> None:
        self.steps, self.ahead = steps, ahead

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        order = sorted(one.number for one in decoding)
        at = step // self.steps
        return Quantum((order[at % len(order)],), 1, "in turn", 1.0, 1.0, following=(order[(at + 1) % len(order)],))

    def ahead_rows(self, quantum: Quantum) -> int:
        return self.ahead

    def learn(self, *seen: float) -> None:
        """Nothing."""


@cache
def made() -> LoadedModel:
    return rigs.model()


def on(temperament: Temperament) -> LoadedModel:
    """The same weights on a device of that temperament."""
    return replace(made(), device=VirtualDevice(temperament, 5))


FOUR = rigs.together(36, 30, 33, 28, tokens=10)


def taking_turns(pages: int, planner: InTurn | None = None) -> Callable[[LocalEngine], None]:
    """Retain in so few pages; plan by rates at which turns win, or as ``planner`` says."""

    def prepare(local: LocalEngine) -> None:
        rigs.retaining(pages)(local)
        turns: Any = planner or Turns(SLOW_LINK, pages * rigs.PAGE * TOKEN, TOKEN)
        turns.learn = lambda *seen: None
        local.engine.turns = local.engine.scheduler.turns = turns

    return prepare


def decoders(outcome_plans: list[StepPlan]) -> dict[int, tuple[int, ...]]:
    """Step to who decoded."""
    return {plan.step: tuple(s.context.number for s in plan.shares if not s.prompt) for plan in outcome_plans}


def run(
    prepare: Callable[[LocalEngine], None],
    temperament: Temperament,
    script: rigs.Scenario = FOUR,
    **changes: object,
) -> tuple[rigs.Outcome, list[StepPlan]]:
    """A run and its plans."""
    plans: list[StepPlan] = []

    def look(local: LocalEngine) -> None:
        prepare(local)
        original = local.engine.scheduler.plan

        def plan(step: int, now: float):  # type: ignore[no-untyped-def]
            found = original(step, now)
            if found[0] is not None:
                plans.append(found[0])
            return found

        local.engine.scheduler.plan = plan  # type: ignore[method-assign]

    return rigs.run(on(temperament), script, look, concurrency=4, **changes), plans


@pytest.mark.parametrize("temperament", [Temperament.EARLY, Temperament.LATE, Temperament.RANDOM])
@pytest.mark.parametrize("way", ["planned", "brought in ahead"])
def test_the_engine_follows_the_plan_and_keeps_its_bits(temperament: Temperament, way: str) -> None:
    """H6 and H4, in life: pages for one history, or for more, so that the next comes in beside the running one: parked
    contexts come back, all answers end, and the reference that replays the schedule has the same bits."""
    planned = way == "planned"
    prepare = taking_turns(13) if planned else taking_turns(28, InTurn(4, 7))
    outcome, plans = run(prepare, temperament, retain="on")
    assert {one.reason for one in outcome.finished.values()} == {"length"}
    alone = {plan.shares[0].context.number for plan in plans if len(plan.shares) == 1 and not plan.shares[0].prompt}
    assert len(alone) >= 3
    pool = outcome.local.engine.scheduler.kept.retention.pool  # type: ignore[union-attr]
    assert pool.moved[Reason.IDLE] > 0
    arrived = sum(end - start for plan in plans for one in plan.prefetches for start, end in one.placement.copies)
    assert (arrived > 0) == (not planned)

    def replay(local: LocalEngine) -> None:
        local.engine.scheduler.turns = Replay(decoders(plans))

    same, _ = run(replay, Temperament.EAGER, residency="full")
    assert rigs.same(outcome, same)


DOCUMENTS = rigs.Scenario(
    prompts=tuple((length, Sampling(10)) for length in (36, 30, 33, 29)),
    arrive={0: (0, 1, 2, 3)},
    shared=((0, 24), (1, 24), (0, 24), (2, 24)),
)
"""Two questions on one document, one on each of two others."""


class ByDocument(InTurn):
    """Those who share a history in one turn, one history after the other."""

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        shared = sorted({one.shared for one in decoding})
        at = step // self.steps
        turn, following = (
            tuple(one.number for one in decoding if one.shared == shared[(at + more) % len(shared)]) for more in (0, 1)
        )
        return Quantum(turn, 1, "by document", 1.0, 1.0, following=following)


@pytest.mark.parametrize(
    ("planner", "pages", "temperament"),
    [
        (ByDocument, 18, Temperament.LATE),
        (ByDocument, 22, Temperament.RANDOM),
        (InTurn, 16, Temperament.RANDOM),
        (InTurn, 24, Temperament.LATE),
        (None, 18, Temperament.RANDOM),
    ],
)
def test_shared_histories_are_parked_with_their_members_and_come_back(
    planner: type[InTurn] | None, pages: int, temperament: Temperament
) -> None:
    """H5 and H6, in life: pages for one document and its questions: another one's are reclaimed with its questions'
    while these are parked, and come in once for all of them. Bits are the reference's over the same schedule."""
    prepare = taking_turns(pages, None if planner is None else planner(4, 7))
    outcome, plans = run(prepare, temperament, DOCUMENTS, retain="on", shared_histories=3)
    assert {one.reason for one in outcome.finished.values()} == {"length"}
    retention = outcome.local.engine.scheduler.kept.retention
    assert retention is not None
    assert retention.pool.moved[Reason.IDLE] > 0
    arrived = [sum(one.number == number for number in (6, 5, 4)) for plan in plans for one in plan.prefetches]
    assert planner is None or sum(arrived) > 0, "a document is brought in beside another one's turn"

    def replay(local: LocalEngine) -> None:
        local.engine.scheduler.turns = Replay(decoders(plans))

    same, _ = run(replay, Temperament.EAGER, DOCUMENTS, residency="full", shared_histories=3)
    assert rigs.same(outcome, same)


def test_a_shared_history_counts_once_for_the_pool() -> None:
    """In life: four questions on a document that fit beside it: nobody is parked, nothing is planned; each with a
    history of its own would not fit."""
    turns = Turns(SLOW_LINK, 100 * TOKEN, TOKEN)
    shared = [Decoding(number, 20, 50, 9, 20) for number in range(4)]
    assert turns.decide(0, shared) is None
    alone = [Decoding(number, 40, 50) for number in range(4)]
    assert turns.decide(1, alone) is not None
