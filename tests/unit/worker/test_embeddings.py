"""/v1/embeddings: what a body wants embedded, and lists as the official client reads them."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from common import limits
from common.messages import LineRef
from tests.unit.worker.test_tokenizer import Clock, Codec
from worker.embeddings import Inputs
from worker.request_rules import RequestError, Serving, read_embeddings
from worker.structures import Choice, Finished, Outcome, Prepared, Sampling, Shape, TokenizeJob
from worker.tokenizer import Preparer

URL = "/v1/embeddings"
SERVING = Serving("m", 20, 256, (2,), ring_tokens=40)


def asked(**fields: Any) -> Inputs:
    return read_embeddings(json.dumps({"model": "m", **fields}).encode(), SERVING)


@pytest.mark.parametrize(
    ("given", "texts"),
    [("hi", ("hi",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_an_input_is_text_or_token_ids_or_a_list_of_such(given: Any, texts: Any) -> None:
    """All four forms of the service."""
    assert asked(input=given) == Inputs(texts, "float")
    assert asked(input=given, encoding_format="base64", user="me", dimensions=None).form == "base64"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_input", "input"),
        ({"input": []}, "missing_input", "input"),
        ({"input": 5}, "missing_input", "input"),
        ({"input": [5, "a"]}, "invalid_type", "input[0]"),
        ({"input": [[True]]}, "invalid_type", "input[0]"),
        ({"input": ["a", [256]]}, "invalid_value", "input[1]"),
        ({"input": ["\ud800"]}, "invalid_unicode", "input[0]"),
        ({"input": ["a"] * (limits.EMBEDDING_INPUTS_MAX_COUNT + 1)}, "invalid_value", "input"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "dimensions": 64}, "unsupported_parameter", "dimensions"),
        ({"input": "a", "temperature": 1}, "unsupported_parameter", "temperature"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    """Nothing is ignored."""
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def prepare(given: Any, **fields: Any) -> Prepared | Outcome:
    body = json.dumps({"model": "m", "input": given, **fields}).encode()
    return Preparer(Codec(), SERVING, "fp_x", Clock(), 4).prepare([TokenizeJob(LineRef("job", 0, 1), URL, body)])[0]


def test_inputs_lie_one_behind_the_other() -> None:
    """Each is a prompt by itself; nothing is shared, and nothing generated."""
    found = prepare(["hello", [7, 8], "hello"], encoding_format="base64")
    assert isinstance(found, Prepared)
    assert found.token_ids.tolist() == [*b"hello", 7, 8, *b"hello"]
    request = found.request
    assert (request.pieces, request.prompt_tokens, request.shared) == ((5, 2, 5), 12, None)
    assert request.sampling == Sampling(1, shape=Shape(pool="base64"))


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["a", ""], "empty_prompt", "input[1]"),
        (["a", "x" * 20], "context_length_exceeded", "input[1] has 20 tokens, 19 are the most"),
        (["x" * 15] * 3, "context_length_exceeded", "45 tokens together, the ring holds 40"),
    ],
)
def test_an_input_that_does_not_fit_fails_its_line_with_numbers(given: Any, code: str, words: str) -> None:
    """Which one, how long, and what to change."""
    found = prepare(given)
    assert isinstance(found, Outcome)
    error = json.loads(found.body)["error"]
    assert error["code"] == code
    assert words in error["message"]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_answer_is_a_list_of_vectors(form: str) -> None:
    """As the official client's own type reads it; the usage has no completion."""
    found = prepare(["hello", "you"], encoding_format=form)
    assert isinstance(found, Prepared)
    vectors = [(0.5, -1.25), (2.0, 3.5)]
    finished = Finished(
        found.request, (), "length", others=(Choice((), "length", vector=vectors[1]),), vector=vectors[0]
    )
    outcome = Preparer(Codec(), SERVING, "fp_x", Clock()).answer([finished])[0]
    body = json.loads(outcome.body)
    if form == "base64":
        told = [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in body["data"]]
        assert told == vectors
        return
    read = CreateEmbeddingResponse.model_validate(body)
    assert [(one.index, tuple(one.embedding)) for one in read.data] == list(enumerate(vectors))
    assert (read.usage.prompt_tokens, read.usage.total_tokens, read.object, read.model) == (8, 8, "list", "m")
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (8, 0)
