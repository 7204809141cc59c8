"""The CPU's attention: against a plain computation, and the same bits wherever the rows lie."""

from __future__ import annotations

import pytest
import torch

from worker.engine.kernels import Spans, attend


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Float64, keys repeated, bottom-right causal."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 37), (5, 5), (7, 40), (300, 300), (300, 411)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_it_is_attention(rows: int, length: int, heads: tuple[int, int]) -> None:
    """Decode rows, whole prompts, chunks behind a history, with and without shared key heads."""
    torch.manual_seed(rows + length)
    query = torch.randn(rows, heads[0], 16)
    arena = torch.randn(2, length + 9, heads[1], 16)
    out = attend(query, arena[0], arena[1], Spans([0, rows], [5, length + 5], [length]), 0.3)
    wanted = plain(query, arena[0, 5 : 5 + length], arena[1, 5 : 5 + length], 0.3)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)


def test_the_address_of_rows_changes_no_bit() -> None:
    """H4: the same history at other rows of another arena, between other neighbours."""
    torch.manual_seed(0)
    query = torch.randn(4, 4, 8)
    one, other = torch.randn(2, 64, 2, 8), torch.randn(2, 256, 2, 8)
    for start, start_ in ((0, 100), (20, 32)):
        other[:, start_ : start_ + 17] = one[:, start : start + 17]
    first = attend(query, one[0], one[1], Spans([0, 3, 4], [0, 20, 37], [17, 17]), 0.4)
    second = attend(query, other[0], other[1], Spans([0, 3, 4], [100, 32, 49], [17, 17]), 0.4)
    assert torch.equal(first, second)
