"""rules: the conversation of a chat request with its tools, as a model's template takes them, or why it is none.

Refused by name: roles, parts and fields that no template of a text model could write, and tool calls that would have to
be forced. Knows no template.
"""

from __future__ import annotations

import json
from typing import Any

from common import limits
from worker.parameters import RequestError, text, unsupported

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
CONVERSATION = frozenset({"messages", "tools", "tool_choice"})
"""The parameters that are read here."""
_FIELDS = {"assistant": ("role", "content", "name", "tool_calls"), "tool": ("role", "content", "name", "tool_call_id")}


def read_messages(asked: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The conversation as a chat template takes it."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("missing_messages", "messages must be a list of at least one message", "messages")
    return tuple([_message(one, f"messages[{number}]") for number, one in enumerate(messages)])


def read_tools(asked: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that the template is to tell of; none with ``tool_choice`` none."""
    tools, choice = asked.get("tools") or [], asked.get("tool_choice")
    if not isinstance(tools, list):
        raise RequestError("invalid_type", "tools must be a list", "tools")
    if len(tools) > limits.TOOLS_MAX_COUNT:
        raise RequestError("invalid_value", f"{len(tools)} tools; {limits.TOOLS_MAX_COUNT} are allowed", "tools")
    for number, tool in enumerate(tools):
        _tool(tool, f"tools[{number}]")
    if choice not in (None, "none", "auto"):
        raise unsupported(
            "tool_choice must be none or auto: a model cannot be forced to call a tool here", "tool_choice"
        )
    if choice == "auto" and not tools:
        raise RequestError("invalid_value", "tool_choice auto needs tools", "tool_choice")
    return () if choice == "none" else tuple(tools)


def _tool(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise RequestError("invalid_type", f"{where} must be an object", where)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type must be function", f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError("invalid_type", f"{where}.function must be an object with a name", f"{where}.function")
    try:
        text(json.dumps(tool, ensure_ascii=False), where)
    except RecursionError as deep:
        raise RequestError("invalid_value", f"{where} is nested too deeply", where) from deep


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError("invalid_type", f"{where} must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        code = "unsupported_parameter" if role == "function" else "invalid_value"
        raise RequestError(code, f"{where}.role must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    for name, value in message.items():
        if name not in _FIELDS.get(role, ("role", "content", "name")) and value not in (None, [], ""):
            raise unsupported(f"{where}.{name[:200]} is not supported", f"{where}.{name[:200]}")
    calls = _calls(message, where) if role == "assistant" else []
    content = "" if calls and message.get("content") is None else _content(message, where)
    # templates know the older name of this role, which means the same to a model without one of its own
    out: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = text(message[name], f"{where}.{name}")
    return out | ({"tool_calls": calls} if calls else {})


def _calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Calls that the assistant made before, their arguments as templates take them: as an object, not as its text."""
    calls = message.get("tool_calls") or []
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise RequestError("invalid_type", f"{where} must be a list", where)
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("invalid_type", f"{where} must hold objects with a function and its name", where)
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError) as bad:
            raise RequestError("invalid_value", f"{where}: arguments are not JSON text: {bad}", where) from bad
        if not isinstance(arguments, dict):
            raise RequestError("invalid_value", f"{where}: arguments are no JSON object", where)
        one = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            one["id"] = call["id"]
        text(json.dumps(one, ensure_ascii=False), where)
        found.append(one)
    return found


def _content(message: dict[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return text(content, f"{where}.content")
    if not isinstance(content, list):
        raise RequestError("invalid_type", f"{where}.content must be text", f"{where}.content")
    pieces = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise unsupported(f"{where}.content may hold parts of type text only", f"{where}.content")
        pieces.append(text(part["text"], f"{where}.content"))
    return "".join(pieces)
