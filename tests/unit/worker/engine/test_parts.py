"""How a step that prefills is cut: which rows are blocks, what other calls have, where chunks end; and that no answer
changes by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from common.messages import LineRef
from tests.unit.worker.engine import rigs
from worker.engine import parts
from worker.engine.addresses import LayerAddress
from worker.engine.calls import attend_layer
from worker.engine.contexts import Context, Joined, Share, StepPlan
from worker.engine.device import RaceError
from worker.engine.kernels import Spans, attend
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.page_leases import HostPage
from worker.engine.parts import Block, Parts, chunk_rows, chunk_step, parts_of
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge
from worker.structures import Request, Sampling

LONG = rigs.Scenario(
    prompts=((31, Sampling(6)), (8, Sampling(9)), (40, Sampling(5)), (23, Sampling(7)), (5, Sampling(12))),
    arrive={0: (0, 1), 2: (2,), 3: (3, 4)},
    cancel={9: (3,)},
)
"""Prompts of several chunks beside contexts that decode."""


def share(number: int, start: int, rows: int, *, prompt: bool) -> Share:
    """A share of a context of its own."""
    request = Request(LineRef("j", number, 1), "u", "m", 99_999, Sampling(5))
    return Share(Context(number, request, 0, 0, HostPage(number, 0)), start, rows, prompt, -1 if prompt else 1)


def test_a_step_is_cut_in_decodes_blocks_and_the_rest_of_prompts() -> None:
    """In life: two contexts decode, a document is half computed, a short prompt begins."""
    plan = StepPlan(
        3,
        (
            share(0, 500, 1, prompt=False),
            share(1, 70, 1, prompt=False),
            share(2, 4096, 3000, prompt=True),
            share(3, 0, 20, prompt=True),
            share(4, 0, 2048, prompt=True),
        ),
    )
    cut, arrays = parts_of(plan, blocks=True)
    assert cut == Parts(2, 2, (Block(2, 2, 2048, 4096), Block(4, 3022, 2048, 0)), 952, 7096)
    assert arrays["prompt_share"].tolist() == [2, 2, 3, 4]
    assert arrays["prompt_query_starts"].tolist() == [0, 2048, 3000, 3020, 5068]
    assert arrays["prompt_lengths"].tolist() == [0, 7096, 20, 0]
    whole, arrays = parts_of(plan, blocks=False)
    assert whole == Parts(2, 2, (), 3000, 7096)
    assert arrays["prompt_lengths"].tolist() == [7096, 20, 2048]


def test_one_call_has_a_step_that_only_decodes_or_shares() -> None:
    """In life: most steps; and H5 has calls of its own."""
    decode, prompt = share(0, 500, 1, prompt=False), share(1, 0, 4096, prompt=True)
    assert parts_of(StepPlan(3, (decode,)), blocks=True) == (None, {})
    history = Context(9, prompt.context.request, 0, 0, HostPage(9, 0))
    assert parts_of(StepPlan(3, (decode, prompt), joined=(Joined(history, 1, 1),)), blocks=True) == (None, {})
    with pytest.raises(InvariantError):
        parts_of(StepPlan(3, (prompt, decode)), blocks=True)


@given(st.integers(0, 10_000), st.integers(1, 9000), st.integers(1, 20_000), st.booleans())
def test_chunks_end_where_blocks_do(start: int, rows: int, left: int, some: bool) -> None:
    """In life: whatever was left over by decodes; a prompt's end is where it is."""
    taken = chunk_rows(start, rows, left, 1024, some=some)
    assert 0 <= taken <= min(rows, left)
    assert taken or not some
    assert taken == left or (start + taken) % 1024 == 0 or start // 1024 == (start + rows) // 1024
    assert chunk_rows(start, rows, left, 0, some=some) == min(rows, left)


def test_chunks_end_anywhere_where_there_are_no_blocks() -> None:
    """In life: a CPU, and chunks too short for blocks."""
    assert (chunk_step(8192, blocks=True), chunk_step(1024, blocks=True), chunk_step(8192, blocks=False)) == (
        1024,
        0,
        0,
    )


@pytest.mark.parametrize("known", [0, 3, 64])
def test_a_block_s_attention_is_attention(known: int) -> None:
    """Two calls joined against one, in float32."""
    chance = torch.Generator().manual_seed(1)
    query = torch.randn((40, 4, 8), generator=chance)
    key, value = (torch.randn((200, 2, 8), generator=chance) for _ in range(2))
    one = attend(query, key, value, Spans([0, 40], [7], [known + 40]), 0.3)
    rest = Spans([0, 32, 40], [7, 7], [0, known + 40])
    where = LayerAddress(0, 0, torch.empty(0), None, prompts=rest, blocks=((0, 32, 7, known),))
    assert torch.allclose(attend_layer(query, key, value, where, 0.3), one, atol=1e-6)
    wrong = LayerAddress(0, 0, torch.empty(0), None, prompts=rest, blocks=((0, 32, 8, known),))
    assert not torch.allclose(attend_layer(query, key, value, wrong, 0.3), one, atol=1e-3)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as short as these tests' prompts."""
    monkeypatch.setattr(parts, "BLOCK_STEP_TOKENS", 4)
    monkeypatch.setattr(parts, "BLOCK_MIN_TOKENS", 8)
    monkeypatch.setattr("worker.engine.step.WRITE_BACK_COPY_MIN_TOKENS", 6)
    monkeypatch.setattr("worker.engine.engine.long_attention", lambda *given: True)


def _blocks(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    seen: list[Block] = []

    def noting(plan: StepPlan, blocks: bool) -> Any:
        cut, arrays = parts_of(plan, blocks)
        seen.extend(() if cut is None else cut.blocks)
        return cut, arrays

    monkeypatch.setattr("worker.engine.step.parts_of", noting)
    return seen


@pytest.mark.parametrize("retain", ["on", "off"])
@pytest.mark.parametrize("temperament", list(Temperament))
def test_both_routes_have_equal_bits_and_transformers_text(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None, retain: str, temperament: Temperament
) -> None:
    """H4, in life: long prompts come in chunks beside contexts that decode; their rows go back as copies."""
    seen = _blocks(monkeypatch)
    reference = rigs.run(rigs.model(), LONG, residency="full", chunk_tokens=16)
    assert {block.known for block in seen} > {0, 12}
    loaded = rigs.model(temperament)
    outcome = rigs.run(loaded, LONG, chunk_tokens=16, retain=retain)
    assert rigs.same(outcome, reference)
    for number, (length, sampling) in enumerate(LONG.prompts):
        if outcome.finished[number].reason == "length":
            wanted = rigs.expected(loaded, rigs.prompt(length, number), sampling.max_tokens)
            assert list(outcome.tokens[number]) == wanted


def test_prompts_that_share_a_history_come_in_blocks_too(monkeypatch: pytest.MonkeyPatch, short_blocks: None) -> None:
    """H5, in life: the shared document is the longest prompt of all."""
    seen = _blocks(monkeypatch)
    shared = tuple((0, 24) for _ in range(3))
    script = rigs.Scenario(((30, Sampling(5)), (33, Sampling(4)), (28, Sampling(6))), {0: (0, 1, 2)}, shared=shared)
    reference = rigs.run(rigs.model(), script, residency="full", chunk_tokens=16)
    assert seen
    loaded = rigs.model()
    outcome = rigs.run(loaded, script, chunk_tokens=16)
    assert rigs.same(outcome, reference)
    for number in range(3):
        wanted = rigs.expected(loaded, script.prompt(number, rigs.VOCABULARY), script.prompts[number][1].max_tokens)
        assert list(outcome.tokens[number]) == wanted


def test_a_copy_that_does_not_wait_for_attention_is_found(short_blocks: None) -> None:
    """Q1, in life: one wait forgotten; the rows of a long chunk are copied before they are there."""

    def omit(local: LocalEngine) -> None:
        local.engine.transport._omit = frozenset({Edge.ATTENTION_BEFORE_WRITE_BACK})

    with pytest.raises(RaceError):
        rigs.run(rigs.model(Temperament.EARLY), rigs.together(40), omit, chunk_tokens=16)


def test_the_gate_turns_red_on_a_row_copied_elsewhere(short_blocks: None) -> None:
    """H4's control: one row of a long chunk lands one place too far on the host, and is staged from there."""

    def shift(local: LocalEngine) -> None:
        route = local.engine.route
        assert isinstance(route, StagedRoute)
        original = route._copied_back

        def copied_back(*given: Any) -> Any:
            return [(there.roll(1, 0), here, owner) for there, here, owner in original(*given)]

        route._copied_back = copied_back  # type: ignore[method-assign]

    reference = rigs.run(rigs.model(), LONG, residency="full", chunk_tokens=16)
    assert not rigs.same(rigs.run(rigs.model(), LONG, shift, chunk_tokens=16), reference)
