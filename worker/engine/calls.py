"""shell: the attention calls of one layer of one step, over the arena: one, or one a part of the step (``parts``), or
one over shared histories beside the contexts' own (H5). Knows no queue and no plan."""

from __future__ import annotations

import torch

from worker.engine.addresses import LayerAddress
from worker.engine.joined import attend_joined, join
from worker.engine.kernels import attend, attend_square


def attend_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, where: LayerAddress, scale: float
) -> torch.Tensor:
    """Attention of (tokens, query heads, head dim) over rows (rows, kv heads, head dim); shaped as ``query``."""
    if where.shared is not None and where.spans is not None:
        return attend_joined(query, key, value, where.spans, where.shared, where.first_shared_row, scale)
    if where.prompts is None and not where.blocks and where.spans is not None:
        return attend(query, key, value, where.spans, scale)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    cut = where.first_prompt_row
    if where.spans is not None:
        out[:cut] = attend(query[:cut], key, value, where.spans, scale)
    if where.prompts is not None:
        out[cut:] = attend(query[cut:], key, value, where.prompts, scale)
    for first, rows, start, known in where.blocks:
        out[first : first + rows] = attend_block(query[first : first + rows], key, value, start, known, scale)
    return out


def attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, known: int, scale: float
) -> torch.Tensor:
    """Causal attention of (rows, query heads, head dim), whose own rows lie behind ``known`` others from row ``start``
    on; shaped as ``query``."""
    own = slice(start + known, start + known + query.shape[0])
    out, lse = attend_square(query, key[own], value[own], scale, causal=True)
    if not known:
        return out
    before = slice(start, start + known)
    other, other_lse = attend_square(query, key[before], value[before], scale, causal=False)
    return join(out, lse, other, other_lse)
