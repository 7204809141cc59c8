"""Drafted tokens: looked up where the text said the same before, taken only as far as the model says them too."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.drafts import LONGEST_MATCH_TOKENS, SHORTEST_MATCH_TOKENS, Drafts, DraftText, confirmed

IDS = st.integers(0, 3) | st.sampled_from([0x01010101, 0x01010100, 0x00010101, 2**31 - 1])
"""Few, so that ends repeat; and some whose bytes look like the shifted bytes of others."""


def _plain(text: list[int], most: int) -> tuple[int, ...]:
    """The rule word for word, by trying every place."""
    for size in range(min(LONGEST_MATCH_TOKENS, len(text) - 1), SHORTEST_MATCH_TOKENS - 1, -1):
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[-size:]:
                return tuple(text[at + size : at + size + most])
    return ()


@given(prompt=st.lists(IDS, min_size=1, max_size=40), added=st.lists(IDS, max_size=8), most=st.integers(1, 9))
def test_a_proposal_is_what_followed_the_latest_longest_match(prompt: list[int], added: list[int], most: int) -> None:
    """Against the rule tried at every place; bytes that match between two tokens are no match."""
    text = DraftText(array("i", prompt))
    text.add(added)
    assert text.propose(most) == _plain(prompt + added, most)
    assert text.last == (prompt + added)[-1]
    assert len(text) == len(prompt) + len(added)


def test_control_a_match_across_two_tokens_is_none() -> None:
    """0x01010101 0x01010101 holds itself at every byte: only whole tokens count."""
    text = DraftText(array("i", [0x01010101, 0x01010101, 5]))
    assert text.propose(3) == ()


@given(truth=st.lists(st.integers(0, 2), min_size=1, max_size=30), most=st.integers(1, 6), ask=st.data())
def test_a_text_is_the_same_with_any_drafts(truth: list[int], most: int, ask: st.DataObject) -> None:
    """Whatever is proposed, right or wrong, the tokens taken are the model's own, in order, and one a pass at least."""
    taken: list[int] = []
    while len(taken) < len(truth):
        room = len(truth) - len(taken) - 1
        drafts = ask.draw(st.lists(st.integers(0, 2), max_size=min(most, room)))
        behind = [taken + drafts[:count] for count in range(len(drafts) + 1)]
        sampled = [truth[len(text)] if text == truth[: len(text)] else -1 for text in behind]  # the model's word
        taken += sampled[: confirmed(drafts, sampled) + 1]
    assert taken == truth


def test_control_taking_one_draft_too_many_changes_the_text() -> None:
    """The first token that differs is the model's, and nothing behind it is."""
    assert confirmed([7, 8, 9], [7, 5, 9, 1]) == 1
    assert confirmed([7], [7, 4]) == 1
    assert confirmed([], [3]) == 0


def test_a_requests_end_tells_what_drafts_did_for_it() -> None:
    """In life: ``haulier explain`` of a line with --draft-tokens: tokens a pass, of its own and of no other request."""
    drafts = Drafts(3)
    for number in (1, 2, 3):
        drafts.begin(number, array("i", [7, 8, 9]))
    drafts.landed(1, (), (4,))
    drafts.landed(1, (4, 5, 6), (5, 9, 1))
    drafts.landed(1, (9,), (2,))
    drafts.landed(2, (4, 5), (5, 1))
    assert drafts.end(1) == "drafts: 3 tokens in 2 passes, 1.50 a pass; 1 of 2 proposed tokens taken"
    assert drafts.end(2) == "drafts: 2 tokens in 1 pass, 2.00 a pass; 1 of 1 proposed tokens taken"
    assert drafts.end(3) == "", "it never decoded"
    assert drafts.counts == (3, 3, 2)
