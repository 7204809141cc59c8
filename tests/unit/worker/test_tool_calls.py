"""Calls of tools in an answer's text: the one form, and all that only looks like it."""

from __future__ import annotations

import pytest

from worker.tool_calls import Call, calls_in

ONE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_calls_are_found_with_what_stands_before_them() -> None:
    """One, and several in a row."""
    assert calls_in(ONE, ("f",)) == ("", (Call("f", '{"a": 1}'),))
    assert calls_in(f"I ask.\n{ONE}\n{ONE}\n", ("f", "g")) == ("I ask.", (Call("f", '{"a": 1}'),) * 2)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        f"{ONE} and more",
        ONE.replace("</tool_call>", ""),
        ONE.replace("}}", "}"),
        ONE.replace('"f"', '"g"'),
        ONE.replace('"f"', "[]"),
        ONE.replace('{"a": 1}', '"a"'),
        ONE.replace('"name"', '"tool"'),
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        ONE + "<tool_call>{}</tool_call>",
    ],
    ids=lambda text: text[:40],
)
def test_what_is_not_of_the_form_stays_text(text: str) -> None:
    """Half a call is no call: the reader gets what the model wrote."""
    assert calls_in(text, ("f",)) == (text, ())
    assert calls_in(text, ()) == (text, ())
