"""What a body may ask for: everything is obeyed or refused by name, nothing is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.messages import LineRef
from worker.request_rules import COMPLETIONS_MAX_TOKENS_DEFAULT, OFF, RequestError, Serving, read, sampling
from worker.responses import CHAT_URL, COMPLETIONS_URL
from worker.structured import Structure
from worker.structures import Sampling, Shape

REF = LineRef("11111111-1111-4111-8111-111111111111", 3, 1)
SERVING = Serving("m", 100, 1000, (2,))
MANY = {str(one): 1 for one in range(limits.LOGIT_BIAS_MAX_COUNT + 1)}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(prompt_tokens: int = 10, **fields: Any) -> Sampling:
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    return sampling(read(REF, CHAT_URL, body, SERVING), prompt_tokens, SERVING)


def completion(prompt_tokens: int = 10, **fields: Any) -> Sampling:
    body = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    return sampling(read(REF, COMPLETIONS_URL, body, SERVING), prompt_tokens, SERVING)


def refusal(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(**fields)
    return caught.value


def test_what_is_asked_for_is_what_is_done() -> None:
    """All supported parameters at once."""
    found = chat(temperature=0.5, top_p=0.9, top_k=7, seed=42, max_tokens=5, stop=["a", "b"], n=1, stream=False)
    assert found == Sampling(5, 0.5, 0.9, 7, 42, ("a", "b"), (2,))


def test_what_is_asked_of_logits_is_what_is_done() -> None:
    """Penalties, bias, min_p, choices, stop ids, log probabilities; all of them off is no shape at all."""
    found = chat(
        max_tokens=5, seed=1, min_p=0.1, n=3, stop_token_ids=[7, 8], logit_bias={"5": -100, "6": 1.5},
        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.25, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    shape = Shape(1.25, 0.5, -1.0, ((5, -100.0), (6, 1.5)), 4)
    assert found == Sampling(5, 1.0, 1.0, 0, 1, (), (2, 7, 8), 0.1, 3, shape)
    off = {"min_p": 0, "n": 1, "logit_bias": {}, "presence_penalty": 0, "repetition_penalty": 1, "stop_token_ids": []}
    assert chat(max_tokens=5, seed=1, logprobs=False, **off) == Sampling(5, 1.0, 1.0, 0, 1, (), (2,))
    assert chat(logprobs=True).shape == Shape(logprobs=0)


def test_a_completion_counts_its_log_probabilities() -> None:
    """The legacy interface: a number of them, 0 for the token's own alone."""
    assert completion(logprobs=3).shape == Shape(logprobs=3)
    assert completion(logprobs=0).shape == Shape(logprobs=0)
    assert completion(logprobs=None).shape is completion(logprobs=False).shape is None
    assert refusal(completion, logprobs=6).code == "invalid_value"
    assert refusal(completion, logprobs=True).code == "invalid_type"
    assert refusal(completion, top_logprobs=2).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a|b", "json": None}}, Structure("structured_outputs", "a|b", regex=True)),
        ({"structured_outputs": {"json": {"type": "null"}}}, Structure("structured_outputs", '{"type": "null"}')),
        ({"guided_regex": "a+"}, Structure("guided_regex", "a+", regex=True)),
        ({"guided_json": '{"type":"null"}'}, Structure("guided_json", '{"type": "null"}')),
        ({"response_format": {"type": "json_object"}}, Structure("response_format", '{"type": "object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            Structure("response_format", '{"type": "null"}'),
        ),
    ],
    ids=str,
)
def test_a_form_is_asked_for_in_one_of_four_ways(fields: dict[str, Any], structure: Structure | None) -> None:
    """The service's response_format, and vLLM's names; both addresses. Not with drafts, nor over ranks, by name."""
    for url, extra in ((CHAT_URL, {"messages": MESSAGES}), (COMPLETIONS_URL, {"prompt": "hi"})):
        body = json.dumps({"model": "m", **extra, **fields}).encode()
        assert read(REF, url, body, SERVING).structure == structure
        if structure is not None:
            with pytest.raises(RequestError, match="--draft-tokens"):
                read(REF, url, body, replace(SERVING, drafting=True))
            with pytest.raises(RequestError, match="--tensor-parallel"):
                read(REF, url, body, replace(SERVING, spread=True))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_do_not_go_with_drafts(name: str) -> None:
    """A drafted token would be counted before it is taken: refused with the setting's name. The rest goes."""
    body = {"model": "m", "messages": MESSAGES, "logit_bias": {"5": 1}, "logprobs": True, "min_p": 0.1, "n": 2}
    drafting = replace(SERVING, drafting=True)
    assert read(REF, CHAT_URL, json.dumps(body).encode(), drafting).choices == 2
    with pytest.raises(RequestError, match="--draft-tokens") as caught:
        read(REF, CHAT_URL, json.dumps(body | {name: 1.5}).encode(), drafting)
    assert caught.value.param == name


def test_absent_parameters_are_what_the_service_documents() -> None:
    """Temperature 1, no nucleus, and all of the context that is left for a chat; 16 tokens for a completion."""
    found = chat()
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (1.0, 1.0, 0, 90)
    assert completion().max_tokens == COMPLETIONS_MAX_TOKENS_DEFAULT
    assert completion(prompt_tokens=95).max_tokens == 5
    assert chat(temperature=None, max_tokens=None, stop=None, tools=None).max_tokens == 90


def test_a_line_without_seed_has_one_of_its_own() -> None:
    """The same answer when it runs again after a death, another one than its neighbour's."""
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    again = read(LineRef(REF.job, 3, 2), CHAT_URL, body, SERVING)
    neighbour = read(LineRef(REF.job, 4, 1), CHAT_URL, body, SERVING)
    assert again.seed == chat().seed != neighbour.seed


def test_the_newer_name_of_max_tokens_counts() -> None:
    """max_completion_tokens; both are fine only if they agree."""
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    assert refusal(chat, max_completion_tokens=7, max_tokens=8).code == "invalid_value"
    assert refusal(completion, max_completion_tokens=7).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"top_k": 1.5}, "invalid_type", "top_k"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -5}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.0}, "invalid_type", "max_tokens"),
        ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ({"max_tokens": 91}, "context_length_exceeded", "messages"),
        ({"max_tokens": 10**9}, "context_length_exceeded", "messages"),
        ({"prompt_tokens": 100}, "context_length_exceeded", "messages"),
        ({"prompt_tokens": 0}, "empty_prompt", "prompt"),
        ({"stop": 5}, "invalid_type", "stop"),
        ({"stop": ["a", 5]}, "invalid_type", "stop"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["x"] * (limits.STOP_STRINGS_MAX_COUNT + 1)}, "invalid_value", "stop"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": limits.CHOICES_MAX_COUNT + 1}, "invalid_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"logprobs": 5}, "invalid_type", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 1}, "invalid_value", "top_logprobs"),
        ({"tools": {}, "tool_choice": "auto"}, "invalid_value", "tool_choice"),
        ({"tools": "all"}, "invalid_type", "tools"),
        ({"tools": ["f"]}, "invalid_type", "tools[0]"),
        ({"tools": [{"type": "code_interpreter"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "invalid_type", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f\ud800"}}]}, "invalid_unicode", "tools[0]"),
        ({"tools": [TOOL] * (limits.TOOLS_MAX_COUNT + 1)}, "invalid_value", "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "unsupported_parameter", "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "unsupported_parameter", "parallel_tool_calls"),
        ({"functions": [TOOL]}, "unsupported_parameter", "functions"),
        ({"response_format": "json"}, "unsupported_parameter", "response_format"),
        ({"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "invalid_type", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "invalid_type", "response_format"),
        ({"guided_regex": 5}, "invalid_type", "guided_regex"),
        ({"guided_regex": ""}, "invalid_type", "guided_regex"),
        ({"guided_json": "{"}, "invalid_value", "guided_json"),
        ({"guided_json": [1]}, "invalid_type", "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "invalid_value", "guided_regex"),
        ({"guided_grammar": "a"}, "unsupported_parameter", "guided_grammar"),
        ({"structured_outputs": "a"}, "invalid_type", "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "unsupported_parameter", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "unsupported_parameter", "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "invalid_value", "guided_regex"),
        ({"logit_bias": [5]}, "invalid_type", "logit_bias"),
        ({"logit_bias": {"hello": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": True}}, "invalid_type", "logit_bias"),
        ({"logit_bias": MANY}, "invalid_value", "logit_bias"),
        ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
        ({"frequency_penalty": "a"}, "invalid_type", "frequency_penalty"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        ({"min_p": 1.5}, "invalid_value", "min_p"),
        ({"stop_token_ids": 5}, "invalid_type", "stop_token_ids"),
        ({"stop_token_ids": [True]}, "invalid_type", "stop_token_ids"),
        ({"stop_token_ids": [1000]}, "invalid_value", "stop_token_ids"),
        ({"stop_token_ids": [1] * (limits.STOP_IDS_MAX_COUNT + 1)}, "invalid_value", "stop_token_ids"),
        ({"max_token": 5}, "unsupported_parameter", "max_token"),
        ({"prompt": "hi"}, "unsupported_parameter", "prompt"),
        ({"model": ""}, "missing_required", "model"),
        ({"messages": []}, "missing_messages", "messages"),
        ({"messages": "hi"}, "missing_messages", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "unsupported_parameter", "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "unsupported_parameter",
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "invalid_value", "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]},
         "invalid_value", "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_unicode", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_parameter",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "invalid_type",
            "messages[0].tool_calls",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    """A user who asked for it must not get an answer that ignored it."""
    found = refusal(chat, **fields)
    assert (found.code, found.param, found.status_code) == (code, param, 400)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, off in OFF.items() for value in off])
def test_a_parameter_that_is_off_is_no_reason_to_refuse(name: str, value: Any) -> None:
    """Clients write out defaults."""
    assert chat(**{name: value}).max_tokens == 90


def test_a_context_that_is_too_short_says_its_numbers() -> None:
    """A7: refused at once, with the arithmetic."""
    words = refusal(chat, prompt_tokens=60, max_tokens=50).message
    assert "100 tokens" in words
    assert "110 tokens (60 in the messages, 50 in the completion)" in words


def test_another_model_is_not_found() -> None:
    """A line for another worker's model."""
    found = refusal(chat, model="other")
    assert (found.code, found.status_code) == ("model_not_found", 404)


def test_an_empty_nucleus_is_the_likeliest_token() -> None:
    """top_p 0 is allowed by the service."""
    assert (chat(top_p=0).temperature, chat(top_p=0).top_p) == (0.0, 1.0)
    assert chat(top_k=-1).top_k == 0
    assert chat(seed=-1).seed >= 0


def test_text_parts_and_the_newer_system_role_are_understood() -> None:
    """What current clients send."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    asked = read(REF, CHAT_URL, json.dumps({"model": "m", "messages": messages}).encode(), SERVING)
    assert asked.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
    )


def test_tools_go_to_the_template_unless_they_are_not_to_be_called() -> None:
    """tool_choice auto, which is what tools alone mean, and none."""

    def tools(**fields: Any) -> tuple[Any, ...]:
        return read(REF, CHAT_URL, json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), SERVING).tools

    assert tools(tools=[TOOL]) == tools(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True) == (TOOL,)
    assert tools(tools=[TOOL], tool_choice="none") == tools(tools=[]) == tools() == ()


def test_calls_made_before_are_part_of_the_conversation() -> None:
    """Arguments become the object that templates expect; content may be missing beside a call."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
    ]
    asked = read(REF, CHAT_URL, json.dumps({"model": "m", "messages": messages}).encode(), SERVING)
    assert asked.messages is not None
    made = call | {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert asked.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "18 C", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("hi", "hi", None), (["hi"], "hi", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, text: str | None, ids: tuple[int, ...] | None) -> None:
    """Both forms of the legacy interface, one prompt a line."""
    asked = read(REF, COMPLETIONS_URL, json.dumps({"model": "m", "prompt": prompt}).encode(), SERVING)
    assert (asked.prompt, asked.prompt_ids) == (text, ids)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, "missing_prompt"),
        (5, "invalid_type"),
        (["a", "b"], "unsupported_parameter"),
        ([[1], [2]], "unsupported_parameter"),
        ([1, 1000], "invalid_value"),
        ([-1], "invalid_value"),
        ([True], "invalid_value"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, code: str) -> None:
    """Several prompts in a line would need several choices; a token id must be one."""
    assert refusal(completion, prompt=prompt).code == code


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"a": NaN}', b"\xff{}", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_no_object_fails_alone(body: bytes) -> None:
    """Whatever the bytes are, they cost their own line and nothing else."""
    with pytest.raises(RequestError) as caught:
        read(REF, CHAT_URL, body, SERVING)
    assert caught.value.code in ("invalid_json", "missing_required")


def test_an_address_that_is_not_served_is_refused() -> None:
    """A job for something else on a worker that generates."""
    with pytest.raises(RequestError) as caught:
        read(REF, "/v1/moderations", b"{}", SERVING)
    assert caught.value.code == "invalid_url"
