"""The engine on a GPU: staged bits are resident bits, the link's floor is nearly reached, nothing synchronises."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers

from common.config import EngineSettings
from tests.unit.worker.engine.test_joined import mixed, whole
from worker.engine.admission import PagePool
from worker.engine.bench import BenchSettings, bench, bit_table
from worker.engine.bench_series import series
from worker.engine.headroom import Cause
from worker.engine.headroom_memory import HeadroomMemory
from worker.engine.joined import attend_joined
from worker.engine.kernels import Spans
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel, from_config
from worker.engine.retention import Retention
from worker.engine.runner import open_device
from worker.structures import Sampling, SharedPrefix

pytestmark = pytest.mark.gpu
CONTEXT, PAGE = 1024, 64
WHOLE_PAGES, PART_PAGES = 4 * CONTEXT // PAGE, 12
"""Every history in place; and so few that pages are taken, lost and materialised."""
CHUNK_PAGES, CHUNKS, REVOKED_AT = 4, 6, {7: 1, 12: 2, 20: 1}
"""Headroom, and after which turn how many chunks are given back."""
LENGTHS = (1, 63, 64, 65, 300, 511, 700, 129)


def model(head_dim: int) -> LoadedModel:
    """Four layers, eight query heads on two key heads, bf16; the same weights each time."""
    config = transformers.AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=1024,
        vocab_size=4096,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
    )
    return from_config(config, open_device("cuda:0"), torch.bfloat16, CONTEXT)


def run(
    head_dim: int, residency: str, *, retained: int = 0, headroom: int = 0, strict: bool = False, shared: int = 0
) -> tuple[list[Any], dict[int, Any]]:
    """Eight mixed requests with churn over four segments; every step's schedule and logits, and what finished.
    ``retained`` pages keep history on the device, and ``headroom`` chunks beside them, of which some are given back
    while they are read; 0 keeps none. Prompts longer than ``shared`` tokens begin with the same so many."""
    steps: list[Any] = []

    def watch(plan: Any, logits: torch.Tensor) -> None:
        steps.append((tuple((s.context.number, s.start, s.rows) for s in plan.shares), logits.clone()))

    settings = EngineSettings(
        "random",
        device="cuda:0",
        host_pool_gib=1.0,
        concurrency=4,
        context_tokens=CONTEXT,
        page_tokens=PAGE,
        chunk_tokens=256,
        residency=residency,
        retain="on" if retained else "off",
    )
    local = LocalEngine(model(head_dim), settings, watch=watch)
    if retained:
        local.engine.scheduler.kept.retention = Retention(PagePool(retained), PAGE)
    if headroom:
        engine = local.engine
        geometry, dtype = engine.loaded.geometry, engine.loaded.dtype
        chunk_bytes = CHUNK_PAGES * PAGE * geometry.token_bytes
        memory = HeadroomMemory(engine.device, geometry, PAGE, dtype, chunk_bytes, most=headroom)
        memory.fill()
        engine.use(memory)
    local.engine.scheduler.turns = None
    chance = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 4096, (length,), generator=chance).tolist() for length in LENGTHS]
    samplings = [Sampling(12 + 3 * number, temperature=0.7 * (number % 2), seed=number) for number in range(8)]
    prefixes = [SharedPrefix("document", shared) if shared and len(one) > shared else None for one in prompts]
    for one, prefix in zip(prompts, prefixes, strict=True):
        if prefix is not None:
            one[:shared] = prompts[-2][:shared]
    local.submit(prompts, samplings, prefixes)
    turn = 0
    if strict:
        torch.cuda.set_sync_debug_mode("error")
    while local.step():
        turn += 1
        if turn == 9:
            local.cancel([4])
        if headroom and turn in REVOKED_AT:
            local.engine.headroom.revoke(REVOKED_AT[turn])
    torch.cuda.set_sync_debug_mode("default")
    local.engine.check()
    if headroom:
        moved = local.engine.headroom.books.moved
        assert local.engine.headroom_bytes > 0
        assert moved[Cause.REVOKED] > 0
        assert moved[Cause.CLOSED] == sum(REVOKED_AT.values()) * CHUNK_PAGES
    assert (local.engine.spared_bytes > 0) == bool(shared)
    assert local.close().proved
    return steps, {number: one._replace(notes="") for number, one in local.finished.items()}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_staged_bits_are_resident_bits_in_bf16(head_dim: int) -> None:
    """H4, in life: contexts join, finish and are cancelled. The first control: resident against resident."""
    resident, finished = run(head_dim, "full")
    for residency, retained in (("full", 0), ("staged", 0), ("staged", WHOLE_PAGES), ("staged", PART_PAGES)):
        steps, finished_ = run(head_dim, residency, retained=retained)
        assert [plan for plan, _ in steps] == [plan for plan, _ in resident]
        wrong = [
            index
            for index, pair in enumerate(zip(steps, resident, strict=True))
            if not torch.equal(pair[0][1], pair[1][1])
        ]
        assert wrong == [], f"{residency}, {retained} pages retained: logits differ at steps {wrong}"
        assert finished_ == finished


@pytest.mark.parametrize("retained", [0, PART_PAGES])
def test_bits_stay_while_headroom_is_given_back(retained: int) -> None:
    """H2, in life: alone, then beside H1; chunks go back to the driver in the middle, the bits are the reference's."""
    resident, finished = run(128, "full")
    steps, finished_ = run(128, "staged", retained=retained, headroom=CHUNKS)
    assert [plan for plan, _ in steps] == [plan for plan, _ in resident]
    assert all(torch.equal(one[1], other[1]) for one, other in zip(steps, resident, strict=True))
    assert finished_ == finished
    run(128, "staged", retained=retained, headroom=CHUNKS, strict=True)


def test_series_of_h1_and_h2() -> None:
    """H3, in life: ``haulier bench engine --series`` on a shape large enough for the link to rule the step."""
    asked = BenchSettings(
        "d16", contexts=2, length=16384, steps=6, device="cuda:0", fill="random", retained=0.25, headroom_gib="1"
    )
    rows = list(series(asked))
    print(json.dumps(rows))
    assert all(row["bitwise"] and row["resident_repeats"] for row in rows)
    assert [row["headroom_gb_step"] > 0 for row in rows] == [False, False, True, True]


def test_the_hot_path_never_synchronises() -> None:
    """Q1, in life: one implicit synchronisation a step costs the whole overlap; the framework is told to raise."""
    for retained in (0, WHOLE_PAGES, PART_PAGES):
        run(128, "staged", retained=retained)
        run(128, "staged", retained=retained, strict=True)


def test_the_bench_reaches_the_floor_with_equal_bits() -> None:
    """In life: ``haulier bench engine`` on a shape large enough for the link to rule the step."""
    found = bench(BenchSettings("d16", contexts=2, length=16384, steps=6, device="cuda:0", fill="random"))
    print(json.dumps(found))
    assert found["bitwise"] is True
    assert found["resident_repeats"] is True
    assert found["of_floor"] is not None


def test_the_table_of_bits_is_16_of_16_in_bf16() -> None:
    """H4, in life: ``haulier bench engine --cells --geometry d16``."""
    found = bit_table(BenchSettings("d16", device="cuda:0"))
    print(json.dumps({name: value for name, value in found.items() if name != "cells"}))
    assert found["passed"], [cell for cell in found["cells"] if not cell["passed"]]
    assert set(found["routes"].values()) == {16}


@pytest.mark.parametrize("retained", [0, WHOLE_PAGES + CONTEXT // PAGE])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_shared_histories_have_the_reference_s_bits_and_never_synchronise(head_dim: int, retained: int) -> None:
    """H5 and H4, in life: four of eight requests begin with the same 128 tokens; the first control first."""
    resident, finished = run(head_dim, "full", shared=128)
    for residency, pages in (("full", 0), ("staged", retained)):
        steps, finished_ = run(head_dim, residency, retained=pages, strict=True, shared=128)
        assert [plan for plan, _ in steps] == [plan for plan, _ in resident]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(steps, resident, strict=True))
        assert finished_ == finished


def test_joined_calls_are_attention_on_a_gpu() -> None:
    """H5: flash attention's own log-sum-exp, in bfloat16, against plain float64 over each whole history."""
    query, key, value, own, shared, first = mixed(torch.bfloat16)
    there = [tensor.cuda() for tensor in (query, key, value)]
    spans = [_on_device(one) for one in (own, shared)]
    out = attend_joined(*there, spans[0], spans[1], first, 0.3)
    torch.testing.assert_close(out.cpu().double(), whole(query, key, value, own, shared), atol=0.03, rtol=0.03)


def _on_device(spans: Spans) -> Spans:
    queries, lengths = list(spans.host_query_starts), list(spans.host_lengths)
    starts = torch.tensor(list(spans.host_history_starts), dtype=torch.int32).cuda()
    longest = max(end - first for first, end in pairwise(queries))
    query_starts, counted = (torch.tensor(one, dtype=torch.int32).cuda() for one in (queries, lengths))
    return Spans((), (), (), query_starts, starts, counted, longest, max(lengths))
