"""Drafts through the engine: the text stays what it was, in fewer passes; rows of refuted drafts are nobody's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from common.config import EngineSettings
from worker.engine import drafts as drafts_rules
from worker.engine.drafts import Drafts
from worker.engine.headroom import Headroom
from worker.engine.headroom_memory import HeadroomMemory
from worker.engine.local import LocalEngine
from worker.engine.model import from_config, shape_config
from worker.engine.retention import Retention
from worker.engine.runner import open_device
from worker.structures import Sampling, SharedPrefix

PAGE = 8
SETTINGS = EngineSettings("tiny", concurrency=3, page_tokens=PAGE, chunk_tokens=24, context_tokens=120)


@pytest.fixture(scope="module")
def loaded():  # type: ignore[no-untyped-def]
    return from_config(shape_config("tiny", 400), open_device("cpu", 1), torch.float32, 400)


def _prompts() -> list[list[int]]:
    """Texts that repeat themselves, so that something is found: and a model of random weights soon repeats itself."""
    chance = random.Random(3)
    return [[chance.randrange(1, 9) for _ in range(length)] for length in (5, 30, 41, 24)]


def _run(loaded, settings, samplings, shared=None, wrong=0.0, chunks=0):  # type: ignore[no-untyped-def]
    local = LocalEngine(replace(loaded, device=open_device("cpu", 1)), settings)
    if chunks:
        engine = local.engine
        chunk_bytes = 3 * PAGE * loaded.geometry.token_bytes
        memory = HeadroomMemory(engine.device, loaded.geometry, PAGE, loaded.dtype, chunk_bytes, most=chunks)
        memory.fill()
        engine.use(memory)
    if wrong:
        _guess(local.engine.drafts, wrong)
    numbers = local.submit(_prompts(), samplings, shared)
    while local.step():
        local.engine.check()
    texts = [tuple(local.finished[number].token_ids) for number in numbers]
    reasons = [local.finished[number].reason for number in numbers]
    counts, steps = local.engine.drafts and local.engine.drafts.counts, local.engine.steps
    assert local.close().proved
    return texts, reasons, counts, steps, [local.finished[number].notes for number in numbers]


def _guess(drafts: Drafts, wrong: float) -> None:
    """Proposals that are mostly wrong: every pass writes rows that nobody may read later."""
    chance, propose = random.Random(5), drafts.propose

    def guessed(number: int, room: int) -> tuple[int, ...]:
        last = propose(number, 0)[0]
        return (last, *(chance.randrange(257) if chance.random() < wrong else last for _ in range(min(4, room))))

    drafts.propose = guessed  # type: ignore[method-assign]


GREEDY = [Sampling(max_tokens=count) for count in (40, 33, 50, 1)]
DRAWN = [Sampling(max_tokens=30, temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]


@pytest.mark.parametrize("samplings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("retain", "chunks"), [("on", 0), ("off", 0), ("off", 6)])
@pytest.mark.parametrize("wrong", [0.0, 0.9])
def test_the_text_is_the_same_with_drafts(loaded, samplings, retain, chunks, wrong) -> None:  # type: ignore[no-untyped-def]
    """fp32 on the CPU: streamed, retained and in headroom, greedy and drawn with a seed, drafts right and wrong."""
    settings = replace(SETTINGS, retain=retain)
    plain, reasons, _, steps, _ = _run(loaded, settings, samplings)
    drafted = _run(loaded, replace(settings, draft_tokens=4), samplings, wrong=wrong, chunks=chunks)
    assert drafted[0] == plain
    for text, notes in zip(plain, drafted[4], strict=True):
        assert (f"drafts: {len(text) - 1} tokens in " in notes) == (len(text) > 1), "explain tells tokens a pass"
    assert drafted[1] == reasons
    stages, proposed, taken = drafted[2]
    assert stages + taken == sum(map(len, plain)) - len(plain), "each pass gives one token and the drafts that held"
    assert proposed > 0
    if not wrong and samplings is GREEDY:
        assert taken > stages / 2, "a text that repeats itself is found again"
        assert drafted[3] < steps


def test_the_text_is_the_same_on_the_reference_route(loaded) -> None:  # type: ignore[no-untyped-def]
    """--residency full drafts alike."""
    settings = replace(SETTINGS, draft_tokens=4)
    assert _run(loaded, settings, GREEDY)[:3] == _run(loaded, replace(settings, residency="full"), GREEDY)[:3]


def test_requests_that_share_a_history_draft_too(loaded) -> None:  # type: ignore[no-untyped-def]
    """Two with a common beginning: its rows are shared, the text looked up is the whole of each."""
    settings = replace(SETTINGS, draft_tokens=4)
    prompts = _prompts()
    shared = [None, SharedPrefix("k", PAGE), None, None]
    assert _run(loaded, settings, GREEDY, shared)[0] == _run(loaded, replace(settings, draft_tokens=0), GREEDY)[0]
    assert len(prompts[1]) > PAGE


@pytest.mark.parametrize(("retain", "chunks", "books"), [("on", 0, Retention), ("off", 20, Headroom)])
def test_control_keeping_refuted_rows_changes_the_text(
    loaded, monkeypatch: pytest.MonkeyPatch, retain: str, chunks: int, books: type
) -> None:  # type: ignore[no-untyped-def]
    """Without ``confirm`` a page is kept, on the device or in headroom, with rows of refuted drafts in it."""
    settings = replace(
        SETTINGS, draft_tokens=4, target_pages=3, burst_pages=1, context_tokens=400, retain=retain, concurrency=2
    )
    samplings = [Sampling(max_tokens=90)] * 4
    plain = _run(loaded, replace(settings, draft_tokens=0), samplings)[0]
    assert _run(loaded, settings, samplings, wrong=0.9, chunks=chunks)[0] == plain
    monkeypatch.setattr(books, "confirm", lambda self, *given: None)
    assert _run(loaded, settings, samplings, wrong=0.9, chunks=chunks)[0] != plain


def test_control_counting_a_refuted_draft_changes_the_text(loaded, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The rule that the gate above stands on."""
    plain = _run(loaded, SETTINGS, GREEDY)[0]
    monkeypatch.setattr(drafts_rules, "confirmed", lambda drafts, sampled: len(drafts))
    assert _run(loaded, replace(SETTINGS, draft_tokens=4), GREEDY, wrong=0.9)[0] != plain


def test_a_prompt_that_nobody_kept_is_a_bug_by_name() -> None:
    """Whoever prepares requests must keep the text where drafts are on."""
    with pytest.raises(drafts_rules.InvariantError, match="not kept"):
        Drafts(4).begin(7, None)
