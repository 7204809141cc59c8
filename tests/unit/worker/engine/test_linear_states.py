"""Hybrids: each context has states of its own in the linear-attention layers, from none at its beginning to its end.

The text is compared with generate of each request alone; whatever mixes, keeps or loses a state must change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.errors import InvariantError, RefusedError
from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_sharing import OPTIONS, SHARING, TOGETHER
from tests.unit.worker.engine.test_turns import FOUR, InTurn, taking_turns
from worker.engine import linear_states
from worker.engine.cells import table
from worker.engine.contexts import StepPlan
from worker.engine.fit import fit
from worker.engine.geometry import LinearLayers
from worker.engine.lanes import Temperament
from worker.engine.linear_states import (
    KEYWORD,
    Chunk,
    LinearStates,
    StepRows,
    _Cache,
    _cache_name,
    _LayerStates,
    chunks_of,
)
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel, from_config
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

LINEAR = (0, 2, 4)
SPOILED = Callable[[tuple[Chunk, ...]], tuple[Chunk, ...]]


def hybrid(temperament: Temperament = Temperament.EAGER, seed: int = 0, **changes: Any) -> LoadedModel:
    return rigs.model(temperament, seed, "qwen3_5_text", **(rigs.HYBRID | changes))


def right(outcome: rigs.Outcome, scenario: rigs.Scenario) -> bool:
    """Whether every whole greedy answer is what generate writes for its prompt alone."""
    loaded = hybrid()
    answers = [
        list(finished.token_ids)
        == rigs.expected(loaded, scenario.prompt(number, rigs.VOCABULARY), scenario.prompts[number][1].max_tokens)
        for number, finished in outcome.finished.items()
        if finished.reason == "length" and scenario.prompts[number][1].temperature == 0
    ]
    assert answers
    return all(answers)


def test_only_dense_layers_are_staged() -> None:
    """In life: a history is that of two layers of five; attention counts them 0 and 1."""
    geometry = hybrid().geometry
    assert (geometry.layers, geometry.dense) == (2, (1, 3))
    assert geometry.linear == LinearLayers(LINEAR, 2 * 2 * 8 + 4 * 8, 4, 4, 8, 8)
    local = LocalEngine(hybrid(), rigs.settings())
    assert local.engine.host is not None
    assert len(local.engine.host.layers) == 2
    local.close()


@pytest.mark.parametrize("temperament", list(Temperament))
@pytest.mark.parametrize(("scenario", "options"), [(rigs.CHURN, {}), (SHARING, OPTIONS)], ids=["churn", "shared"])
def test_staged_bits_are_resident_bits_of_a_hybrid(
    temperament: Temperament, scenario: rigs.Scenario, options: dict[str, Any]
) -> None:
    """H4, in life: contexts join, finish and are cancelled, alone and on documents; copies run early or late."""
    reference = rigs.run(hybrid(), scenario, residency="full", **options)
    outcome = rigs.run(hybrid(temperament, 3), scenario, **options)
    assert rigs.same(outcome, reference)
    assert right(outcome, scenario)


def test_cells_of_a_hybrid_have_the_bits_of_the_reference() -> None:
    """H4 on every route: streamed, retained, in part, headroom and both, under churn and on shared histories."""
    base = rigs.settings(retain="on")
    rows = list(table(hybrid, base, companies=("8 mixed with churn", "8 on shared histories"), lengths=("long",)))
    assert len(rows) == 2
    assert all(row.repeats and all(cell.passed for cell in row.cells) for row in rows)


def test_half_precision_of_a_hybrid_is_staged_bit_for_bit() -> None:
    """H4 in the type that a GPU runs: convolution states are bfloat16, recurrent ones float32."""
    config = rigs.config("qwen3_next", **rigs.HYBRID, **rigs.EXPERTS)

    def loaded() -> LoadedModel:
        return from_config(config, VirtualDevice(Temperament.LATE), torch.bfloat16, rigs.CONTEXT)

    staged = rigs.run(loaded(), rigs.CHURN)
    assert staged.local.engine.states.conv.dtype is torch.bfloat16
    assert staged.local.engine.states.recurrent.dtype is torch.float32
    assert rigs.same(staged, rigs.run(loaded(), rigs.CHURN, residency="full"))


def test_two_requests_together_read_as_each_alone() -> None:
    """In life: the rows of two contexts lie side by side in every step, in chunks and decoding."""
    scenario = rigs.together(19, 11, tokens=8)
    assert right(rigs.run(hybrid(), scenario), scenario)


def test_a_parked_context_goes_on_where_it_was() -> None:
    """In life: histories do not fit together and contexts take turns; their states wait in their slots."""
    parked: set[int] = set()

    def look(local: LocalEngine) -> None:
        taking_turns(28, InTurn(4, 7))(local)
        watched, scheduler = local.engine._watch, local.engine.scheduler

        def watch(plan: StepPlan, logits: torch.Tensor) -> None:
            if not any(share.prompt for share in plan.shares):
                parked.update(context.number for context in scheduler.running if not context.in_flight)
            if watched is not None:
                watched(plan, logits)

        local.engine._watch = watch

    assert right(rigs.run(hybrid(), FOUR, look, retain="on", concurrency=4), FOUR)
    assert len(parked) >= 3


# -- controls: what mixes, keeps or loses a state must change the text -------------------------------------------


def never_begins(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Whoever had the slot before leaves its state."""
    return tuple(replace(chunk, begins=False) for chunk in chunks)


def always_begins(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The state is lost between two chunks of a prompt."""
    return tuple(replace(chunk, begins=True, source=-1) for chunk in chunks)


def begins_with_none(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Whoever starts behind a shared history has none of its state."""
    return tuple(replace(chunk, source=-1) for chunk in chunks)


def changes_places(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Two contexts' states are swapped."""
    if len(chunks) < 2:
        return chunks
    slots = [chunk.slot for chunk in chunks]
    return tuple(replace(chunk, slot=slot) for chunk, slot in zip(chunks, reversed(slots), strict=True))


@pytest.mark.parametrize(
    ("spoil", "scenario", "options"),
    [
        (never_begins, rigs.CHURN, {}),
        (always_begins, rigs.together(20, 3), {}),
        (begins_with_none, TOGETHER, OPTIONS),
        (changes_places, rigs.together(6, 2), {}),
    ],
)
@pytest.mark.parametrize("spoiled", [True, False])
def test_a_state_that_is_not_the_contexts_own_changes_the_text(
    monkeypatch: pytest.MonkeyPatch, spoil: SPOILED, scenario: rigs.Scenario, options: dict[str, Any], spoiled: bool
) -> None:
    """A slot used before, a chunk forgotten, a document unread, two contexts swapped: the text is another one."""
    if spoiled:
        monkeypatch.setattr(linear_states, "chunks_of", lambda plan: spoil(chunks_of(plan)))
    assert right(rigs.run(hybrid(), scenario, **options), scenario) == (not spoiled)


@pytest.mark.parametrize("spoiled", [True, False])
def test_rows_that_decode_under_each_others_states_change_the_text(
    monkeypatch: pytest.MonkeyPatch, spoiled: bool
) -> None:
    """The same of the rows that decode together in one call."""
    original = LinearStates.keywords

    def keywords(self: LinearStates, *step: Any) -> dict[str, StepRows]:
        rows = original(self, *step)[KEYWORD]
        return {KEYWORD: replace(rows, decode_slots=rows.decode_slots.flip(0))}

    if spoiled:
        monkeypatch.setattr(LinearStates, "keywords", keywords)
    scenario = rigs.together(6, 2)
    assert right(rigs.run(hybrid(), scenario), scenario) == (not spoiled)


# -- what is refused, and what fits ------------------------------------------------------------------------------


def test_drafts_are_refused_with_a_hybrid() -> None:
    """In life: --draft-tokens with Qwen3.5: a state cannot be taken back behind a token that was not taken."""
    words = "--draft-tokens 3: model type qwen3_5_text has linear-attention layers.*set --draft-tokens 0"
    with pytest.raises(RefusedError, match=words):
        fit(hybrid().geometry, rigs.settings(draft_tokens=3))
    assert fit(hybrid().geometry, rigs.settings()).concurrency == 3


def test_states_are_counted_in_the_device_pages() -> None:
    """A5, in life: what all segments' states take is printed, and is what is allocated."""
    local = LocalEngine(hybrid(), rigs.settings(shared_histories=2))
    plan, states = local.engine.fit, local.engine.states
    geometry = local.engine.loaded.geometry
    assert geometry.state_bytes == 3 * (4 * 8 * 8 * 4 + 64 * 4 * 4)
    assert plan.state_bytes == 5 * geometry.state_bytes == states.conv.nbytes + states.recurrent.nbytes
    assert any(f"linear-attention states = 5 segments x {geometry.state_bytes} B of 3 layers" in line
               for line in plan.formula)  # fmt: skip
    assert local.engine.pool.nbytes + plan.state_bytes <= 2**30
    local.close()


@pytest.mark.parametrize("residency", ["staged", "full"])
def test_states_that_do_not_fit_are_refused_or_shrink(residency: str) -> None:
    """A6, in life: states of a hundred contexts beside short histories."""
    geometry = hybrid().geometry
    assert geometry.linear is not None
    heavy = replace(geometry, linear=replace(geometry.linear, heads=2**18 // (3 * 8 * 8 * 4) * 60))
    wanted: dict[str, Any] = {"residency": residency, "concurrency": 100, "shared_histories": 1}
    with pytest.raises(RefusedError, match=r"with states of 0\.\d+ GiB beside.*set --device-pages-gib to 2 or more"):
        fit(heavy, rigs.settings(**wanted))
    less = fit(heavy, rigs.settings(fit="shrink", **wanted))
    assert 1 < less.concurrency < 100
    assert less.state_bytes + less.arena_rows * geometry.layer_token_bytes <= 2**30
    more = fit(heavy, rigs.settings(device_pages_gib=2, **wanted))
    assert more.concurrency == 100
    auto = fit(heavy, rigs.settings(**(wanted | {"concurrency": less.concurrency - 3, "shared_histories": -1})))
    assert 1 <= auto.longs < less.concurrency - 3
    assert auto.state_bytes + auto.arena_rows * geometry.layer_token_bytes <= 2**30


def test_the_layers_own_forward_is_restored() -> None:
    """In life: the same module is used by others after the engine ended."""
    loaded = hybrid()
    parts = [loaded.module.model.layers[layer].linear_attn for layer in LINEAR]
    local = LocalEngine(loaded, rigs.settings())
    assert all("forward" in vars(part) for part in parts)
    assert local.close().proved
    assert not any("forward" in vars(part) for part in parts)
    assert not hasattr(loaded.module.model.layers[1].self_attn, "haulier_dense_layer")


def states_of(loaded: LoadedModel, linear: LinearLayers) -> LinearStates:
    return LinearStates(loaded.device, linear, 2, loaded.dtype)


def test_layers_that_are_not_where_the_config_said_are_refused() -> None:
    """In life: a config that lies about its layers, or about the shape of what they keep."""
    loaded = hybrid()
    linear = loaded.geometry.linear
    assert linear is not None
    lies = [
        (replace(linear, layers=(0, 1, 2)), r"linear attention in layers \[0, 2\].*promises \[0, 1, 2\]"),
        (replace(linear, width=3), "its config promises"),
        (replace(linear, channels=32), "its config promises"),
        (replace(linear, heads=8), "its config promises"),
        (replace(linear, key_dim=4, value_dim=16), "its config promises"),
    ]
    for lie, words in lies:
        with pytest.raises(RefusedError, match=words), states_of(loaded, lie).installed(loaded.module):
            pytest.fail("it was installed")
    with states_of(loaded, linear).installed(loaded.module):
        assert "forward" in vars(loaded.module.model.layers[0].linear_attn)


def test_states_of_another_shape_or_type_are_refused() -> None:
    """In life: a release of transformers that keeps something else."""
    held = _LayerStates(torch.zeros(1, 6, 4), torch.zeros(1, 2, 3, 3))
    cache = _Cache(0, held)
    cache.update_recurrent_state(torch.ones(1, 2, 3, 3), 0)
    assert bool((held.recurrent == 1).all())
    for wrong in (torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 3, dtype=torch.bfloat16)):
        with pytest.raises(RefusedError, match="recurrent state"):
            cache.update_recurrent_state(wrong, 0)
    with pytest.raises(RefusedError, match="convolution state"):
        cache.update_conv_state(torch.ones(1, 6, 2, dtype=torch.float64), 0)


@pytest.mark.parametrize("name", ["cache", "cache_params"])
def test_releases_name_the_cache_as_they_like(name: str) -> None:
    """In life: transformers 5.17 and 5.24: another name, and other questions to it."""

    def older(hidden_states: torch.Tensor, cache_params: Any = None, **keywords: Any) -> torch.Tensor:
        assert cache_params.has_previous_state(2, state_idx=0)
        assert cache_params.has_previous_state(2)
        layer = cache_params.layers[2]
        assert not layer.record_past
        layer.conv_states[0].add_(1)
        cache_params.update_recurrent_state(layer.recurrent_states[0] + 1, 2)
        return hidden_states

    def newer(hidden_states: torch.Tensor, cache: Any = None, **keywords: Any) -> torch.Tensor:
        assert not cache.is_recording_past(2)
        cache.get_conv_state(2, state_idx=0).add_(1)
        cache.update_recurrent_state(cache.get_recurrent_state(2, state_idx=0) + 1, 2)
        return hidden_states

    forward = newer if name == "cache" else older
    assert _cache_name(forward) == name
    held = _LayerStates(torch.zeros(1, 6, 4), torch.zeros(1, 2, 3, 3))
    forward(torch.zeros(1), **{name: _Cache(2, held)})
    assert bool((held.conv == 1).all() and (held.recurrent == 1).all())
    with pytest.raises(RefusedError, match="a way that is new"):
        _cache_name(lambda hidden_states: hidden_states)


def test_a_cache_or_mask_of_others_is_a_bug() -> None:
    """States are ours: another's would be ignored otherwise."""
    loaded = hybrid()
    assert loaded.geometry.linear is not None
    states = states_of(loaded, loaded.geometry.linear)
    rows = {"hidden_states": torch.zeros(1, 3, 32)}
    with states.installed(loaded.module), torch.no_grad():
        layer = loaded.module.model.layers[0].linear_attn
        for wrong in ({"cache": object()}, {"cache_params": object()}, {"attention_mask": torch.ones(1, 3)}):
            with pytest.raises(InvariantError):
                layer(**rows, **states.probe(3), **wrong)
        with pytest.raises(InvariantError, match="without our keyword"):
            layer(**rows)
        assert layer(**rows, **states.probe(3)).shape == (1, 3, 32)


def test_sampling_of_a_hybrid_is_the_same_on_both_routes() -> None:
    """In life: answers drawn by seed."""
    scenario = rigs.Scenario(((9, Sampling(6, temperature=0.9, seed=4)), (5, Sampling(6))), {0: (0,), 1: (1,)})
    staged = rigs.run(hybrid(Temperament.LATE), scenario)
    assert staged.tokens == rigs.run(hybrid(), scenario, residency="full").tokens
