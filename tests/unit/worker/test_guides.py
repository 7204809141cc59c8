"""Guides over a byte tokenizer: what may come next, what ends an answer, what the library refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.guides import Guides
from worker.parameters import RequestError
from worker.structured import Structure
from worker.structures import Guide

END = 256


@pytest.fixture(scope="module")
def guides() -> Guides:
    """A token a byte, and one that ends the answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)} | {"<end>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    global TOKENS
    TOKENS = {tokenizer.decode([number]): number for number in range(256)}
    return Guides(tokenizer.to_str(), 257, (END,))


TOKENS: dict[str, int] = {}


def allowed(guide: Guide) -> set[str]:
    row = np.zeros(guide.words, np.int32)
    guide.mask_into(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    names = {number: name for name, number in TOKENS.items()} | {END: "END"}
    return {names.get(int(one), "?") for one in np.flatnonzero(bits)}


def regex(text: str) -> Structure:
    return Structure("guided_regex", text, regex=True)


def test_what_may_come_next_follows_what_came(guides: Guides) -> None:
    """A choice of two words, to its end; a copy goes on by itself."""
    guide = guides.make(regex("yes|no|nope"))
    assert allowed(guide) == {"y", "n"}
    guide.take(TOKENS["n"])
    other = guide.copy()
    guide.take(TOKENS["o"])
    assert (allowed(guide), guide.ended) == ({"p", "END"}, False)
    for letter in "pe":
        guide.take(TOKENS[letter])
    assert guide.ended
    assert not guide.error
    assert allowed(other) == {"o"}


def test_a_schema_is_kept_to(guides: Guides) -> None:
    """An object with one number: braces, the name, digits, the end."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    guide = guides.make(Structure("response_format", json.dumps(schema | {"additionalProperties": False})))
    for letter in '{"a":5':
        assert letter in allowed(guide)
        guide.take(TOKENS[letter])
    assert {"}", "0"} < allowed(guide)
    assert '"' not in allowed(guide)
    guide.take(TOKENS["}"])
    assert guide.ended


def test_a_token_out_of_form_is_an_error(guides: Guides) -> None:
    """It cannot come, since it is masked; if it did, the request would fail and say why. Then nothing is masked."""
    guide = guides.make(regex("ab"))
    guide.take(TOKENS["z"])
    assert "grammar" in guide.error
    row = np.zeros(guide.words, np.int32)
    guide.mask_into(row)
    assert set(row.tolist()) == {-1}


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (regex("(["), "unclosed character class"),
        (regex("(?=a)b"), "look-around"),
        (Structure("guided_json", '{"type": "frob"}'), "frob"),
        (Structure("guided_json", '{"type": "string", "pattern": "("}'), "unclosed group"),
        (Structure("guided_json", '{"$ref": "http://elsewhere/schema"}'), ""),
        (Structure("guided_json", "{" * 3), ""),
        (Structure("guided_json", '{"type":"array","items":' * 300 + "{}" + "}" * 300), ""),
        (Structure("guided_json", '{"type": "string", "pattern": "\\ud800"}'), ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_form_that_cannot_be_kept_to_is_refused_with_the_reason(
    guides: Guides, structure: Structure, reason: str
) -> None:
    """The library's own words; a form that is huge or refers elsewhere costs its own line and nothing else."""
    with pytest.raises(RequestError, match="cannot be kept to") as caught:
        guides.make(structure)
    assert reason in caught.value.message
    assert caught.value.param == structure.param
