"""The key of a beginning: questions about one document meet, documents are apart, short requests have none."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.prefixes import LEAST_CHARS, NO_KEY, prefix_key


def text(seed: int, chars: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh \n", k=chars))


def chat(*contents: Any, roles: str = "system user assistant user") -> dict[str, Any]:
    pairs = zip(roles.split(), contents, strict=False)
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in pairs]}


SYSTEM = text(1, 6_000)
SHAPES = {
    "one message": lambda document, question: chat(document + question, roles="user"),
    "behind a long system prompt": lambda document, question: chat(SYSTEM, document + question),
    "a turn of its own": lambda document, question: chat("Be brief.", document, "Ask.", question),
    "parts": lambda document, question: chat(
        "Be brief.", [{"type": "text", "text": document}, {"type": "text", "text": question}]
    ),
    "a completion": lambda document, question: {"model": "m", "prompt": document + question},
    "token ids": lambda document, question: {"prompt": [ord(char) for char in document + question]},
    "token ids in a list of one": lambda document, question: {"prompt": [[ord(char) for char in document + question]]},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_document_many_questions(shape: Any) -> None:
    """A contract of 40,000 characters and forty questions about each of two: one key a contract, in every shape."""
    first, second = text(2, 40_000), text(3, 40_000)
    questions = [text(100 + number, 20 + 10 * number) for number in range(40)]
    keys = {prefix_key(shape(first, question)) for question in questions}
    others = {prefix_key(shape(second, question)) for question in questions}
    assert (len(keys), len(others)) == (1, 1)
    assert NO_KEY not in keys | others
    assert not keys & others


def test_control_a_fixed_length_takes_documents_behind_one_prompt_for_the_same() -> None:
    """Control: the first 4,096 characters of all these are the system prompt's."""
    bodies = [chat(SYSTEM, text(number, 40_000)) for number in (2, 3)]
    heads = {"".join(message["content"] for message in body["messages"])[:4096] for body in bodies}
    assert len(heads) == 1
    assert len({prefix_key(body) for body in bodies}) == 2


def test_texts_on_both_sides_of_a_power_of_two_are_the_ones_that_part() -> None:
    """What the rule costs: a document of just below 2^16 characters has two keys, never more."""
    document = text(4, 2**16 - 200)
    keys = {prefix_key({"prompt": document + text(9, chars)}) for chars in range(0, 2_000, 50)}
    assert len(keys) == 2


def test_short_requests_have_no_key() -> None:
    """Thousands of short questions behind a short prompt go wherever there is room."""
    assert prefix_key({"prompt": text(1, 2 * LEAST_CHARS - 1)}) == NO_KEY
    assert prefix_key({"prompt": text(1, 2 * LEAST_CHARS)}) != NO_KEY
    assert prefix_key({}) == NO_KEY


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("role", "content", "text")), inner),
    max_leaves=8,
)


@given(messages=ODD, prompt=ODD, long=st.booleans())
def test_any_json_has_a_key_that_the_store_can_keep(messages: Any, prompt: Any, long: bool) -> None:
    """Half surrogates, numbers for texts, nested lists: what is wrong with a body is for the worker to say."""
    body = {"messages": [messages, {"role": "user", "content": "\ud800" * 5_000 if long else "x"}], "prompt": prompt}
    assert 0 <= prefix_key(body) < 2**63
    assert (prefix_key(body) != NO_KEY) is long
