"""rules: the bodies a line is answered with, as users of the OpenAI API know them. Knows no tokenizer and no socket.

A result's body is the output line's ``response.body``; the broker writes the line around it. Clock is an argument.
"""

from __future__ import annotations

import json
from typing import Any

from common.messages import LineRef, Result
from worker.structures import Finished, Outcome

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


def answered(finished: Finished, text: str, created: float, fingerprint: str) -> Outcome:
    """The result of a request that ran to its end; ``text`` is all of its answer's tokens as text."""
    request = finished.request
    text = text if finished.text_chars is None else text[: finished.text_chars]
    prompt_tokens, completion_tokens = request.prompt_tokens, len(finished.token_ids)
    body = (_CHAT if request.url == CHAT_URL else _COMPLETION) % (
        _name(request.ref), _text(text), _text(finished.reason), created, _text(request.model),
        _text(fingerprint) if fingerprint else "null", prompt_tokens, completion_tokens,
        prompt_tokens + completion_tokens,
    )  # fmt: skip
    return Outcome(request.ref, "ok", 200, prompt_tokens, completion_tokens, body.encode("utf-8", errors="replace"))


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
    ',"logprobs":null,"finish_reason":%s}],"created":%d,"model":%s,"system_fingerprint":%s,'
    '"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
)
_CHAT = (
    '{"id":"chatcmpl-%s","object":"chat.completion",'
    '"choices":[{"index":0,"message":{"role":"assistant","content":%s,"refusal":null}' + _REST
)
_COMPLETION = '{"id":"cmpl-%s","object":"text_completion","choices":[{"index":0,"text":%s' + _REST
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
