"""Bodies as users of the service know them."""

from __future__ import annotations

import json
import math

import pytest

from common import limits
from common.messages import LineRef
from worker import responses
from worker.structures import Finished, Request, Sampling, Shape, TokenLogprob

REF = LineRef("11111111-1111-4111-8111-111111111111", 3, 2)


def finished(url: str, reason: str = "stop", text_chars: int | None = None) -> Finished:
    return Finished(Request(REF, url, "m", 7, Sampling(5)), (1, 2, 3), reason, text_chars=text_chars)


def test_a_chat_answer_has_all_its_fields() -> None:
    """What the official client's types require."""
    outcome = responses.answered(finished(responses.CHAT_URL), ["hi — é"], 1700000000.9, "fp_x")
    body = json.loads(outcome.body)
    assert (outcome.status, outcome.status_code, outcome.prompt_tokens, outcome.completion_tokens) == ("ok", 200, 7, 3)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi — é", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert (body["created"], body["model"], body["system_fingerprint"]) == (1700000000, "m", "fp_x")
    assert body["id"].startswith("chatcmpl-")


def test_a_completion_has_text() -> None:
    """The legacy interface."""
    body = json.loads(responses.answered(finished(responses.COMPLETIONS_URL, "length"), ["hi"], 0, "").body)
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "hi")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["system_fingerprint"] is None


def test_log_probabilities_are_told_as_the_service_tells_them() -> None:
    """Token, logprob, bytes, top_logprobs; a token that is half a character; a probability of nothing."""
    sampling = Sampling(5, shape=Shape(logprobs=2))
    request = Request(REF, responses.CHAT_URL, "m", 7, sampling)
    told = (TokenLogprob(-0.5, ((1, -0.5), (2, -1.5))), TokenLogprob(-math.inf, ((2, -0.1), (1, -2.0))))
    one = Finished(request, (1, 2), "stop", logprobs=told)
    body = json.loads(responses.answered(one, ["hi\ufffd"], 0, "", {1: b"hi", 2: b"\xc3"}).body)
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "hi",
        "logprob": -0.5,
        "bytes": [104, 105],
        "top_logprobs": [
            {"token": "hi", "logprob": -0.5, "bytes": [104, 105]},
            {"token": "\ufffd", "logprob": -1.5, "bytes": [0xC3]},
        ],
    }
    assert (second["token"], second["logprob"]) == ("\ufffd", -9999.0)


def test_calls_of_offered_tools_are_told_as_such() -> None:
    """tool_calls, with what was said before them as content; the reason is theirs if the answer ended by itself."""
    text = 'So:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    one = finished(responses.CHAT_URL)
    offered = one._replace(request=one.request._replace(tools=("weather",)))
    choice = json.loads(responses.answered(offered, [text], 0, "").body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    call = choice["message"]["tool_calls"][0]
    assert (call["type"], call["id"][:5]) == ("function", "call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    plain = json.loads(responses.answered(one, [text], 0, "").body)["choices"][0]
    assert (plain["message"]["content"], plain["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in plain["message"]
    alone = json.loads(responses.answered(offered, [text[4:]], 0, "").body)["choices"][0]
    assert alone["message"]["content"] is None


def test_an_answer_too_long_for_a_line_fails_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: n and top_logprobs over a long answer; the broker would refuse the result. Control: a byte less goes."""
    one = finished(responses.CHAT_URL)
    size = len(responses.answered(one, ["x" * 1000], 0, "").body)
    monkeypatch.setattr(limits, "LINE_MAX_BYTES", size)
    assert responses.answered(one, ["x" * 1000], 0, "").status_code == 200
    monkeypatch.setattr(limits, "LINE_MAX_BYTES", size - 1)
    found = responses.answered(one, ["x" * 1000], 0, "")
    assert (found.status, json.loads(found.body)["error"]["code"]) == ("failed", "answer_too_long")


def test_an_answer_ends_where_its_stop_string_begins() -> None:
    """The stop string starts in the middle of a token."""
    body = json.loads(responses.answered(finished(responses.CHAT_URL, text_chars=4), ["abcdEND"], 0, "").body)
    assert body["choices"][0]["message"]["content"] == "abcd"


def test_a_failure_says_code_and_parameter() -> None:
    """A line's own fault, and one of ours."""
    mine = json.loads(responses.failed(REF, 400, "invalid_value", "words", "n").body)["error"]
    assert mine == {"message": "words", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    ours = responses.failed(REF, 500, "engine_error", "words")
    assert json.loads(ours.body)["error"]["type"] == "server_error"
    assert (ours.status, ours.status_code) == ("failed", 500)


def test_a_body_is_one_line_of_json_whatever_the_text() -> None:
    """Half characters and line ends in a model's answer must not break an output file."""
    outcome = responses.answered(finished(responses.CHAT_URL), ["a\nb\u2028c\ud800"], 0, "")
    assert b"\n" not in outcome.body
    assert json.loads(outcome.body)["choices"][0]["message"]["content"].startswith("a\nb\u2028c")


def test_a_cancelled_line_has_no_body() -> None:
    """It is answered all the same."""
    assert responses.cancelled(REF) == responses.Outcome(REF, "cancelled", 0, 0, 0, b"")


@pytest.mark.parametrize("url", [responses.CHAT_URL, responses.COMPLETIONS_URL])
def test_no_name_or_text_can_end_its_string(url: str) -> None:
    """A model named by a path on some other system, an answer full of quotes and percent signs."""
    nasty = '"}\\%s%d\x00\n{"'
    one = finished(url)._replace(request=finished(url).request._replace(model=nasty))
    body = json.loads(responses.answered(one, [nasty], 0, nasty).body)
    choice = body["choices"][0]
    text = choice["message"]["content"] if url == responses.CHAT_URL else choice["text"]
    assert (body["model"], body["system_fingerprint"], text) == (nasty, nasty, nasty)
