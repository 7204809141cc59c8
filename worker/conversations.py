"""rules: the conversation of a chat request, as a model's template takes it, or why it is none.

Refused by name: roles, parts and fields that no template of a text model could write. Knows no template.
"""

from __future__ import annotations

from typing import Any

from worker.parameters import RequestError, text

ROLES = frozenset({"system", "developer", "user", "assistant"})
CONVERSATION = frozenset({"messages"})
"""The parameters that are read here."""


def read_messages(asked: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The conversation as a chat template takes it."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("missing_messages", "messages must be a list of at least one message", "messages")
    return tuple([_message(one, f"messages[{number}]") for number, one in enumerate(messages)])


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError("invalid_type", f"{where} must be an object", where)
    role = message.get("role")
    if role not in ROLES:
        code = "unsupported_parameter" if role in ("tool", "function") else "invalid_value"
        raise RequestError(code, f"{where}.role must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, [], ""):
            raise RequestError(
                "unsupported_parameter", f"{where}.{name[:200]} is not supported", f"{where}.{name[:200]}"
            )
    # templates know three roles; the newer name of the first means the same to a model without one of its own
    out: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message, where)}
    if isinstance(message.get("name"), str):
        out["name"] = text(message["name"], f"{where}.name")
    return out


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return text(content, f"{where}.content")
    if not isinstance(content, list):
        raise RequestError("invalid_type", f"{where}.content must be text", f"{where}.content")
    pieces = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                "unsupported_parameter", f"{where}.content may hold parts of type text only", f"{where}.content"
            )
        pieces.append(text(part["text"], f"{where}.content"))
    return "".join(pieces)
