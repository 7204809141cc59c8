"""H5 in the whole engine: staged bits are resident bits over shared histories, the text is the unshared run's, a shared
history is prefilled and staged once, and it outlives whoever brought it. Controls turn red."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.worker.engine import faults, rigs
from tests.unit.worker.engine.test_engine_failures import device_of, fail_after
from worker.engine.contexts import StepPlan
from worker.engine.device import DeviceError, RaceError
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

LONG, SHORT = (0, 16), (1, 8)
"""Two documents: which, and its tokens."""
SHARING = rigs.Scenario(
    prompts=(
        (21, Sampling(7)),
        (17, Sampling(4)),
        (9, Sampling(5)),
        (20, Sampling(9)),
        (12, Sampling(8)),
        (16, Sampling(3, temperature=0.8, seed=3)),
        (25, Sampling(6)),
        (10, Sampling(20)),
    ),
    arrive={0: (0, 1), 2: (2, 3, 4), 5: (5,), 9: (6, 7)},
    cancel={4: (0,), 7: (4,), 14: (7,)},
    shared=(LONG, LONG, None, LONG, SHORT, SHORT, LONG, SHORT),
)
"""Contexts on two documents and one alone join, finish and are cancelled; the one that brought the first document is
cancelled before it is answered."""
TOGETHER = rigs.Scenario(
    prompts=tuple((16 + own, Sampling(5)) for own in (1, 3, 4, 9)),
    arrive={0: (0, 1, 2, 3)},
    shared=(LONG,) * 4,
)
OPTIONS: dict[str, Any] = {"shared_histories": 2, "concurrency": 4}


@pytest.fixture(scope="module")
def reference() -> rigs.Outcome:
    """The same churn with everything resident."""
    return rigs.run(rigs.model(), SHARING, residency="full", **OPTIONS)


def test_the_reference_repeats_itself_and_shares(reference: rigs.Outcome) -> None:
    """The first control, and that histories are shared at all: by one context and by several, two in a step."""
    assert rigs.same(reference, rigs.run(rigs.model(), SHARING, residency="full", **OPTIONS))
    assert reference.local.engine.spared_bytes > 0


@pytest.mark.parametrize("retain", ["off", "on"])
@pytest.mark.parametrize("temperament", list(Temperament))
def test_staged_bits_are_resident_bits_over_shared_histories(
    reference: rigs.Outcome, temperament: Temperament, retain: str
) -> None:
    """H4 and H5, in life: questions on two documents come and go; copies run early, late or anyhow; what is shared is
    streamed, or attended in device pages."""
    outcome = rigs.run(rigs.model(temperament, 5), SHARING, retain=retain, **OPTIONS)
    assert rigs.same(outcome, reference)
    assert outcome.answers == reference.answers
    assert (outcome.local.engine.hit_bytes > 0) == (retain == "on")


@pytest.mark.parametrize("pages", [14, 18])
def test_a_shared_history_is_kept_in_part(reference: rigs.Outcome, pages: int) -> None:
    """In life: device pages for some of it: pages are taken, lost and materialised for all its requests at once."""

    def prepare(local: LocalEngine) -> None:
        rigs.retaining(pages)(local)
        local.engine.scheduler.turns = None

    outcome = rigs.run(rigs.model(Temperament.RANDOM, 1), SHARING, prepare, retain="on", **OPTIONS)
    assert rigs.same(outcome, reference)
    assert outcome.local.engine.hit_bytes > 0


@pytest.mark.parametrize("own", [20, 24])
@pytest.mark.parametrize("residency", ["staged", "full"])
def test_short_segments_for_each_and_long_ones_for_all(own: int, residency: str) -> None:
    """In life: --own-tokens: a request that fits no short segment waits for a long one; the text is the same."""
    outcome = rigs.run(rigs.model(), SHARING, own_tokens=own, residency=residency, concurrency=4, shared_histories=2)
    plain = rigs.run(rigs.model(), replace(SHARING, cancel={}, share=False))
    whole = {number for number, one in outcome.finished.items() if one.reason == "length"}
    assert len(whole) >= 5
    for number in whole:
        assert outcome.tokens[number] == plain.tokens[number]


def test_short_segments_have_the_bits_of_the_reference() -> None:
    """H4 with two kinds of segments: both routes address rows by segment alone."""
    options: dict[str, Any] = {"own_tokens": 24, "concurrency": 4, "shared_histories": 2}
    reference = rigs.run(rigs.model(), SHARING, residency="full", **options)
    assert rigs.same(rigs.run(rigs.model(Temperament.LATE), SHARING, **options), reference)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_text_is_that_of_each_request_alone(model_type: str) -> None:
    """In life: a document prefilled once, four questions: token for token what transformers writes for each."""
    loaded = rigs.model(model_type=model_type)
    outcome = rigs.run(loaded, TOGETHER, **OPTIONS)
    for number in range(4):
        assert list(outcome.tokens[number]) == rigs.expected(loaded, TOGETHER.prompt(number, rigs.VOCABULARY), 5)


def test_a_shared_history_is_prefilled_once_and_staged_once() -> None:
    """In life: four questions on a document cost one prefill of it, and one copy of it a layer of each step."""
    once, alone = Prefilled(), Prefilled()
    shared = rigs.run(rigs.model(), TOGETHER, once, **OPTIONS).local.engine
    plain = rigs.run(rigs.model(), replace(TOGETHER, share=False), alone, **OPTIONS).local.engine
    own = sum(length - 16 for length, _ in TOGETHER.prompts)
    assert once.rows == own + 16
    assert alone.rows == own + 4 * 16
    spared_step = 3 * 16 * shared.loaded.geometry.token_bytes
    assert shared.spared_bytes >= 4 * spared_step, "in four steps all of them decode"
    assert plain.transport.bytes_in - shared.transport.bytes_in >= 4 * spared_step
    assert plain.spared_bytes == 0


def test_the_story_says_what_was_shared() -> None:
    """In life: ``haulier explain`` of a question: how much it need not compute, with how many, and who computed it."""
    outcome = rigs.run(rigs.model(), TOGETHER, **OPTIONS)
    first, second = outcome.finished[0].notes, outcome.finished[1].notes
    assert "shares 16 tokens with 3 others, prefilled by this request" in first
    assert "prefilled the 16 tokens that it shares" in first
    assert "waited" not in first
    assert "shares 16 tokens with 3 others, prefilled by another request" in second
    assert "waited for another request to prefill the 16 tokens that it shares" in second


@pytest.mark.parametrize("cancel", range(8))
def test_a_document_outlives_the_request_that_brought_it(cancel: int) -> None:
    """In life: the first question is cancelled before, while and after its document is prefilled from its prompt."""
    script = replace(TOGETHER, cancel={cancel: (0,)})
    counted = Prefilled()
    outcome = rigs.run(rigs.model(Temperament.LATE), script, counted, **OPTIONS)
    plain = rigs.run(rigs.model(), replace(script, share=False), **OPTIONS)
    assert outcome.finished[0].reason == "cancelled"
    for number in (1, 2, 3):
        assert outcome.tokens[number] == plain.tokens[number]
    assert counted.rows <= sum(length - 16 for length, _ in TOGETHER.prompts) + 16


@pytest.mark.parametrize("cancel", range(5))
def test_a_document_that_nobody_waits_for_is_let_go(cancel: int) -> None:
    """In life: the whole job is cancelled while its document is prefilled: segment and ring entry come back at once,
    and a later question begins again."""
    script = rigs.Scenario(TOGETHER.prompts, {0: (0, 1), 9: (2, 3)}, {cancel: (0, 1)}, TOGETHER.shared)
    outcome = rigs.run(rigs.model(), script, **OPTIONS)
    loaded = rigs.model()
    for number in (2, 3):
        assert list(outcome.tokens[number]) == rigs.expected(loaded, script.prompt(number, rigs.VOCABULARY), 5)


def test_documents_take_turns_in_one_segment(reference: rigs.Outcome) -> None:
    """In life: room for one shared history: the other document's questions run alone while it is read; later it is
    let go for the other. Bits are the reference's with the same room; the text is that of two."""
    options = OPTIONS | {"shared_histories": 1}
    resident = rigs.run(rigs.model(), SHARING, residency="full", **options)
    staged = rigs.run(rigs.model(Temperament.RANDOM, 3), SHARING, **options)
    assert rigs.same(staged, resident)
    for number in (1, 2, 3, 5, 6):
        assert staged.tokens[number] == reference.tokens[number]


@pytest.mark.parametrize("name", ["copy", "launch"])
@pytest.mark.parametrize("calls", [1, 30, 80, 150])
def test_wherever_the_device_fails_the_books_hold(name: str, calls: int) -> None:
    """L6, in life: a device that fails while a document is prefilled, or read by its questions: nothing is answered
    after it, the books add up, and once the device is proved done nothing is held."""
    local = LocalEngine(rigs.model(Temperament.LATE), rigs.settings(**OPTIONS))
    local.submit(
        [TOGETHER.prompt(number, rigs.VOCABULARY) for number in range(4)],
        [Sampling(20)] * 4,
        [TOGETHER.prefix(number) for number in range(4)],
    )
    fail_after(device_of(local), name, calls)
    with pytest.raises(DeviceError, match="launch failure"):
        local.run()
    local.engine.scheduler.check()
    assert not local.finished
    assert local.close().proved
    assert local.engine.pages.holds == 0
    assert not local.engine.transport.book.live


@pytest.mark.parametrize("chunk", [5, 12, 40])
def test_a_document_that_ends_inside_a_step_is_read_in_the_next(chunk: int) -> None:
    """In life: a step has rows left when the document is whole: its questions wait for the next one all the same, since
    this step's rows are not on the host yet."""
    resident = rigs.run(rigs.model(), TOGETHER, residency="full", chunk_tokens=chunk, **OPTIONS)
    staged = rigs.run(rigs.model(Temperament.LATE), TOGETHER, chunk_tokens=chunk, **OPTIONS)
    assert rigs.same(staged, resident)
    for number in range(4):
        wanted = rigs.expected(staged.local.engine.loaded, TOGETHER.prompt(number, rigs.VOCABULARY), 5)
        assert list(staged.tokens[number]) == wanted


def test_without_room_for_one_everybody_runs_alone() -> None:
    """In life: a host pool of just the requests' own histories: as before, and no error."""
    outcome = rigs.run(rigs.model(), TOGETHER, concurrency=4, shared_histories=0)
    plain = rigs.run(rigs.model(), replace(TOGETHER, share=False), concurrency=4, shared_histories=0)
    assert rigs.same(outcome, plain)
    assert outcome.local.engine.spared_bytes == 0


def test_figures_say_what_is_shared() -> None:
    """In life: the worker exports them; a document stays cached for the next question."""
    local = LocalEngine(rigs.model(), rigs.settings(**OPTIONS))
    local.submit(
        [TOGETHER.prompt(number, rigs.VOCABULARY) for number in range(2)],
        [Sampling(4)] * 2,
        [TOGETHER.prefix(number) for number in range(2)],
    )
    for _ in range(4):
        local.step()
    figures = local.engine.figures()
    assert (figures.shared_histories, figures.sharing) == (1, 2)
    local.run()
    local.engine.scheduler.reclaim(local.engine.steps)
    figures = local.engine.figures()
    assert (figures.shared_histories, figures.sharing) == (1, 0)
    assert figures.spared_bytes > 0
    rows = local.engine.tokens
    local.submit([TOGETHER.prompt(2, rigs.VOCABULARY)], [Sampling(1)], [TOGETHER.prefix(2)])
    seen: list[int] = []
    local.engine._watch = lambda plan, logits: seen.append(plan.rows)
    local.run()
    assert sum(seen) == TOGETHER.prompts[2][0] - 16, "a cached document is not prefilled again"
    assert local.engine.tokens == rows + 1
    rigs.at_rest(local)
    assert local.close().proved


# -- controls: the gate must be able to fail ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, faults.wrong_shared_rows, faults.shared_rows_of_another])
def test_the_gate_turns_red_on_shared_rows(reference: rigs.Outcome, fault) -> None:  # type: ignore[no-untyped-def]
    """One row too far of a document, or the rows of another context: bits differ; without a fault none do."""

    def prepare(local: LocalEngine) -> None:
        if fault is not None:
            assert isinstance(local.engine.route, StagedRoute)
            fault(local.engine.route)

    assert rigs.same(rigs.run(rigs.model(), SHARING, prepare, **OPTIONS), reference) == (fault is None)


def one_layer(omit: frozenset[Edge], *, check_clocks: bool) -> dict[int, tuple[int, ...]]:
    """The answers of four questions over a model of one layer, copies as late as they may be."""
    device = VirtualDevice(Temperament.LATE, check_clocks=check_clocks)
    loaded = replace(rigs.model(num_hidden_layers=1), device=device)

    def prepare(local: LocalEngine) -> None:
        local.engine.transport._omit = omit

    return rigs.run(loaded, TOGETHER, prepare, **OPTIONS).tokens


def test_a_members_copy_waits_for_the_documents_write_back() -> None:
    """Q1, in life: the document's last rows are still on their way to the host when the first question stages them.
    Without that wait the race is named; with nobody looking, the text is another."""
    right = one_layer(frozenset(), check_clocks=True)
    missing = frozenset({Edge.WRITE_BACK_BEFORE_NEXT_COPY})
    with pytest.raises(RaceError):
        one_layer(missing, check_clocks=True)
    assert one_layer(missing, check_clocks=False) != right


class Prefilled:
    """Counts the rows that steps computed of prompts; for ``prepare``."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, local: LocalEngine) -> None:
        inner = local.engine._watch

        def watch(plan: StepPlan, logits: torch.Tensor) -> None:
            self.rows += sum(share.rows for share in plan.shares if share.prompt)
            if inner is not None:
                inner(plan, logits)

        local.engine._watch = watch
