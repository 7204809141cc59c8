"""shell: H5's one attention call over a shared history for all its contexts, joined with each one's own by log-sum-exp.

Softmax over a history in two parts is the two parts' softmax, weighed by the sum of exponentials of each: exact in real
numbers, rounded here in float32. Both routes make the same two calls over the same plan, so that their bits are equal
(H4). Rows that share nothing keep the own call's answer, bit for bit. Knows no queue and no plan.
"""

from __future__ import annotations

import torch

from worker.engine.kernels import Spans, attend_part


def attend_joined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Spans,
    shared: Spans,
    first_row: int,
    scale: float,
) -> torch.Tensor:
    """Attention of (tokens, query heads, head dim) as ``kernels.attend``, shaped as ``query``.

    ``own`` is each context's own history with its new rows, causal. The queries from ``first_row`` on are those of
    contexts that share a history: ``shared`` has one span a shared history, its ``query_starts`` counted from there,
    and each of its queries sees all of its rows.
    """
    out, lse = attend_part(query, key, value, own, scale, causal=True)
    there, there_lse = attend_part(query[first_row:], key, value, shared, scale, causal=False)
    joined = join(out[first_row:], lse[first_row:], there, there_lse)
    if first_row == 0:
        return joined
    return torch.cat((out[:first_row], joined))


def join(one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Two answers (tokens, query heads, head dim) over disjoint rows with their log-sum-exps (tokens, query heads):
    the answer over both, in the dtype of ``one``."""
    weight = torch.sigmoid(other_lse - one_lse).unsqueeze(-1)  # exp(other) / (exp(one) + exp(other))
    return torch.lerp(one.float(), other.float(), weight).to(one.dtype)
