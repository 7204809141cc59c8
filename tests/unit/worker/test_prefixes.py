"""H5: what requests of a job share of their prompts: always what they really begin with, and what spares most."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common import limits
from common.messages import LineRef
from tests.unit.worker.test_tokenizer import Clock, Codec
from worker.prefixes import Prefixes, common_tokens
from worker.request_rules import Serving
from worker.structures import Prepared, SharedPrefix, TokenizeJob
from worker.tokenizer import Preparer

PAGE = 4


def ids(*parts: tuple[int, int]) -> array[int]:
    """A prompt of parts (which, tokens): the same part is the same token ids."""
    out = array("i")
    for which, tokens in parts:
        out.extend(1000 * which + place for place in range(tokens))
    return out


def tokens(found: Sequence[SharedPrefix | None]) -> list[int]:
    return [0 if one is None else one.tokens for one in found]


def test_questions_on_a_document_share_it_in_whole_pages() -> None:
    """In life: a batch of questions on one text: also the first of the batch shares, and all share the same."""
    found = Prefixes(PAGE).share("j", [ids((1, 41), (10 + one, 5 + one)) for one in range(5)])
    assert tokens(found) == [40] * 5
    assert len({one.key for one in found if one is not None}) == 1


def test_two_documents_of_a_batch_are_two_shared_histories() -> None:
    """In life: lines of two texts in one batch, behind the same system prompt of a page: each shares its own text."""
    batch = [ids((0, 4), (1 + one % 2, 40), (10 + one, 3)) for one in range(6)]
    found = Prefixes(PAGE).share("j", batch)
    assert tokens(found) == [44] * 6
    assert len({one.key for one in found if one is not None}) == 2


def test_what_spares_most_is_shared() -> None:
    """In life: nine documents, one question each, behind a long system prompt, and two on one document."""
    batch = [ids((0, 20), (1 + one, 9)) for one in range(9)] + [ids((0, 20), (1, 9), (99, 2))]
    assert set(tokens(Prefixes(PAGE).share("j", batch))) == {20}


def test_later_batches_share_what_is_known() -> None:
    """In life: a long job comes in batches; two lines that happen to agree a little further make no history of their
    own, nearly the same as the one that is held."""
    book = Prefixes(PAGE)
    first = book.share("j", [ids((1, 40), (10, 9)), ids((1, 40), (11, 9))])
    second = book.share("j", [ids((1, 40), (12, 9)), ids((1, 40), (12, 9), (13, 1)), ids((1, 40), (14, 2))])
    assert set(first) == set(second)


def test_questions_that_come_one_by_one_find_each_other() -> None:
    """In life: a batch a line. The second question of a document finds the first among the prompts seen before, though
    both begin with a system prompt that is known already."""
    book = Prefixes(PAGE)
    book.share("j", [ids((0, 4), (1, 9)), ids((0, 4), (2, 9))])
    assert tokens(book.share("j", [ids((0, 4), (7, 60), (10, 3))])) == [4]
    assert tokens(book.share("j", [ids((0, 4), (7, 60), (11, 3))])) == [64]
    assert tokens(book.share("j", [ids((0, 4), (7, 60), (12, 3))])) == [64]


def test_jobs_share_nothing_with_each_other() -> None:
    """In life: two clients send the same text: neither's history is the other's."""
    book = Prefixes(PAGE)
    one = book.share("one", [ids((1, 40), (10, 3)), ids((1, 40), (11, 3))])
    other = book.share("other", [ids((1, 40), (10, 3))])
    assert (tokens(one), tokens(other)) == ([40, 40], [0])
    again = book.share("other", [ids((1, 40), (11, 3))])
    assert tokens(again) == [40]
    assert set(again).isdisjoint(one)


def test_the_whole_prompt_is_never_shared() -> None:
    """In life: the same line twice, of whole pages: a token is left to be computed, since it is what samples."""
    assert tokens(Prefixes(PAGE).share("j", [ids((1, 8)), ids((1, 8))])) == [4, 4]
    assert tokens(Prefixes(PAGE).share("j", [ids((1, 4)), ids((1, 4))])) == [0, 0]


def test_pages_of_no_tokens_share_nothing() -> None:
    """In life: a worker whose pools hold no shared history."""
    assert Prefixes(0).share("j", [ids((1, 40)), ids((1, 40))]) == [None, None]


prompts = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 13)), min_size=0, max_size=4), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(prompts, min_size=1, max_size=5))
def test_whoever_shares_really_begins_with_it(batches: list[list[list[tuple[int, int]]]]) -> None:
    """Over any batches: one key is one sequence of ids, each member begins with it, in whole pages, with a token left;
    and of two prompts of a batch that begin with the same page at least one shares it, or more."""
    book = Prefixes(PAGE)
    meant: dict[str, array[int]] = {}
    for batch in batches:
        made = [ids(*parts) for parts in batch]
        found = book.share("j", made)
        assert len(found) == len(made)
        for prompt, prefix in zip(made, found, strict=True):
            if prefix is None:
                continue
            assert prefix.tokens % PAGE == 0
            assert 0 < prefix.tokens < len(prompt)
            assert meant.setdefault(prefix.key, prompt[: prefix.tokens]) == prompt[: prefix.tokens]
        for one, prompt in enumerate(made):
            others = [other for other in range(len(made)) if other != one and len(made[other]) > PAGE]
            alike = [other for other in others if made[other][:PAGE] == prompt[:PAGE]]
            if len(prompt) > PAGE and found[one] is None:
                assert all(found[other] is not None for other in alike), "both run alone, for nothing"


@given(st.integers(0, 70_000), st.integers(0, 5), st.integers(0, 5))
def test_common_tokens_are_counted_exactly(common: int, mine: int, others: int) -> None:
    """At every length around a block's edge."""
    one = np.arange(common + mine, dtype=np.int32)
    other = np.concatenate((np.arange(common, dtype=np.int32), np.full(others, -1, np.int32)))
    assert common_tokens(one, other) == common


def test_prompts_that_share_nothing_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: a batch of lines: only what begins alike is compared, so that twice as many cost twice as much."""
    compared: list[int] = []
    original = Prefixes._pages
    monkeypatch.setattr(Prefixes, "_pages", lambda *asked: compared.append(1) or original(*asked))
    batch = [ids((one, 9)) for one in range(64)]
    assert tokens(Prefixes(PAGE).share("j", batch)) == [0] * 64
    assert not compared
    assert tokens(Prefixes(PAGE).share("j", [*batch, ids((5, 9), (70, 2))])) == [0] * 5 + [8] + [0] * 58 + [8]
    assert len(compared) == 1, "the control: those two are"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: a worker that runs for months: jobs that ended are forgotten, and prompts of a million tokens fit."""
    monkeypatch.setattr(limits, "PREFIXES_MAX_BYTES", 4_000)
    book = Prefixes(PAGE)
    for number in range(3 * limits.PREFIX_JOBS_MAX_COUNT):
        book.share(f"j{number}", [ids((number, 300)), ids((number, 300), (5, 3)), ids((9, 20))])
        assert book.nbytes <= 4_000
        assert len(book._jobs) <= limits.PREFIX_JOBS_MAX_COUNT
    book.share("huge", [ids((1, 5_000))])
    assert book.nbytes <= 4_000


def test_a_tokenized_batch_says_what_it_shares() -> None:
    """In life: from lines to requests: three lines of one job, one of another, with the same text."""
    preparer = Preparer(Codec(), Serving("m", 90, 256, ()), "fp_x", Clock(), PAGE)
    text = "a document of some length. "
    bodies = [("one", text + "what?"), ("one", text + "why?"), ("one", "else"), ("two", text + "what?")]
    jobs = [
        TokenizeJob(
            LineRef(job, index, 1),
            "/v1/completions",
            json.dumps({"model": "m", "prompt": body, "max_tokens": 3}).encode(),
        )
        for index, (job, body) in enumerate(bodies)
    ]
    found = [one.request.shared for one in preparer.prepare(jobs) if isinstance(one, Prepared)]
    assert tokens(found) == [28, 28, 0, 0]


def test_the_answers_to_one_prompt_share_it() -> None:
    """In life: n: the prompt's whole pages, if it shares nothing with other lines; not with one answer."""
    preparer = Preparer(Codec(), Serving("m", 90, 256, ()), "fp_x", Clock(), PAGE)

    def shared(text: str, **body: int) -> SharedPrefix | None:
        line = json.dumps({"model": "m", "prompt": text, "max_tokens": 3, **body}).encode()
        found = preparer.prepare([TokenizeJob(LineRef("one", 0, 1), "/v1/completions", line)])[0]
        assert isinstance(found, Prepared)
        return found.request.shared

    alone = shared("a prompt of its own", n=2)
    assert alone is not None
    assert alone.tokens == 18 // PAGE * PAGE
    assert shared("b prompt of its own") is None
    assert shared("b", n=2) is None


def test_a_job_that_loses_its_sharing_is_told_which_setting_would_do() -> None:
    """In life: --own-tokens 4, questions that need 9 of their own with what is left of a page: told once a job, with a
    number that would do. Control: with that number nothing is told."""
    text = "a document of some length. "

    def told(own_rows: int) -> list[dict[str, Any]]:
        preparer = Preparer(Codec(), Serving("m", 90, 256, ()), "fp_x", Clock(), PAGE, own_rows=own_rows)
        with capture_logs() as lines:
            for attempt in (1, 2):
                for job in ("one", "two"):
                    preparer.prepare(
                        [
                            TokenizeJob(
                                LineRef(job, index, attempt),
                                "/v1/completions",
                                json.dumps({"model": "m", "prompt": text + body, "max_tokens": 3}).encode(),
                            )
                            for index, body in enumerate(("what?", "why so?"))
                        ]
                    )
        return [dict(line) for line in lines]

    lost = told(PAGE)
    assert [(line["event"], line["job"], line["log_level"]) for line in lost] == [
        ("sharing_lost", "one", "warning"),
        ("sharing_lost", "two", "warning"),
    ]
    assert lost[0]["own_tokens_hold"] == PAGE
    need = lost[0]["own_part_needs_tokens"]
    enough = -(-need // PAGE) * PAGE
    assert f"--own-tokens to {enough} or more" in lost[0]["remedy"]
    assert told(enough) == []
    assert len(told(enough - PAGE)) == 2
