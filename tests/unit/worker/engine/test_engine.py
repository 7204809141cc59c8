"""The whole engine on the CPU: greedy text as transformers writes it, staged bits as resident ones, books at rest."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from common.errors import InvariantError, RefusedError
from tests.unit.worker.engine import faults, rigs
from worker.engine.device import RaceError
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge
from worker.structures import Sampling

SEEDS = min(3, int(os.environ.get("HAULIER_SEEDS", "3")))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_prompts_run_together_read_as_transformers_writes_them_alone(model_type: str) -> None:
    """In life: a batch of mixed lengths, prefilled in chunks beside decodes. Token for token what generate says."""
    loaded = rigs.model(model_type=model_type)
    lengths = (1, 3, 4, 5, 8, 9, 20)
    outcome = rigs.run(loaded, rigs.together(*lengths))
    for number, length in enumerate(lengths):
        assert list(outcome.tokens[number]) == rigs.expected(loaded, rigs.prompt(length, number), 5)
        assert outcome.finished[number].reason == "length"


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_one_layer_and_two_layers_stage_too(model_type: str) -> None:
    """In life: fewer layers than slots; the next step's first layer waits for this step's write-back."""
    for layers in (1, 2):
        loaded = rigs.model(model_type=model_type, num_hidden_layers=layers)
        outcome = rigs.run(loaded, rigs.together(6, 2))
        assert list(outcome.tokens[0]) == rigs.expected(loaded, rigs.prompt(6, 0), 5)


@pytest.fixture(scope="module")
def reference() -> rigs.Outcome:
    """The same churn with everything resident."""
    return rigs.run(rigs.model(), rigs.CHURN, residency="full")


def test_the_reference_repeats_itself(reference: rigs.Outcome) -> None:
    """The first control: resident against resident, run to run."""
    assert rigs.same(reference, rigs.run(rigs.model(), rigs.CHURN, residency="full"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("temperament", list(Temperament))
def test_staged_bits_are_resident_bits(reference: rigs.Outcome, temperament: Temperament, seed: int) -> None:
    """H4, in life: contexts join, finish and are cancelled at unequal lengths, copies run early, late or anyhow."""
    outcome = rigs.run(rigs.model(temperament, seed), rigs.CHURN)
    assert rigs.same(outcome, reference)
    assert outcome.answers == reference.answers
    assert {one.reason for one in outcome.finished.values()} == {"length", "cancelled"}


def test_a_small_slot_makes_contexts_wait_and_keeps_bits() -> None:
    """In life: --slot-gib holds two of three histories; the third waits for rows with a reason, nobody is refused."""
    rows = 2 * rigs.CONTEXT
    slot_gib = rows * 2 * 2 * 8 * 4 / 2**30
    scenario = rigs.together(30, 29, 28)
    waited: list[str] = []

    def look(local: LocalEngine) -> None:
        original = local.engine.scheduler.plan

        def plan(step: int, now: float):  # type: ignore[no-untyped-def]
            found = original(step, now)
            waited.extend(context.waits for context in local.engine.scheduler.waiting)
            return found

        local.engine.scheduler.plan = plan  # type: ignore[method-assign]

    outcome = rigs.run(rigs.model(), scenario, look, slot_gib=slot_gib)
    assert len(outcome.finished) == 3
    assert any("rows of a staging slot" in reason for reason in waited)


# -- controls: the gate must be able to fail ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, faults.stale_row, faults.swapped_rows, faults.wrong_layer])
def test_the_gate_turns_red(reference: rigs.Outcome, fault) -> None:  # type: ignore[no-untyped-def]
    """A stale row, two contexts' rows swapped, the wrong layer's slot: each changes bits; without a fault none do."""

    def prepare(local: LocalEngine) -> None:
        if fault is not None:
            assert isinstance(local.engine.route, StagedRoute)
            fault(local.engine.route)

    assert rigs.same(rigs.run(rigs.model(), rigs.CHURN, prepare), reference) == (fault is None)


@pytest.mark.parametrize(
    ("edges", "temperament"),
    [
        ({Edge.COPY_BEFORE_ATTENTION}, Temperament.LATE),
        ({Edge.ATTENTION_BEFORE_REUSE, Edge.WRITE_BACK_BEFORE_REUSE}, Temperament.EARLY),
        ({Edge.WRITE_BACK_BEFORE_REUSE}, Temperament.EARLY),
        ({Edge.ATTENTION_BEFORE_WRITE_BACK}, Temperament.EARLY),
        ({Edge.WRITE_BACK_BEFORE_NEXT_COPY}, Temperament.LATE),
    ],
    ids=["copy", "reuse", "write-back before reuse", "write-back", "next copy"],
)
def test_a_missing_edge_is_found(edges: set[Edge], temperament: Temperament) -> None:
    """Q1, in life: one wait forgotten. The run ends with the race named instead of with plausible text. (Attention
    before reuse is implied by write-back before reuse here, since write-back waits for attention.)"""
    layers = 1 if Edge.WRITE_BACK_BEFORE_NEXT_COPY in edges else 3
    loaded = rigs.model(temperament, num_hidden_layers=layers)

    def omit(local: LocalEngine) -> None:
        local.engine.transport._omit = frozenset(edges)

    with pytest.raises(RaceError):
        rigs.run(loaded, rigs.together(9, 5), omit)


# -- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, rigs.PAGE, rigs.PAGE + 1, 2 * rigs.PAGE - 1])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_lengths_at_the_edges_of_a_page(length: int, tokens: int) -> None:
    """In life: a prompt of one token, of exactly a page, of a page plus one; max_tokens 0 and 1."""
    loaded = rigs.model(Temperament.LATE)
    outcome = rigs.run(loaded, rigs.together(length, tokens=tokens))
    expected = rigs.expected(loaded, rigs.prompt(length), tokens) if tokens else []
    assert list(outcome.tokens[0]) == expected
    assert outcome.finished[0].reason == "length"


def test_a_stop_id_ends_the_answer_and_is_no_part_of_it() -> None:
    """In life: the model says it is done, at its first token or later; what was planned ahead is dropped."""
    loaded = rigs.model()
    whole = rigs.expected(loaded, rigs.prompt(6), 5)
    for place in (0, 2):
        first = whole.index(whole[place])
        outcome = rigs.run(rigs.model(), rigs.together(6, 9, stop_ids=(whole[place],)))
        assert list(outcome.tokens[0]) == whole[:first]
        assert outcome.finished[0].reason == "stop"


def test_a_stop_string_needs_a_tokenizer_and_says_so() -> None:
    """In life: random weights without a tokenizer get a request with stop strings: failed at once, with the reason."""
    outcome = rigs.run(rigs.model(), rigs.together(6, stop=("x",)))
    assert outcome.finished[0].reason == "failed"
    assert "tokenizer" in outcome.finished[0].error


def test_a_stop_string_cuts_the_answer_before_it() -> None:
    """In life: stop strings on decoded text; here each token is written as its number and a space."""

    def decode(ids):  # type: ignore[no-untyped-def]
        return "".join(f"{one} " for one in ids)

    whole = rigs.expected(rigs.model(), rigs.prompt(6), 5)
    loaded = replace(rigs.model(), decode=decode)
    outcome = rigs.run(loaded, rigs.together(6, stop=(f" {whole[3]} ",)))
    finished = outcome.finished[0]
    text = decode(finished.token_ids)[: finished.text_chars]
    assert finished.reason == "stop"
    assert text == decode(whole)[: decode(whole).index(f" {whole[3]} ")]


def test_a_request_that_never_fits_is_refused_with_its_numbers() -> None:
    """A7, in life: prompt + max_tokens beyond --context-tokens. The others run on."""
    scenario = rigs.Scenario(((40, Sampling(9)), (5, Sampling(2))), {0: (0, 1)})
    outcome = rigs.run(rigs.model(), scenario)
    assert outcome.finished[0].reason == "failed"
    assert "40 + max_tokens 9 = 49" in outcome.finished[0].error
    assert outcome.finished[1].reason == "length"


def test_its_figures_say_what_moved_and_what_is_held() -> None:
    """In life: the worker exports them; at rest nothing is held, and each step that landed has its time."""
    outcome = rigs.run(rigs.model(), rigs.together(5, 6))
    engine = outcome.local.engine
    figures = engine.figures()
    assert (figures.steps, figures.tokens) == (engine.steps, 10)
    assert figures.staged_bytes > figures.written_back_bytes > 0
    assert (figures.events_held, figures.leases_open, figures.contexts_waiting) == (0, 0, 0)
    assert len(engine.step_seconds) == engine.steps


def test_started_idle_it_waits_and_then_works() -> None:
    """In life: a worker with nothing to do; work comes later."""
    local = LocalEngine(rigs.model(), rigs.settings())
    assert not local.step()
    assert not local.step()
    local.submit([rigs.prompt(5)], [Sampling(2)])
    assert len(local.run()) == 1
    rigs.at_rest(local)
    assert local.close().proved


def test_a_seed_gives_the_same_answer_in_any_company() -> None:
    """In life: the same sampled request alone and among others."""
    sampling = Sampling(6, temperature=1.0, seed=11)
    alone = rigs.run(rigs.model(), rigs.Scenario(((7, sampling),), {0: (0,)}))
    company = ((7, sampling), (5, Sampling(6, temperature=1.0, seed=2)), (9, Sampling(4)))
    among = rigs.run(rigs.model(), rigs.Scenario(company, {0: (0, 1, 2)}))
    assert alone.tokens[0] == among.tokens[0]


def test_run_sleeps_on_the_ring_and_ends_when_told() -> None:
    """In life: the engine's own thread; work is published while it sleeps; stop ends it and all is given back."""
    loaded = rigs.model()
    local = LocalEngine(loaded, rigs.settings())
    stop, done = threading.Event(), threading.Event()
    local.engine._on_finished = lambda finished: done.set()
    thread = threading.Thread(target=local.engine.run, args=(stop,))
    thread.start()
    local.submit([rigs.prompt(5)], [Sampling(3)])
    assert done.wait(60)
    stop.set()
    local.producer.cancel([])
    thread.join(60)
    assert not thread.is_alive()
    assert local.engine.close().proved
    assert local.engine.tokens == 3
    assert loaded.module.config._attn_implementation == "sdpa"


def test_the_same_line_twice_at_once_is_a_bug() -> None:
    """Exactly one Finished a request: two open requests of one name could not be told apart."""
    local = LocalEngine(rigs.model(), rigs.settings())
    local.submit([rigs.prompt(5)], [Sampling(3)])
    local._numbers = iter([0])  # type: ignore[assignment]
    local.submit([rigs.prompt(5)], [Sampling(3)])
    with pytest.raises(InvariantError, match="came twice"):
        local.step()
    local.close()


def test_a_model_that_does_not_fit_names_the_setting() -> None:
    """A6, in life: too little host memory for what was asked."""
    with pytest.raises(RefusedError, match="--host-pool-gib"):
        LocalEngine(rigs.model(), rigs.settings(host_pool_gib=1e-6))


def test_watched_logits_are_one_row_a_sampled_token(reference: rigs.Outcome) -> None:
    """Logits are computed for the rows that need them alone."""
    for plan, logits in reference.steps:
        assert logits.shape[0] <= len(plan)
        assert logits.shape[1] == rigs.VOCABULARY
        assert logits.dtype == torch.float32


@pytest.mark.parametrize("before", [1, 4])
def test_a_cancelled_context_stops_within_two_steps(before: int) -> None:
    """A job is cancelled while its lines run, at their first step or later: no zombie computes on (cases 22); the other
    contexts of the step go on to their end."""
    local = LocalEngine(rigs.model(), rigs.settings())
    numbers = local.submit([[1, 2, 3], [4, 5, 6]], [Sampling(max_tokens=30), Sampling(max_tokens=30)])
    for _ in range(before):
        local.step()
    local.cancel(numbers[:1])
    steps = 0
    while numbers[0] not in local.finished:
        assert local.step(), "the engine has nothing to do and the cancelled context has no end"
        steps += 1
    assert steps <= 2
    assert local.finished[numbers[0]].reason == "cancelled"
    local.run()
    assert (local.finished[numbers[1]].reason, len(local.finished[numbers[1]].token_ids)) == ("length", 30)
    local.close()
