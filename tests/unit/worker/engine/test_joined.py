"""H5: two calls joined are attention over the whole history, for each row of a mixed step; controls that are not."""

from __future__ import annotations

import pytest
import torch

from common.errors import InvariantError
from tests.unit.worker.engine.test_kernels import plain
from worker.engine import joined
from worker.engine.joined import attend_joined, join
from worker.engine.kernels import Spans, attend, attend_part, lse_by_row

ALONE, LONG, SHORT = 9, 33, 12
"""Rows of a context that shares nothing, and of two shared histories."""
OWN = ((1, 5), (3, 3), (1, 40), (4, 11))
"""(new rows, own rows with them) of four contexts; two on each shared history."""
SCALE = 0.3


def mixed(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans, Spans, int]:
    """One step: a context alone with two new rows, then two on the long history, two on the short one."""
    torch.manual_seed(7)
    news, lengths = [2, *(new for new, _ in OWN)], [ALONE, *(own for _, own in OWN)]
    starts = [0]
    for new in news:
        starts.append(starts[-1] + new)
    firsts, at = [], 3
    for length in (*lengths, LONG, SHORT):
        firsts.append(at)
        at += length + 2
    query = torch.randn(starts[-1], 6, 16, dtype=dtype)
    key, value = torch.randn(2, at, 2, 16, dtype=dtype)
    own = Spans(starts, [*firsts[:5], 0], lengths)
    shared = Spans([0, 4, 9], [*firsts[5:], 0], [LONG, SHORT])
    return query, key, value, own, shared, 2


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Spans, shared: Spans) -> torch.Tensor:
    """Plain attention in float64, each context over its shared and its own rows in one piece."""
    found = []
    for index, length in enumerate(own.host_lengths):
        first = own.host_history_starts[index]
        rows = list(range(first, first + length))
        if index:
            which = (index - 1) // 2
            start = shared.host_history_starts[which]
            rows = [*range(start, start + shared.host_lengths[which]), *rows]
        part = query[own.host_query_starts[index] : own.host_query_starts[index + 1]]
        found.append(plain(part, key[rows], value[rows], SCALE))
    return torch.cat(found)


def test_joined_is_attention_over_both_parts() -> None:
    """In life: questions on two documents and a request alone decode, and are prefilled, in one step."""
    query, key, value, own, shared, first = mixed()
    out = attend_joined(query, key, value, own, shared, first, SCALE)
    torch.testing.assert_close(out.double(), whole(query, key, value, own, shared), atol=2e-6, rtol=1e-5)


def test_joined_in_half_precision_is_near_and_keeps_its_dtype() -> None:
    """In life: bfloat16 on a card; the weights are float32, only the two answers are rounded."""
    query, key, value, own, shared, first = mixed(torch.bfloat16)
    out = attend_joined(query, key, value, own, shared, first, SCALE)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), whole(query, key, value, own, shared), atol=0.03, rtol=0.03)


def test_rows_that_share_nothing_keep_their_bits() -> None:
    """In life: a request alone beside questions on a document: the step's other call is nothing to it."""
    query, key, value, own, shared, first = mixed()
    alone = attend(query, key, value, own, SCALE)[:first]
    assert torch.equal(attend_joined(query, key, value, own, shared, first, SCALE)[:first], alone)


def _plus_one(lse: torch.Tensor) -> torch.Tensor:
    return lse + 1


def _of_other_rows(lse: torch.Tensor) -> torch.Tensor:
    return lse.roll(1, 0)


@pytest.mark.parametrize("wrong", [_plus_one, _of_other_rows])
def test_control_a_wrong_log_sum_exp_is_another_answer(wrong, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """What the comparison above would not pass: sums that are not these rows'."""
    query, key, value, own, shared, first = mixed()
    monkeypatch.setattr(joined, "join", lambda one, a, other, b: join(one, a, other, wrong(b)))
    out = attend_joined(query, key, value, own, shared, first, SCALE)
    assert not torch.allclose(out.double(), whole(query, key, value, own, shared), atol=1e-3)


def test_control_causal_over_the_shared_rows_is_another_answer() -> None:
    """Every query sees the whole shared history: with a causal call most would miss its newest rows."""
    query, key, value, own, shared, first = mixed()
    one, one_lse = attend_part(query, key, value, own, SCALE, causal=True)
    other, other_lse = attend_part(query[first:], key, value, shared, SCALE, causal=True)
    out = join(one[first:], one_lse[first:], other, other_lse)
    assert not torch.allclose(out.double(), whole(query, key, value, own, shared)[first:], atol=1e-3)


def test_scores_far_apart_overflow_nothing() -> None:
    """In life: one part holds all the weight; exponentials are of differences from the larger one."""
    one, other = torch.ones(1, 2, 4), torch.full((1, 2, 4), 5.0)
    high, low = torch.full((1, 2), 900.0), torch.full((1, 2), -900.0)
    assert torch.equal(join(one, high, other, low), one)
    assert torch.equal(join(one, low, other, high), other)


def test_a_kernels_log_sum_exp_is_read_in_either_layout() -> None:
    """In life: releases of torch give (heads, tokens), or (contexts, heads, longest query) with padding."""
    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    spans = Spans((), (), (), query_starts=starts, longest_query=3)
    by_row = torch.arange(12.0).view(6, 2)
    padded = torch.full((3, 2, 3), -1.0)
    for context, (first, end) in enumerate(((0, 2), (2, 3), (3, 6))):
        padded[context, :, : end - first] = by_row[first:end].t()
    assert torch.equal(lse_by_row(by_row.t(), 6, 2, spans), by_row)
    assert torch.equal(lse_by_row(padded, 6, 2, spans), by_row)
    with pytest.raises(InvariantError, match="log-sum-exp of shape"):
        lse_by_row(torch.zeros(5, 2), 6, 2, spans)
