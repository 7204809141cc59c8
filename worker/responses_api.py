"""rules: /v1/responses, text alone: its body as a chat's, and an answer as its ``response`` object.

What needs a service behind it (earlier responses, hosted tools, files) is refused by name. Knows no tokenizer.
"""

from __future__ import annotations

from typing import Any

from worker.parameters import RequestError, integer, text, unsupported
from worker.structures import Finished

CONVERTED = frozenset({"input", "instructions", "max_output_tokens", "text"})
OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "background": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "truncation": ("disabled",),
    "include": ([],),
    "top_logprobs": (0,),
    "previous_response_id": (),
    "conversation": (),
    "reasoning": ({},),
    "prompt": (),
    "max_tool_calls": (),
}
"""Known parameters that are not supported, with the values that leave them off (absent and null always do)."""
_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text")


def as_chat(asked: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat that answers it; what both have in common stays. Raises ``RequestError``."""
    chat = {name: value for name, value in asked.items() if name not in CONVERTED and name not in OFF}
    messages = []
    instructions = asked.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise RequestError("invalid_type", "instructions must be text", "instructions")
        messages.append({"role": "system", "content": text(instructions, "instructions")})
    chat["messages"] = messages + _input(asked.get("input"))
    chat["max_completion_tokens"] = integer(asked, "max_output_tokens", None, 1, 2**63 - 1)
    chat["response_format"] = _format(asked.get("text"))
    return chat


def _input(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": text(given, "input")}]
    if not isinstance(given, list) or not given:
        raise RequestError("missing_input", "input must be text or a list of at least one message", "input")
    return [_item(item, f"input[{place}]") for place, item in enumerate(given)]


def _item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError("invalid_type", f"{where} must be an object", where)
    if item.get("type") not in (None, "message"):
        raise unsupported(f"{where}.type must be message", f"{where}.type")
    if item.get("role") not in _ROLES:
        raise RequestError("invalid_value", f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    content = item.get("content")
    if isinstance(content, str):
        return {"role": item["role"], "content": text(content, f"{where}.content")}
    pieces = []
    for part in content if isinstance(content, list) else (None,):
        if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
            raise unsupported(f"{where}.content may be text, or parts of text, only", f"{where}.content")
        pieces.append(text(part["text"], f"{where}.content"))
    return {"role": item["role"], "content": "".join(pieces)}


def _format(given: Any) -> dict[str, Any] | None:
    """``text.format`` as a chat's response_format."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError("invalid_type", "text must be an object", "text")
    for name, value in given.items():
        if name != "format" and (name, value) != ("verbosity", "medium") and value is not None:
            raise unsupported(f"text.{name[:200]} is not supported", "text")
    form = given.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    if form is None or (isinstance(form, dict) and form.get("type") in ("text", "json_object")):
        return form
    raise unsupported("text.format.type must be text, json_object or json_schema", "text")


def response(finished: Finished, said: str, name: str, created: float) -> dict[str, Any]:
    """The object that is its answer; ``name`` tells it from all others."""
    request, choice = finished.request, finished.choices[0]
    whole = choice.reason == "stop"
    status = "completed" if whole else "incomplete"
    content = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{name}", "status": status, "role": "assistant", "content": [content]}
    made = len(choice.token_ids)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(created),
        "status": status,
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "model": request.model,
        "output": [message],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": request.prompt_tokens + made,
        },
    }
