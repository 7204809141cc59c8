"""rules: the bodies a line is answered with, as users of the OpenAI API know them. Knows no tokenizer and no socket.

A result's body is the output line's ``response.body``; the broker writes the line around it. Clock is an argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from common import limits, openai_lines
from common.messages import LineRef, Result
from worker import logprobs, responses_api
from worker.embeddings import embedded
from worker.structures import Choice, Finished, Outcome, Request
from worker.tool_calls import calls_in

_NO_PIECES: Mapping[int, bytes] = MappingProxyType({})
CHAT_URL, COMPLETIONS_URL = openai_lines.CHAT, openai_lines.COMPLETIONS
RESPONSES_URL, EMBEDDINGS_URL = openai_lines.RESPONSES, openai_lines.EMBEDDINGS


def answered(
    finished: Finished, texts: Sequence[str], created: float, fingerprint: str, pieces: Mapping[int, bytes] = _NO_PIECES
) -> Outcome:
    """The result of a request that ran to its end; ``texts`` are all tokens of each of its answers as text, ``pieces``
    the bytes of each token that log probabilities are told of."""
    request, choices = finished.request, finished.choices
    prompt_tokens, completion_tokens = request.prompt_tokens, sum(len(choice.token_ids) for choice in choices)
    if request.url == EMBEDDINGS_URL:
        encoded = _json(embedded(finished))
    elif request.url == RESPONSES_URL:
        said = texts[0][: choices[0].text_chars]
        encoded = _json(responses_api.response(finished, said, _name(request.ref), created))
    else:
        written = [
            _choice(request, index, choice, text, pieces)
            for index, (choice, text) in enumerate(zip(choices, texts, strict=True))
        ]
        body = (_CHAT if request.url == CHAT_URL else _COMPLETION) % (
            _name(request.ref), ",".join(written), created, _text(request.model),
            _text(fingerprint) if fingerprint else "null", prompt_tokens, completion_tokens,
            prompt_tokens + completion_tokens,
        )  # fmt: skip
        encoded = body.encode("utf-8", errors="replace")
    if len(encoded) > limits.LINE_MAX_BYTES:
        words = f"the answer has {len(encoded)} bytes; {limits.LINE_MAX_BYTES} are the most: ask for less of it"
        return failed(request.ref, 400, "answer_too_long", words, None, prompt_tokens)
    return Outcome(request.ref, "ok", 200, prompt_tokens, completion_tokens, encoded)


def _choice(request: Request, index: int, choice: Choice, text: str, pieces: Mapping[int, bytes]) -> str:
    text = text[: choice.text_chars]
    chat = request.url == CHAT_URL
    told = "null"
    if request.sampling.shape is not None and request.sampling.shape.logprobs >= 0:
        told = _ENCODER.encode((logprobs.of_chat if chat else logprobs.of_completion)(choice, pieces))
    if not chat:
        return _COMPLETION_CHOICE % (index, _text(text), told, _text(choice.reason))
    content, calls = calls_in(text, request.tools)
    if not calls:
        return _CHAT_CHOICE % (index, _text(text), "", told, _text(choice.reason))
    listed = [
        {
            "id": f"call_{_name(request.ref)}-{index}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    reason = "tool_calls" if choice.reason == "stop" else choice.reason
    written = f',"tool_calls":{_ENCODER.encode(listed)}'
    return _CHAT_CHOICE % (index, _text(content) if content else "null", written, told, _text(reason))


def failed(
    ref: LineRef, status_code: int, code: str, message: str, param: str | None = None, prompt_tokens: int = 0
) -> Outcome:
    """The result of a line that cannot be run as it is (4xx: its own fault) or that failed here (5xx)."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Outcome(ref, "failed", status_code, prompt_tokens, 0, _json({"error": error}))


def cancelled(ref: LineRef, prompt_tokens: int = 0, completion_tokens: int = 0) -> Outcome:
    """The answer to a line that was told to stop before it had a result."""
    return Outcome(ref, "cancelled", 0, prompt_tokens, completion_tokens, b"")


_text = json.encoder.encode_basestring
"""A JSON string of a str."""
_REST = (
    ',"choices":[%s],"created":%d,"model":%s,"system_fingerprint":%s,'
    '"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
)
_CHAT = '{"id":"chatcmpl-%s","object":"chat.completion"' + _REST
_COMPLETION = '{"id":"cmpl-%s","object":"text_completion"' + _REST
_TOLD = ',"logprobs":%s,"finish_reason":%s}'
_CHAT_CHOICE = '{"index":%d,"message":{"role":"assistant","content":%s,"refusal":null%s}' + _TOLD
_COMPLETION_CHOICE = '{"index":%d,"text":%s' + _TOLD
"""A body is the same words around a few values each time: written out, it costs a tenth of encoding it from parts."""


def result_of(outcome: Outcome, body: bytes | None = None) -> Result:
    """The outcome as a DONE carries it, with all of its body or, of a long one, the first part."""
    ref, status, status_code, prompt_tokens, completion_tokens, whole, notes = outcome
    carried = whole if body is None else body
    return Result(ref, status, status_code, prompt_tokens, completion_tokens, len(whole), carried, notes)


def _name(ref: LineRef) -> str:
    return f"{ref.job.replace('-', '')}-{ref.index}-{ref.attempt}"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json(body: dict[str, Any]) -> bytes:
    return _ENCODER.encode(body).encode("utf-8", errors="replace")
