"""shell: one attention call a layer over rows of one arena, decode and prefill mixed, the kernel pinned by name.

Streamed and resident history go through the same call with the same shapes, strides and lengths; they differ only in
the address of the rows, so that their bits cannot differ (H4). CUDA: flash attention, variable lengths, explicitly
pinned: left to choose, the framework takes kernels that differ from run to run. CPU: plain torch over each context's
contiguous rows. Knows no queue, no slot and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

_QUERY_BLOCK = 256
"""Query rows of one CPU call: bounds its mask, and later rows' keys are not read for earlier ones."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each context's queries and history lie. The int32 tensors are on the device (None on the CPU, which uses
    the host's numbers): ``query_starts`` and ``history_starts`` (contexts + 1,), ``lengths`` (contexts,).

    Context i has queries [query_starts[i], query_starts[i + 1]) and history rows
    [history_starts[i], history_starts[i] + lengths[i]) counted from the start of the rows given to ``attend``; its
    queries are the last ones of its history (bottom-right causal).
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
        return _flash(query, key, value, spans, scale)
    return _plain(query, key, value, spans, scale)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        spans.query_starts,
        spans.history_starts,
        spans.longest_query,
        spans.longest_history,
        0.0,
        True,
        False,
        scale=scale,
        seqused_k=spans.lengths,
    )[0]
    return out


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scale: float) -> torch.Tensor:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for index, length in enumerate(spans.host_lengths):
        first, last = spans.host_query_starts[index], spans.host_query_starts[index + 1]
        start = spans.host_history_starts[index]
        for block in range(first, last, _QUERY_BLOCK):
            end = min(block + _QUERY_BLOCK, last)
            seen = length - (last - end)
            out[block:end] = _block(query[block:end], key[start : start + seen], value[start : start + seen], scale)
    return out


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
