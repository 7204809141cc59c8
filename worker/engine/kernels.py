"""shell: one attention call a layer over rows of one arena, decode and prefill mixed, the kernel pinned by name.

Streamed and resident history go through the same call with the same shapes, strides and lengths; they differ only in
the address of the rows, so that their bits cannot differ (H4). CUDA: flash attention, variable lengths, explicitly
pinned: left to choose, the framework takes kernels that differ from run to run. CPU: plain torch over each context's
contiguous rows. ``attend_part`` gives the log-sum-exp of each query's scores beside its answer, so that attention over
two parts of a history can be joined (``joined``). Knows no queue, no slot and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from common.errors import InvariantError
from common.limits import BLOCK_STEP_TOKENS
from worker.engine.geometry import Geometry

_QUERY_BLOCK = 256
"""Query rows of one CPU call: bounds its mask, and later rows' keys are not read for earlier ones."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each context's queries and history lie. The int32 tensors are on the device (None on the CPU, which uses
    the host's numbers): ``query_starts`` and ``history_starts`` (contexts + 1,), ``lengths`` (contexts,).

    Context i has queries [query_starts[i], query_starts[i + 1]) and history rows
    [history_starts[i], history_starts[i] + lengths[i]) counted from the start of the rows given to ``attend``; where
    the call is causal, its queries are the last ones of its history (bottom-right).
    """

    host_query_starts: Sequence[int]
    host_history_starts: Sequence[int]
    host_lengths: Sequence[int]
    query_starts: torch.Tensor | None = None
    history_starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    longest_query: int = 0
    longest_history: int = 0


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    """Causal attention of (tokens, query heads, head dim) over rows (rows, kv heads, head dim); shaped as ``query``."""
    if query.is_cuda:
        return _flash(query, key, value, spans, scale, True)[0]
    return _plain(query, key, value, spans, scale)


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same call, with the log-sum-exp of each query's scores, (tokens, query heads) float32, beside its answer.
    Not ``causal``: every query sees all of its context's rows."""
    if query.is_cuda:
        out, lse = _flash(query, key, value, spans, scale, causal)
        return out, lse_by_row(lse, query.shape[0], query.shape[1], spans)
    return _plain_part(query, key, value, spans, scale, causal)


def attend_square(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many queries (tokens, query heads, head dim) of one context over rows (rows, kv heads, head dim): the answer, and
    the log-sum-exp of each query's scores, (tokens, query heads) float32. ``causal``: as many rows as queries.

    CUDA: cuDNN's kernel, pinned; more than twice as fast as flash attention's at these shapes (H200), with equal bits
    from run to run and wherever the rows lie. ``long_attention`` says whether it is there.
    """
    if query.is_cuda:
        return _cudnn(query, key, value, scale, causal)
    rows = key.shape[0]
    return _plain_part(query, key, value, Spans([0, query.shape[0]], [0, rows], [rows]), scale, causal)


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    folded = (one.transpose(0, 1)[None] for one in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*folded, None, True, 0.0, causal, False, scale=scale)
    return found[0][0].transpose(0, 1), found[1].reshape(query.shape[1], query.shape[0]).t()


def long_attention(where: torch.device, geometry: Geometry, dtype: torch.dtype) -> bool:
    """Whether ``attend_square`` is there for these heads: tried once, against flash attention; on CUDA alone."""
    if where.type != "cuda":
        return False
    rows, chance = BLOCK_STEP_TOKENS, torch.Generator(where).manual_seed(1)
    query, key, value = (
        torch.randn((rows, heads, geometry.head_dim), generator=chance, device=where, dtype=dtype)
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
    )
    starts = torch.tensor([0, rows], dtype=torch.int32, device=where)
    spans = Spans([], [], [], starts, starts, starts[1:], rows, rows)
    scale, close = geometry.head_dim**-0.5, True
    try:
        for causal in (True, False):
            wanted = attend_part(query, key, value, spans, scale, causal=causal)
            found = attend_square(query, key, value, scale, causal=causal)
            pairs = zip(found, wanted, strict=True)
            close &= all(torch.allclose(one.float(), other.float(), atol=0.02) for one, other in pairs)
    except RuntimeError:  # cuDNN has no kernel for these heads, or is too old
        return False
    return close


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        spans.query_starts,
        spans.history_starts,
        spans.longest_query,
        spans.longest_history,
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=spans.lengths,
    )
    return found[0], found[1]


def lse_by_row(lse: torch.Tensor, tokens: int, heads: int, spans: Spans) -> torch.Tensor:
    """Flash attention's second output as (tokens, heads): it comes as (heads, tokens), or from older releases as
    (contexts, heads, longest query), padded. Never waits for the device."""
    if lse.shape == (heads, tokens):
        return lse.t()
    starts = spans.query_starts
    if starts is None or lse.dim() != 3 or lse.shape[:2] != (len(starts) - 1, heads):
        raise InvariantError(f"flash attention gave a log-sum-exp of shape {tuple(lse.shape)} for {tokens} queries")
    rows = torch.arange(tokens, dtype=starts.dtype, device=lse.device)
    context = torch.searchsorted(starts[1:], rows, right=True)
    return lse[context, :, rows - starts[context]]


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for first, end, start, seen in _blocks(spans, causal=True):
        out[first:end] = _block(query[first:end], key[start : start + seen], value[start : start + seen], scale)
    return out


def _plain_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    for first, end, start, seen in _blocks(spans, causal):
        part = slice(start, start + seen)
        out[first:end], lse[first:end] = _block_part(query[first:end], key[part], value[part], scale, causal)
    return out, lse


def _blocks(spans: Spans, causal: bool) -> Iterator[tuple[int, int, int, int]]:
    """Query rows [first, end) and the rows of history they see at most: (first, end, history's first, rows)."""
    for index, length in enumerate(spans.host_lengths):
        if not length:
            continue  # a block has those rows
        first, last = spans.host_query_starts[index], spans.host_query_starts[index + 1]
        for block in range(first, last, _QUERY_BLOCK):
            end = min(block + _QUERY_BLOCK, last)
            yield block, end, spans.host_history_starts[index], length - (last - end) if causal else length


def _block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries that share a key head are laid out as more queries of it, so that no key is repeated in memory."""
    rows, heads, dim = query.shape
    kv_heads, seen = key.shape[1], key.shape[0]
    group = heads // kv_heads
    folded = query.reshape(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
    mask = None
    if rows > 1:
        mask = torch.ones(rows, seen, dtype=torch.bool).tril(seen - rows).repeat_interleave(group, dim=0)
    out = scaled_dot_product_attention(
        folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    return out.reshape(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads, dim)


def _block_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_block``, by the kernel that it comes to, which has the log-sum-exp as its second output."""
    rows, heads, dim = query.shape
    kv_heads, seen = key.shape[1], key.shape[0]
    group = heads // kv_heads
    folded = query.reshape(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
    mask = None
    if causal and rows > 1:
        hidden = torch.ones(rows, seen, dtype=torch.bool).triu(seen - rows + 1)
        mask = torch.zeros(rows, seen, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(group, dim=0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0.0, False, attn_mask=mask, scale=scale
    )
    answer = out.reshape(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads, dim)
    return answer, lse.reshape(kv_heads, rows, group).transpose(0, 1).reshape(rows, heads)
