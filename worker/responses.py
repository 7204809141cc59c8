"""rules: the bodies a line is answered with, as users of the OpenAI API know them. Knows no tokenizer and no socket.

A result's body is the output line's ``response.body``; the broker writes the line around it. Clock is an argument.
"""

from __future__ import annotations

import json
from typing import Any

from common.messages import LineRef
from worker.structures import Finished, Outcome, Request

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


def answered(finished: Finished, text: str, created: float, fingerprint: str) -> Outcome:
    """The result of a request that ran to its end; ``text`` is all of its answer's tokens as text."""
    request = finished.request
    text = text if finished.text_chars is None else text[: finished.text_chars]
    reason = finished.reason
    body = _chat(request, text, reason) if request.url == CHAT_URL else _completion(request, text, reason)
    completion_tokens = len(finished.token_ids)
    body["created"] = int(created)
    body["model"] = request.model
    body["system_fingerprint"] = fingerprint or None
    body["usage"] = {
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": request.prompt_tokens + completion_tokens,
    }
    return Outcome(request.ref, "ok", 200, request.prompt_tokens, completion_tokens, _json(body))


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


def _chat(request: Request, text: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": f"chatcmpl-{_name(request.ref)}",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
    }


def _completion(request: Request, text: str, reason: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{_name(request.ref)}",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
    }


def _name(ref: LineRef) -> str:
    return f"{ref.job.replace('-', '')}-{ref.index}-{ref.attempt}"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json(body: dict[str, Any]) -> bytes:
    return _ENCODER.encode(body).encode("utf-8", errors="replace")
