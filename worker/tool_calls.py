"""rules: calls of tools in an answer's text, in the one form that is told apart for sure; anything else stays text.

The form: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen and others are trained to write
it, of tools that were offered, with nothing behind the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_OPENS = "<tool_call>"


class Call(NamedTuple):
    """``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


def calls_in(text: str, offered: Collection[str]) -> tuple[str, tuple[Call, ...]]:
    """What stands before the calls, and the calls; the whole text and none where it is not of the form."""
    start = text.find(_OPENS)
    if start < 0 or not offered:
        return text, ()
    calls, at = [], start
    while at < len(text):
        match = _CALL.match(text, at)
        call = None if match is None else _call(match[1], offered)
        if match is None or call is None:
            return text, ()
        calls.append(call)
        at = match.end()
    return text[:start].strip(), tuple(calls)


def _call(written: str, offered: Collection[str]) -> Call | None:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("name") not in offered or set(found) != {"name", "arguments"}:
        return None
    if not isinstance(found["arguments"], dict):
        return None
    return Call(found["name"], json.dumps(found["arguments"], ensure_ascii=False))
