"""shell: the next token of each sampled row, chosen on the device: greedy, temperature, top_k, top_p, min_p, seed.

A request's chance depends on its seed and the token's number alone, never on its neighbours: one uniform number a
token, made on the host by ``sampling.uniform``, picks from the sorted distribution. Nothing here waits for the device.
Knows no context and no queue; runs on whatever queue is current.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chances:
    """One value for each sampled row, on the device: float32 ``temperature`` (0 is greedy), ``top_p`` and ``chance``
    in [0, 1), int64 ``top_k`` (0 is off); float32 ``min_p`` (0 is off), None where no row asks for it."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    chance: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor | None = None


def choose(logits: torch.Tensor, chances: Chances | None) -> torch.Tensor:
    """Token ids (rows,) int64 from logits (rows, vocabulary) of any float dtype; ``None`` is greedy for all rows.

    Order as in transformers: temperature, then top_k, then top_p over what top_k left, then min_p; at least one token
    stays.
    """
    greedy = logits.argmax(dim=-1)
    if chances is None:
        return greedy
    warm = chances.temperature > 0
    scale = torch.where(warm, chances.temperature, torch.ones_like(chances.temperature))
    ranked, order = (logits.float() / scale[:, None]).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    beyond = (chances.top_k[:, None] > 0) & (rank[None, :] >= chances.top_k[:, None])
    share = ranked.masked_fill(beyond, float("-inf")).softmax(dim=-1)
    before = share.cumsum(dim=-1) - share
    dropped = (before >= chances.top_p[:, None]) & (rank[None, :] > 0) & (chances.top_p[:, None] < 1)
    if chances.min_p is not None:
        dropped = dropped | ((share < chances.min_p[:, None] * share[:, :1]) & (rank[None, :] > 0))
    share = share.masked_fill(dropped, 0.0)
    total = share.cumsum(dim=-1)
    aim = chances.chance[:, None] * total[:, -1:]
    kept = (share > 0).sum(dim=-1, keepdim=True)
    place = torch.minimum((total <= aim).sum(dim=-1, keepdim=True), kept - 1)
    drawn = order.gather(-1, place).squeeze(-1)
    return torch.where(warm, drawn, greedy)


def penalised(
    logits: torch.Tensor, in_prompt: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """float32 logits (rows, vocabulary) with what tokens so far cost them: bool ``in_prompt`` and int32 ``counts`` of
    the answer, both of the same shape; float32 ``factors`` (rows, 3): repetition, presence, frequency. Repetition
    first, as in transformers; the other two as the OpenAI API states them."""
    repetition, presence, frequency = factors[:, :1], factors[:, 1:2], factors[:, 2:]
    answered = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | answered, repeated, logits)
    return logits - frequency * counts - presence * answered


def masked(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """float32 logits (rows, vocabulary) of what may come: int32 ``words`` (rows, n) have a bit a token id, the lowest
    first; ids beyond them may not."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    known = logits[:, : allowed.shape[-1]].masked_fill(~allowed, float("-inf"))
    beyond = torch.full_like(logits[:, allowed.shape[-1] :], float("-inf"))
    return torch.cat((known, beyond), dim=-1)


def log_shares(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities by ``logits`` (rows, vocabulary): float32 (rows, 1 + most), those of ``tokens`` (rows,) and
    then of the likeliest ones, whose ids (rows, most) int64 come second."""
    shares = logits.float().log_softmax(dim=-1)
    top, ids = shares.topk(most, dim=-1)
    return torch.cat((shares.gather(-1, tokens[:, None]), top), dim=-1), ids
