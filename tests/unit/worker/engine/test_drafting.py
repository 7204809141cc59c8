"""Drafts through the engine: the text stays what it was, in fewer passes; rows of refuted drafts are nobody's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

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


class Ran(NamedTuple):
    """What a run gave: texts and why they ended; stages, drafts proposed and taken; bytes of history by where from."""

    texts: list[tuple[int, ...]]
    reasons: list[str]
    counts: tuple[int, int, int] | None
    steps: int
    headroom_bytes: int
    spared_bytes: int
    notes: list[str]


def _run(loaded, settings, samplings, shared=None, wrong=0.0, chunks=0, prompts=None):  # type: ignore[no-untyped-def]
    local = LocalEngine(replace(loaded, device=open_device("cpu", 1)), settings)
    if chunks:
        engine = local.engine
        chunk_bytes = 3 * PAGE * loaded.geometry.token_bytes
        memory = HeadroomMemory(engine.device, loaded.geometry, PAGE, loaded.dtype, chunk_bytes, most=chunks)
        memory.fill()
        engine.use(memory)
    if wrong:
        _guess(local.engine.drafts, wrong)
    numbers = local.submit(prompts or _prompts(), samplings, shared)
    while local.step():
        local.engine.check()
    texts = [tuple(local.finished[number].token_ids) for number in numbers]
    reasons = [local.finished[number].reason for number in numbers]
    engine = local.engine
    counts = engine.drafts and engine.drafts.counts
    assert local.close().proved
    notes = [local.finished[number].notes for number in numbers]
    return Ran(texts, reasons, counts, engine.steps, engine.headroom_bytes, engine.spared_bytes, notes)


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
    plain, reasons, _, steps, *_ = _run(loaded, settings, samplings)
    drafted = _run(loaded, replace(settings, draft_tokens=4), samplings, wrong=wrong, chunks=chunks)
    assert drafted.texts == plain
    for text, notes in zip(plain, drafted.notes, strict=True):
        assert (f"drafts: {len(text) - 1} tokens in " in notes) == (len(text) > 1), "explain tells tokens a pass"
    assert drafted.reasons == reasons
    assert (drafted.headroom_bytes > 0) == bool(chunks)
    stages, proposed, taken = drafted.counts
    assert stages + taken == sum(map(len, plain)) - len(plain), "each pass gives one token and the drafts that held"
    assert proposed > 0
    if not wrong and samplings is GREEDY:
        assert taken > stages / 2, "a text that repeats itself is found again"
        assert drafted.steps < steps


def test_the_text_is_the_same_on_the_reference_route(loaded) -> None:  # type: ignore[no-untyped-def]
    """--residency full drafts alike."""
    settings = replace(SETTINGS, draft_tokens=4)
    assert _run(loaded, settings, GREEDY)[:3] == _run(loaded, replace(settings, residency="full"), GREEDY)[:3]


def test_requests_that_share_a_history_draft_too(loaded) -> None:  # type: ignore[no-untyped-def]
    """Three of four with a common beginning: its rows are shared and staged once, drafts are found in it, and the texts
    are those of each alone without drafts. The control: who is not told shares nothing."""
    settings = replace(SETTINGS, draft_tokens=4)
    beginning = _prompts()[3][: 2 * PAGE]
    prompts = [beginning + one if at else one for at, one in enumerate(_prompts())]
    shared = [None, *[SharedPrefix("k", len(beginning))] * 3]
    plain = _run(loaded, replace(settings, draft_tokens=0), GREEDY, prompts=prompts)
    both = _run(loaded, settings, GREEDY, shared, prompts=prompts)
    assert both.texts == plain.texts
    assert both.spared_bytes > 0
    assert both.counts[2] > 0, "drafts that held, with rows behind a shared history"
    assert plain.spared_bytes == 0


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
