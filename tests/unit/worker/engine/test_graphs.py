"""Steps replayed as a whole, on the virtual device: the same bits, the same books, and what makes a step whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.worker.engine import rigs
from worker.engine import padding
from worker.engine.contexts import StepPlan
from worker.engine.device import RaceError
from worker.engine.device_pool import Rows
from worker.engine.graphs import Graphs
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.routes import LiveStep, StagedRoute
from worker.engine.transport import Edge
from worker.structures import Sampling

MANY = rigs.Scenario(
    prompts=tuple((3 + 2 * number, Sampling(20 - number % 5)) for number in range(11)),
    arrive={0: tuple(range(9)), 4: (9, 10)},
    cancel={14: (1,)},
)
"""Up to eleven contexts decode together: padded to twelve, ten, and fewer as they end."""
FAULTY_STEP = 6
"""A whole step of nine contexts, which decode on."""
WIDE = {"concurrency": 11, "chunk_tokens": 64, "host_pool_gib": 0.02}


@pytest.fixture(scope="module")
def reference() -> rigs.Outcome:
    """Everything resident, in the same shapes, nothing replayed that is not resident."""
    return rigs.run(rigs.model(), MANY, residency="full", graphs="on", **WIDE)


def _counts(outcome: rigs.Outcome) -> tuple[int, int]:
    graphs = outcome.local.engine.graphs
    assert graphs is not None
    return graphs.captures, graphs.replays


@pytest.mark.parametrize("temperament", list(Temperament))
def test_whole_steps_have_the_reference_s_bits(reference: rigs.Outcome, temperament: Temperament) -> None:
    """H4, in life: contexts in place decode as graphs, between steps that stage, prefill and end."""
    outcome = rigs.run(rigs.model(temperament), MANY, retain="on", graphs="on", **WIDE)
    assert rigs.same(outcome, reference)
    assert outcome.answers == reference.answers
    assert _counts(outcome)[1] > 5
    assert outcome.local.engine.layers == reference.local.engine.layers


def test_a_replay_finds_its_own_step_and_each_shape_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life, histories told apart from 16 rows on: what changes between steps lies where a captured pass finds it,
    and what is captured is in its shape."""
    monkeypatch.setattr(padding, "GRAPH_HISTORY_MIN_TOKENS", 16)
    shapes: list[tuple[int, int]] = []
    stale: list[str] = []

    def prepare(local: LocalEngine) -> None:
        graphs = local.engine.graphs
        assert graphs is not None
        original = graphs.forward

        def forward(live: LiveStep, ids: torch.Tensor) -> torch.Tensor:
            logits = original(live, ids)
            shapes.append((live.packed.tokens, live.packed.longest_history))
            for name, array in {**live.tensors.arrays, "ids": ids}.items():
                if name in graphs._inputs and not torch.equal(graphs._inputs[name][: array.numel()], array):
                    stale.append(name)
            return logits

        graphs.forward = forward  # type: ignore[method-assign]

    outcome = rigs.run(rigs.model(), MANY, prepare, retain="on", graphs="on", **WIDE)
    assert stale == []
    again = {shape for shape in shapes if shapes.count(shape) > 1}
    assert _counts(outcome) == (len(again), len(shapes) - len(set(shapes)))
    assert len({history for _, history in again}) > 1


def test_streamed_steps_are_padded_alike(reference: rigs.Outcome) -> None:
    """H4, in life: nothing is retained, no step is whole; shapes are the reference's all the same."""
    outcome = rigs.run(rigs.model(), MANY, graphs="on", **WIDE)
    assert rigs.same(outcome, reference)
    assert _counts(outcome) == (0, 0)


def test_text_is_what_transformers_writes() -> None:
    """In life: padded rows change nobody's answer."""
    loaded = rigs.model()
    outcome = rigs.run(loaded, MANY, retain="on", graphs="on", **WIDE)
    for number, (length, sampling) in enumerate(MANY.prompts):
        if outcome.finished[number].reason == "length":
            wanted = rigs.expected(loaded, rigs.prompt(length, number), sampling.max_tokens)
            assert list(outcome.tokens[number]) == wanted


def test_without_graphs_no_step_is_padded() -> None:
    """In life: --graphs off, and auto on a CPU."""
    outcome = rigs.run(rigs.model(), MANY, retain="on", **WIDE)
    assert outcome.local.engine.graphs is None
    rows = [logits.shape[0] for _, logits in outcome.steps]
    assert max(rows) == 11


# -- controls -----------------------------------------------------------------------------------------------------


def _late_write_back(route: StagedRoute) -> None:
    """In one whole step the rows of one context never reach the host."""
    original = route._write_back_all

    def write_back(packed: Any, sources: torch.Tensor, targets: torch.Tensor) -> Any:
        if packed.step == FAULTY_STEP:
            targets = targets.clone()
            targets[0] = targets[1]
        return original(packed, sources, targets)

    route._write_back_all = write_back  # type: ignore[method-assign]


def _stale_positions(live: LiveStep, graphs: Graphs) -> None:
    """One input of a replay is the last step's."""
    live.tensors["positions"].copy_(graphs._inputs["positions"][: live.packed.tokens])


def _foreign_row(live: LiveStep, graphs: Graphs) -> None:
    """A context's new row lies where another one's does."""
    live.tensors["rows"][0] = live.tensors["rows"][1]


@pytest.mark.parametrize("fault", [None, _stale_positions, _foreign_row])
def test_the_gate_turns_red(reference: rigs.Outcome, fault: Callable[[LiveStep, Graphs], None] | None) -> None:
    """Each fault of one whole step changes bits; without one none does."""

    def prepare(local: LocalEngine) -> None:
        graphs = local.engine.graphs
        assert graphs is not None
        original = graphs.forward

        def forward(live: LiveStep, ids: torch.Tensor) -> torch.Tensor:
            if live.packed.step == FAULTY_STEP and fault is not None:
                fault(live, graphs)
            return original(live, ids)

        graphs.forward = forward  # type: ignore[method-assign]

    outcome = rigs.run(rigs.model(), MANY, prepare, retain="on", graphs="on", **WIDE)
    assert rigs.same(outcome, reference) == (fault is None)


def test_rows_of_whole_steps_reach_the_host() -> None:
    """In life: the host has all of a history although none of it came over the link; else the next staging is stale."""
    seen: list[bool] = []

    def compare(local: LocalEngine) -> None:
        engine = local.engine
        plan = engine.scheduler.plan

        def planned(step: int, now: float) -> tuple[StepPlan | None, list[Any]]:
            if step == FAULTY_STEP + 3:
                seen.append(_host_has_all(local))
            return plan(step, now)

        engine.scheduler.plan = planned  # type: ignore[method-assign]

    rigs.run(rigs.model(), MANY, compare, retain="on", graphs="on", **WIDE)
    assert seen == [True]

    def break_and_compare(local: LocalEngine) -> None:
        assert isinstance(local.engine.route, StagedRoute)
        _late_write_back(local.engine.route)
        compare(local)

    rigs.run(rigs.model(), MANY, break_and_compare, retain="on", graphs="on", **WIDE)
    assert seen == [True, False]


def _host_has_all(local: LocalEngine) -> bool:
    """Whether each running context's rows on the host are those in its run of device pages."""
    engine = local.engine
    retention, fit = engine.scheduler.kept.retention, engine.fit
    assert retention is not None
    assert engine.host is not None
    equal = True
    for context in engine.scheduler.running:
        holding = retention._holdings[context.number]
        if holding.account.home is None or context.page is None:
            continue
        rows = context.rows - 2  # the newest are of steps that are under way
        for layer, host in enumerate(engine.host.layers):
            first = fit.layer_first(layer) + holding.account.home * fit.page_rows
            pages = Rows(*engine.pool.arena.views(first, rows))
            kept = Rows(*host.views(fit.segment_first(context.page.index), rows))
            equal &= torch.equal(pages.key, kept.key) and torch.equal(pages.value, kept.value)
    return equal


def test_a_write_back_that_does_not_wait_is_found() -> None:
    """Q1, in life: one wait forgotten."""

    def omit(local: LocalEngine) -> None:
        local.engine.transport._omit = frozenset({Edge.ATTENTION_BEFORE_WRITE_BACK})

    with pytest.raises(RaceError):
        rigs.run(rigs.model(Temperament.EARLY), MANY, omit, retain="on", graphs="on", **WIDE)
