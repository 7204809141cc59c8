"""/v1/responses: bodies as chats, answers as the official client reads them, the rest refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from common.messages import LineRef
from worker import responses
from worker.request_rules import RequestError, Serving, read, sampling
from worker.structured import Structure
from worker.structures import Finished, Request, Sampling

REF = LineRef("11111111-1111-4111-8111-111111111111", 3, 1)
SERVING = Serving("m", 100, 1000, (2,))


def asked(**fields: Any) -> Any:
    return read(REF, responses.RESPONSES_URL, json.dumps({"model": "m", "input": "hi", **fields}).encode(), SERVING)


def test_a_body_is_answered_as_the_chat_it_means() -> None:
    """Instructions come first; parts of text are joined; what both interfaces have is obeyed alike."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    found = asked(
        instructions="be brief",
        input=[{"role": "user", "content": parts}, {"type": "message", "role": "assistant", "content": "c"}],
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=4,
        metadata={"a": "b"},
        store=True,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": True}},
    )
    assert found.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    )
    assert sampling(found, 10, SERVING) == Sampling(5, 0.5, 0.9, 0, 4, (), (2,))
    assert found.structure == Structure("text", '{"type": "null"}')
    assert asked().messages == ({"role": "user", "content": "hi"},)
    assert sampling(asked(text={"format": {"type": "text"}}), 10, SERVING).max_tokens == 90


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "missing_input", "input"),
        ({"input": None}, "missing_input", "input"),
        ({"input": ["hi"]}, "invalid_type", "input[0]"),
        ({"input": "\ud800"}, "invalid_unicode", "input"),
        ({"input": [{"type": "function_call_output"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, "unsupported_parameter", "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_parameter",
         "input[0].content"),
        ({"instructions": 5}, "invalid_type", "instructions"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"response_format": {"type": "text"}}, "unsupported_parameter", "response_format"),
        ({"text": {"format": {"type": "xml"}}}, "unsupported_parameter", "text"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"stream": True}, "unsupported_parameter", "stream"),
    ],
)  # fmt: skip
def test_what_needs_more_than_text_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    """Nothing is ignored."""
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_is_a_response(reason: str, status: str) -> None:
    """As the official client's own type reads it."""
    request = Request(REF, responses.RESPONSES_URL, "m", 7, Sampling(5))
    outcome = responses.answered(Finished(request, (1, 2, 3), reason, text_chars=4), ["hi \u00e9!END"], 5.0, "fp")
    found = Response.model_validate_json(outcome.body)
    assert (found.status, found.output_text, found.object) == (status, "hi \u00e9", "response")
    assert (found.incomplete_details is None) == (status == "completed")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (7, 3, 10)
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (7, 3)
