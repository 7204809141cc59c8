"""The default model: what lines may ask of an answer, through tokenizer and engine, beside transformers' generate."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from common.clock import SystemClock
from common.config import EngineSettings
from common.messages import LineRef
from worker import model_store
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.runner import load
from worker.request_rules import Serving
from worker.structures import Finished, Outcome, Prepared, Request, TokenizeJob
from worker.tokenizer import HubCodec, Preparer

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
SETTINGS = EngineSettings(
    MODEL, host_pool_gib=0.5, concurrency=6, context_tokens=160, chunk_tokens=64, page_tokens=16, threads=2
)
TEXT = "The capital of France is Paris. The capital of Spain is Madrid. The capital of"
TOKENS = 12


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    if not model_store.is_cached(model_store.KNOWN[MODEL]):
        pytest.skip(f"the default model is not in the cache: haulier model pull {MODEL}")
    return load(SETTINGS)


@pytest.fixture(scope="module")
def local(loaded: LoadedModel) -> Iterator[LocalEngine]:
    """One engine for all: what a test leaves in it would be another's."""
    engine = LocalEngine(loaded, SETTINGS)
    yield engine
    assert engine.close().proved


@pytest.fixture(scope="module")
def theirs(loaded: LoadedModel) -> LoadedModel:
    """The same model with transformers' own attention: while an engine runs, it owns that of its model."""
    return load(SETTINGS)


@pytest.fixture(scope="module")
def preparer(loaded: LoadedModel) -> Preparer:
    codec = HubCodec(model_store.folder_of(model_store.KNOWN[MODEL]))
    serving = Serving(MODEL, SETTINGS.context_tokens, codec.vocabulary, loaded.stop_ids)
    return Preparer(codec, serving, "fp_x", SystemClock(), SETTINGS.page_tokens)


def prepared(preparer: Preparer, lines: Sequence[dict[str, Any]]) -> list[Prepared]:
    """Each line of a chat if it has messages, of an embedding or response if it has input, else of a completion."""
    jobs = []
    for index, line in enumerate(lines):
        url = "/v1/chat/completions" if "messages" in line else "/v1/completions"
        if "input" in line:
            url = "/v1/responses" if "max_output_tokens" in line else "/v1/embeddings"
        jobs.append(TokenizeJob(LineRef("job", index, 1), url, json.dumps({"model": MODEL, **line}).encode()))
    found = preparer.prepare(jobs)
    refused = [one for one in found if isinstance(one, Outcome)]
    assert not refused, refused[0].body
    return [one for one in found if isinstance(one, Prepared)]


def answers(local: LocalEngine, preparer: Preparer, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bodies of all lines, run together."""
    requests = [(one.request, list(one.token_ids)) for one in prepared(preparer, lines)]
    half = len(requests) // 2
    numbers: list[int] = []
    for wave in (requests[:half], requests[half:]):  # the second wave meets the first in the middle of its answers
        if wave:
            asked = [one for one, _ in wave]
            numbers += local.submit(
                [ids for _, ids in wave],
                [one.sampling for one in asked],
                [one.shared for one in asked],
                [one.guide for one in asked],
                [one.pieces for one in asked],
            )
        for _ in range(3):
            local.step()
    finished = local.run()
    told = [_as(finished[number], request) for number, (request, _) in zip(numbers, requests, strict=True)]
    return [json.loads(outcome.body) for outcome in preparer.answer(told)]


def _as(finished: Finished, request: Request) -> Finished:
    return finished._replace(request=request)


def generated(loaded: LoadedModel, ids: Sequence[int], tokens: int = TOKENS, **wanted: Any) -> Any:
    return loaded.module.generate(
        torch.tensor([list(ids)]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=tokens,
        do_sample=False, eos_token_id=list(loaded.stop_ids), pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **wanted,
    )  # fmt: skip


def test_greedy_lines_are_answered_as_generate_answers_them(
    theirs: LoadedModel, local: LocalEngine, preparer: Preparer
) -> None:
    """Repetition penalty, bias and log probabilities in one batch with others, text for text."""
    paris = preparer._codec.encode([" Paris", " Madrid", " Italy"], special=False)
    bias = {str(ids[0]): value for ids, value in zip(paris, (8.0, -100.0, 2.0), strict=True)}
    greedy = {"prompt": TEXT, "max_tokens": TOKENS, "temperature": 0}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": bias}, {"sequence_bias": [[[int(token)], value] for token, value in bias.items()]}),
        (
            {"repetition_penalty": 1.2, "logit_bias": bias, "logprobs": 4},
            {"repetition_penalty": 1.2, "sequence_bias": [[[int(token)], value] for token, value in bias.items()]},
        ),
    ]
    bodies = answers(local, preparer, [greedy | mine for mine, _ in cases])
    ids = prepared(preparer, [greedy])[0].token_ids
    texts = []
    for (_, changes), body in zip(cases, bodies, strict=True):
        out = generated(theirs, ids, **changes)
        made = out.sequences[0, len(ids) :].tolist()
        texts.append(body["choices"][0]["text"])
        assert texts[-1] == preparer._codec.decode([[one for one in made if one not in theirs.stop_ids]])[0]
        assert body["usage"]["completion_tokens"] == len([one for one in made if one not in theirs.stop_ids])
        assert body["usage"]["prompt_tokens"] == len(ids)
        told = body["choices"][0]["logprobs"]
        if told is not None:
            right = [logits[0].log_softmax(-1) for logits in out.logits]
            for index, (token, value) in enumerate(zip(made, told["token_logprobs"], strict=False)):
                assert math.isclose(value, float(right[index][token]), abs_tol=1e-3)
                assert len(told["top_logprobs"][index]) in (4, 5)
            assert "".join(told["tokens"]) == texts[-1]
    assert len(set(texts)) == len(texts)  # each changed the answer, or the comparison would prove nothing


def test_stop_strings_cut_the_text_where_they_begin(local: LocalEngine, preparer: Preparer) -> None:
    """Over token borders, inside a token, at its start, by id: the text ends right before; nothing of it is left."""
    greedy: dict[str, Any] = {"prompt": TEXT, "max_tokens": 24, "temperature": 0}
    whole = answers(local, preparer, [greedy])[0]["choices"][0]
    text = whole["text"]
    tokens = [preparer._codec.decode([[one]])[0] for one in preparer._codec.encode([text], special=False)[0]]
    border = len(tokens[0]) + len(tokens[1])
    stops = {
        "over a border": text[border - 2 : border + 2],
        "inside a token": max(tokens[2:], key=len).strip()[1:-1],
        "a whole token": tokens[4],
        "two tokens": tokens[3] + tokens[4],
    }
    lines = [greedy | {"stop": [stop, "never to be seen"]} for stop in stops.values()]
    by_id = preparer._codec.encode([text], special=False)[0][5]
    bodies = answers(local, preparer, [*lines, greedy | {"stop_token_ids": [by_id]}, greedy | {"stop": "zzzz"}])
    for stop, body in zip(stops.values(), bodies, strict=False):
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop"), stop
        assert body["usage"]["completion_tokens"] <= len(tokens)
    assert bodies[-2]["choices"][0]["text"] == "".join(tokens[:5])
    assert (bodies[-2]["choices"][0]["finish_reason"], bodies[-2]["usage"]["completion_tokens"]) == ("stop", 5)
    assert (bodies[-1]["choices"][0]["text"], bodies[-1]["choices"][0]["finish_reason"]) == (text, "length")


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(local: LocalEngine, preparer: Preparer) -> None:
    """Alone, and among lines that join and end; every choice of n; another seed gives another text."""
    mine: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 20, "temperature": 1.0,
        "top_p": 0.95, "seed": 11, "n": 3, "presence_penalty": 0.5, "min_p": 0.02, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    others = [{"prompt": TEXT[: 9 * one], "max_tokens": 3 * one, "seed": one, "n": 1 + one % 2} for one in range(1, 6)]
    alone = answers(local, preparer, [mine])[0]
    beside = answers(local, preparer, [*others[:2], mine | {"seed": 12}, mine, *others[2:]])
    texts = [choice["message"]["content"] for choice in alone["choices"]]
    assert texts == [choice["message"]["content"] for choice in beside[3]["choices"]]
    assert len(set(texts)) == 3
    assert texts != [choice["message"]["content"] for choice in beside[2]["choices"]]
    assert [choice["index"] for choice in alone["choices"]] == [0, 1, 2]
    told = [choice["logprobs"]["content"] for choice in alone["choices"]]
    assert alone["usage"]["completion_tokens"] == sum(len(one) for one in told)
    assert alone["usage"]["prompt_tokens"] == prepared(preparer, [mine])[0].request.prompt_tokens
    for one, text in zip(told, texts, strict=True):
        assert b"".join(bytes(token["bytes"]) for token in one).decode(errors="replace") == text
        assert all(len(token["top_logprobs"]) == 2 for token in one)


def test_structured_answers_keep_to_their_form(local: LocalEngine, preparer: Preparer) -> None:
    """A schema, an object, an expression, beside lines without: each answer is of its form and ends by itself."""
    say = {"messages": [{"role": "user", "content": "Describe a person."}], "temperature": 1.0, "max_tokens": 60}
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    named = {"name": "person", "strict": True, "schema": schema}
    bodies = answers(
        local,
        preparer,
        [
            say | {"response_format": {"type": "json_schema", "json_schema": named}, "n": 2, "seed": 5},
            say | {"seed": 6},
            say | {"guided_regex": r"[A-Z][a-z]{2,8} is (old|young)\.", "temperature": 0, "logprobs": True},
            say | {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}},
        ],
    )
    for choice in bodies[0]["choices"]:
        person = json.loads(choice["message"]["content"])
        assert set(person) == {"name", "age"}
        assert person["name"] in ("Ann", "Bob")
        assert 1 <= person["age"] <= 99
        assert choice["finish_reason"] == "stop"
    said = bodies[2]["choices"][0]
    assert re.fullmatch(r"[A-Z][a-z]{2,8} is (old|young)\.", said["message"]["content"])
    assert said["finish_reason"] == "stop"
    assert len(said["logprobs"]["content"]) == bodies[2]["usage"]["completion_tokens"]
    assert all(type(one) is bool for one in json.loads(bodies[3]["choices"][0]["message"]["content"]))
    free = answers(local, preparer, [say | {"seed": 6}])[0]
    assert bodies[1]["choices"][0]["message"] == free["choices"][0]["message"]


def test_a_schema_that_the_library_refuses_fails_its_line_alone(preparer: Preparer) -> None:
    """With the library's reason; its neighbours are prepared."""
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)"}}}
    bodies = [{"prompt": "a"}, {"prompt": "b", "response_format": bad}, {"prompt": "c"}]
    jobs = [
        TokenizeJob(LineRef("job", index, 1), "/v1/completions", json.dumps({"model": MODEL, **body}).encode())
        for index, body in enumerate(bodies)
    ]
    found = preparer.prepare(jobs)
    assert [type(one).__name__ for one in found] == ["Prepared", "Outcome", "Prepared"]
    refused = found[1]
    assert isinstance(refused, Outcome)
    error = json.loads(refused.body)["error"]
    assert (refused.status_code, error["param"]) == (400, "response_format")
    assert "look-around" in error["message"]


def test_embeddings_and_responses_beside_other_lines(
    theirs: LoadedModel, local: LocalEngine, preparer: Preparer
) -> None:
    """Vectors are the mean of the model's last hidden states; a response says what the same chat would."""
    texts = ["Paris is the capital of France.", "A dog.", TEXT * 4]
    say: dict[str, Any] = {"temperature": 0, "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 8}
    response = {"input": "Hi!", "temperature": 0, "max_output_tokens": 8}
    bodies = answers(
        local, preparer, [say, {"input": texts}, response, {"input": texts[1], "encoding_format": "base64"}]
    )
    ids = preparer._codec.encode(texts, special=True)
    vectors = [torch.tensor(one["embedding"]) for one in bodies[1]["data"]]
    for vector, mine in zip(vectors, ids, strict=True):
        right = theirs.module.base_model(torch.tensor([list(mine)])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, right, atol=1e-3, rtol=1e-3)
    assert bodies[1]["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    packed = base64.b64decode(bodies[3]["data"][0]["embedding"])
    alone = torch.tensor(struct.unpack(f"<{len(packed) // 4}f", packed))
    torch.testing.assert_close(alone, vectors[1], atol=1e-3, rtol=1e-3)
    said = bodies[2]["output"][0]["content"][0]["text"]
    assert said == bodies[0]["choices"][0]["message"]["content"]
    assert said
    assert bodies[2]["usage"]["output_tokens"] == bodies[0]["usage"]["completion_tokens"]
