"""Penalties, bias, min_p and log probabilities through the whole engine, beside what transformers' processors say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import generation

from tests.unit.worker.engine import rigs
from worker.engine import shaping
from worker.engine.cells import Scenario
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.sampler import penalised
from worker.engine.sampling import choice_seed, uniform
from worker.structures import Finished, Sampling, Shape

TOKENS = 12
BIAS = ((5, 3.0), (11, -100.0), (60, 2.5))
SHAPES = {
    "plain": None,
    "repetition": Shape(repetition=1.7),
    "repetition below 1": Shape(repetition=0.8),
    "bias": Shape(bias=BIAS),
    "logprobs": Shape(logprobs=3),
    "all": Shape(1.3, 0.4, 0.7, BIAS, 5),
    "counts": Shape(presence=0.9, frequency=1.1),
}


def theirs(loaded: Any, prompt: list[int], shape: Shape | None, **changes: Any) -> Any:
    """What transformers' generate says, with its names of the same things."""
    shape = shape or Shape()
    wanted: dict[str, Any] = {"repetition_penalty": shape.repetition}
    if shape.bias:
        wanted["sequence_bias"] = [[[token], value] for token, value in shape.bias]
    return loaded.module.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=TOKENS,
        do_sample=False, eos_token_id=None, pad_token_id=0, output_scores=True, output_logits=True,
        return_dict_in_generate=True, **(wanted | changes),
    )  # fmt: skip


def expected(loaded: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    """The answer by transformers' processors, one full pass a token, and by the formulas where they have none."""
    shape, ids = sampling.shape or Shape(), list(prompt)
    for number in range(sampling.max_tokens):
        scores = loaded.module(torch.tensor([ids])).logits[:, -1].float()
        sofar = torch.tensor([ids])
        if shape.bias:
            bias = [[[token], value] for token, value in shape.bias]
            scores = generation.SequenceBiasLogitsProcessor(bias)(sofar, scores)
        scores = generation.RepetitionPenaltyLogitsProcessor(shape.repetition)(sofar, scores)
        counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.int64), minlength=scores.shape[-1])
        scores = scores - shape.frequency * counts - shape.presence * (counts > 0)
        if sampling.temperature == 0:
            ids.append(int(scores.argmax()))
            continue
        scores = generation.TemperatureLogitsWarper(sampling.temperature)(sofar, scores)
        if sampling.top_k:
            scores = generation.TopKLogitsWarper(sampling.top_k)(sofar, scores)
        scores = generation.TopPLogitsWarper(sampling.top_p)(sofar, scores)
        if sampling.min_p:
            scores = generation.MinPLogitsWarper(sampling.min_p)(sofar, scores)
        shares, order = scores.softmax(-1)[0].double().sort(descending=True, stable=True)
        place = int((shares.cumsum(0) <= uniform(sampling.seed, number)).sum())
        ids.append(int(order[place]))
    return ids[len(prompt) :]


def scenario(samplings: Sequence[Sampling]) -> Scenario:
    """More requests than segments, the later ones in the middle of the others' answers."""
    lengths = (9, 3, 14, 6, 11, 4, 8, 10)
    prompts = tuple((lengths[one % len(lengths)], sampling) for one, sampling in enumerate(samplings))
    late = len(samplings) // 2
    return Scenario(prompts, {0: tuple(range(late)), 3: tuple(range(late, len(samplings)))})


@pytest.mark.parametrize("temperament", list(Temperament))
def test_greedy_shapes_read_as_transformers_writes_them(temperament: Temperament) -> None:
    """In life: requests with and without penalties beside each other, more than segments, so that rows are reused."""
    loaded = rigs.model(temperament)
    shapes = [*SHAPES.values(), Shape(repetition=1.2)]
    samplings = [Sampling(TOKENS, shape=shape) for shape in shapes]
    outcome = rigs.run(loaded, scenario(samplings))
    for number, sampling in enumerate(samplings):
        prompt = scenario(samplings).prompt(number, rigs.VOCABULARY)
        answer = list(outcome.tokens[number])
        assert answer == expected(loaded, prompt, sampling), list(SHAPES)[number % len(SHAPES)]
        shape = sampling.shape
        if shape is None or not (shape.presence or shape.frequency):
            assert answer == theirs(loaded, prompt, shape).sequences[0, len(prompt) :].tolist()


def test_each_shape_changes_an_answer() -> None:
    """The control: answers that were the same with and without would prove nothing."""
    loaded = rigs.model()
    for name, shape in SHAPES.items():
        prompts = [rigs.prompt(9, salt) for salt in range(6)]
        plain = [expected(loaded, prompt, Sampling(TOKENS)) for prompt in prompts]
        shaped = [expected(loaded, prompt, Sampling(TOKENS, shape=shape)) for prompt in prompts]
        assert (plain == shaped) == (name in ("plain", "logprobs")), name


@pytest.mark.parametrize(
    "changes", [{}, {"retain": "on"}, {"residency": "full"}, {"retain": "on", "graphs": "on"}], ids=str
)
def test_drawn_answers_are_what_transformers_would_draw_from(changes: dict[str, Any]) -> None:
    """Temperature, top_k, top_p and min_p, with penalties, on each route: every token is the one at its chance in the
    distribution that transformers' warpers leave."""
    loaded = rigs.model()
    samplings = [
        Sampling(TOKENS, 0.9, seed=4, min_p=0.2),
        Sampling(TOKENS, 1.3, 0.9, 20, seed=5, min_p=0.05),
        Sampling(TOKENS, 1.0, seed=6),
        Sampling(TOKENS, 1.1, seed=7, min_p=0.1, shape=SHAPES["all"]),
        Sampling(TOKENS, 1.5, min_p=1.0, seed=8),
    ]
    outcome = rigs.run(loaded, scenario(samplings), **changes)
    for number, sampling in enumerate(samplings):
        prompt = scenario(samplings).prompt(number, rigs.VOCABULARY)
        assert list(outcome.tokens[number]) == expected(loaded, prompt, sampling)


def test_log_probabilities_are_those_of_the_models_own_logits() -> None:
    """Beside generate's raw logits: of each token and of the likeliest, whatever bias or penalty chose it."""
    loaded = rigs.model()
    shapes = (SHAPES["logprobs"], Shape(bias=BIAS, logprobs=5), Shape(repetition=1.7, logprobs=20), Shape(logprobs=0))
    samplings = [Sampling(TOKENS, shape=shape) for shape in shapes]
    outcome = rigs.run(loaded, scenario(samplings))
    for number, shape in enumerate(shapes):
        finished = outcome.finished[number]
        said = theirs(loaded, scenario(samplings).prompt(number, rigs.VOCABULARY), shape)
        assert len(finished.logprobs) == len(finished.token_ids) == TOKENS
        for token, told, logits in zip(finished.token_ids, finished.logprobs, said.logits, strict=True):
            right = logits[0].float().log_softmax(-1)
            assert math.isclose(told.logprob, float(right[token]), abs_tol=2e-4)
            values, ids = right.topk(max(1, shape.logprobs))
            assert [one for one, _ in told.top] == ids.tolist()[: shape.logprobs]
            assert [value for _, value in told.top] == pytest.approx(values.tolist()[: shape.logprobs], abs=2e-4)


def test_a_batch_that_asks_for_nothing_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: nearly all batches. No table, no count, no launch beside the choice itself."""

    def never(*_: object) -> None:
        raise AssertionError("allocated for nobody")

    monkeypatch.setattr(shaping, "_Tables", never)
    local = LocalEngine(rigs.model(), rigs.settings())
    local.submit([rigs.prompt(5), rigs.prompt(7, 1)], [Sampling(4), Sampling(4, temperature=1.0)])
    local.run()
    assert local.engine.shaping._counts is None
    local.submit([rigs.prompt(5)], [Sampling(4, shape=Shape(presence=1.0))])
    with pytest.raises(AssertionError, match="for nobody"):
        local.run()


def test_a_segments_next_owner_finds_no_counts_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows that are not begun anew make the second owner's answer another one."""

    def second() -> list[int]:
        local = LocalEngine(rigs.model(), rigs.settings(concurrency=1))
        samplings = [Sampling(TOKENS, shape=Shape(repetition=1.5, presence=1.0))] * 2
        numbers = local.submit([rigs.prompt(9), rigs.prompt(9, 5)], samplings)
        return list(local.run()[numbers[1]].token_ids)

    right = expected(rigs.model(), rigs.prompt(9, 5), Sampling(TOKENS, shape=Shape(repetition=1.5, presence=1.0)))
    assert second() == right
    whole = shaping.Shaping._write
    seen: list[int] = []

    def once(self: Any, tables: Any, share: Any, shape: Any) -> None:
        if not seen:
            whole(self, tables, share, shape)
        seen.append(share.context.number)

    monkeypatch.setattr(shaping.Shaping, "_write", once)
    assert second() != right


def test_penalties_are_the_stated_formulas() -> None:
    """On numbers that can be checked by hand: a token of the prompt, one of the answer, one of neither."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]])
    in_prompt = torch.tensor([[True, False, False, False]])
    counts = torch.tensor([[0, 2, 0, 1]], dtype=torch.int32)
    got = penalised(logits, in_prompt, counts, torch.tensor([[2.0, 0.5, 0.25]]))
    assert got.tolist() == [[1.0, -4.0 - 0.5 - 0.5, 1.0, 1.5 - 0.5 - 0.25]]


def choices(local: LocalEngine, prompt: list[int], sampling: Sampling) -> Finished:
    """Alone in the engine."""
    number = local.submit([prompt], [sampling])[0]
    return local.run()[number]


@pytest.mark.parametrize("temperament", [Temperament.EAGER, Temperament.RANDOM])
def test_each_choice_is_the_same_in_any_batch(temperament: Temperament) -> None:
    """n answers to one prompt, more than segments: each is what its own seed gives alone, beside others as alone."""
    sampling = Sampling(TOKENS, 1.0, seed=21, choices=5, shape=Shape(presence=0.5, logprobs=2))
    prompt = rigs.prompt(9)
    alone = choices(LocalEngine(rigs.model(temperament), rigs.settings()), prompt, sampling)
    local = LocalEngine(rigs.model(temperament), rigs.settings())
    numbers = local.submit(
        [rigs.prompt(13, 7), prompt, rigs.prompt(4, 9)],
        [Sampling(20, 1.0, seed=1), sampling, Sampling(9, shape=SHAPES["all"])],
    )
    beside = local.run()[numbers[1]]
    rigs.at_rest(local)
    assert [one.token_ids for one in beside.choices] == [one.token_ids for one in alone.choices]
    assert len({one.token_ids for one in alone.choices}) == 5
    assert len(local.admitted) == 3
    for number, one in enumerate(alone.choices):
        mine = sampling._replace(seed=choice_seed(21, number), choices=1)
        assert list(one.token_ids) == expected(rigs.model(), prompt, mine)
        assert len(one.logprobs) == len(one.token_ids)


def test_a_request_is_answered_once_when_its_last_choice_ends() -> None:
    """In life: choices of unequal length, and a cancel while one has ended and others run or wait."""
    local = LocalEngine(rigs.model(), rigs.settings())
    for cancel_at in (None, 1, 6, 11):
        stops = tuple(range(0, rigs.VOCABULARY, 16))
        numbers = local.submit([rigs.prompt(9)], [Sampling(16, 1.3, seed=3, stop_ids=stops, choices=7)])
        steps = 0
        while local.step():
            steps += 1
            if steps == cancel_at:
                local.cancel(numbers)
        finished = local.finished[numbers[0]]
        rigs.at_rest(local)
        if cancel_at is None:
            assert len(finished.choices) == 7
            assert {one.reason for one in finished.choices} == {"stop", "length"}
            assert finished.reason in ("stop", "length")
            assert finished.request.sampling.choices == 7
        else:
            assert finished.reason == "cancelled"


def test_drafts_change_nothing_of_what_goes_with_them() -> None:
    """Bias, min_p, log probabilities and choices with drafted tokens, some of which are taken: the same answers."""
    again = [5, 11, 60, 7, 5, 11, 60, 7, 5, 11, 60]
    samplings = [
        Sampling(20, shape=Shape(bias=((7, 9.0), (5, 8.0), (11, 8.0), (60, 8.0)), logprobs=2)),
        Sampling(20, 0.7, seed=3, min_p=0.1, choices=2, shape=Shape(bias=((7, 4.0), (5, 4.0)), logprobs=0)),
    ]

    def run(**changes: Any) -> tuple[dict[int, Finished], LocalEngine]:
        local = LocalEngine(rigs.model(), rigs.settings(**changes))
        local.submit([again, again], samplings)
        return local.run(), local

    plain, _ = run()
    drafted, local = run(draft_tokens=3)
    assert local.engine.drafts is not None
    assert local.engine.drafts.taken > 0
    for number in (0, 1):
        for one, other in zip(plain[number].choices, drafted[number].choices, strict=True):
            assert one.token_ids == other.token_ids
            assert [told.logprob for told in one.logprobs] == pytest.approx(
                [told.logprob for told in other.logprobs], abs=1e-4
            )
