"""Where an answer ends: ids, strings across tokens, inside tokens, half characters, max_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from worker.engine.stopping import Answer
from worker.structures import Sampling

PIECES = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"abc", b"c", b" "]


def decode(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: pieces joined, half characters as the replacement character."""
    return b"".join(PIECES[one] for one in ids).decode(errors="replace")


def answer_of(tokens: Sequence[int], **sampling: object) -> Answer:
    """Feed tokens until it ends."""
    answer = Answer(Sampling(**({"max_tokens": len(tokens)} | sampling)), decode)  # type: ignore[arg-type]
    for token in tokens:
        if answer.add(token):
            break
    return answer


def text_of(answer: Answer) -> str:
    return decode(answer.token_ids)[: answer.text_chars]


def test_a_stop_string_across_tokens_is_found() -> None:
    """In life: a stop string that no single token holds."""
    answer = answer_of([0, 8, 2, 7, 0], stop=("bc",))
    assert (answer.reason, text_of(answer), answer.text_chars) == ("stop", "a a", 3)


def test_a_cut_at_a_token_needs_no_characters() -> None:
    """In life: the stop string begins where a token begins."""
    answer = answer_of([0, 8, 6], stop=("abc",))
    assert (answer.token_ids, answer.text_chars) == ([0, 8], None)


def test_a_stop_at_the_first_token_leaves_nothing() -> None:
    """In life: the answer is empty, by string or by id."""
    assert answer_of([6, 0], stop=("abc",)).token_ids == []
    by_id = answer_of([6, 0], stop_ids=(6,))
    assert (by_id.token_ids, by_id.reason) == ([], "stop")


def test_a_surplus_token_is_refused() -> None:
    """The engine drops surplus tokens; one that arrives all the same is a bug."""
    answer = answer_of([0], stop=("x",))
    with pytest.raises(InvariantError):
        answer.add(1)
    with pytest.raises(InvariantError):
        Answer(Sampling(3, stop=("x",)), None)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["ab", "ba", "c a", "é", "aé", "bb", "\ufffd"]), max_size=3),
)
def test_incremental_is_what_a_whole_look_finds(tokens: list[int], stops: list[str]) -> None:
    """Against the oracle: decode everything after each token and search; half characters wait for their end."""
    answer = answer_of(tokens, stop=tuple(stops))
    text = decode(answer.token_ids)[: answer.text_chars]
    whole = decode(tokens)
    assert whole.startswith(text)
    if answer.reason == "stop":
        assert any(whole[len(text) :].startswith(stop) for stop in stops)
    assert not any(stop in text for stop in stops)
