"""rules: which attention call has which rows of a step that prefills: decode rows, prompts, and blocks of long prompts.

Rows that decode have a call of their own, made for one query a context. Of a long chunk of a prompt most rows are a
*block*: they attend to each other, causal, and to all rows before them, in two calls whose shapes recur because blocks
and chunks end at multiples of the same count; both answers are joined. What a block leaves of its chunk is attended
with the other prompts. A plan alone decides it, so that both routes make the same calls (H4). Knows no tensor on a
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import InvariantError
from common.limits import BLOCK_MIN_TOKENS, BLOCK_STEP_TOKENS
from worker.engine.contexts import Share, StepPlan

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one long chunk: ``rows`` of them from row ``first`` of the step on, behind ``known`` rows of history.
    ``share`` is its chunk's place among the step's shares."""

    share: int
    first: int
    rows: int
    known: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one step: its first ``decodes`` shares, ``decode_rows`` rows, decode, the others are prompts'.
    ``longest_query`` and ``longest_history`` are of the prompts' call, 0 where blocks have all of it."""

    decodes: int
    decode_rows: int
    blocks: tuple[Block, ...]
    longest_query: int
    longest_history: int


def chunk_step(chunk_tokens: int, blocks: bool) -> int:
    """At multiples of how many rows chunks end; 0 where it does not matter."""
    return BLOCK_STEP_TOKENS if blocks and chunk_tokens >= BLOCK_MIN_TOKENS else 0


def chunk_rows(start: int, rows: int, left: int, step: int, *, some: bool) -> int:
    """How many of ``rows`` a chunk takes that begins at row ``start`` of a history, where ``left`` rows of the prompt
    are not computed yet: unless it is the last, so many that it ends at a multiple of ``step``, if there is one.
    ``some``: where those are none, any."""
    most = min(rows, left)
    if not step or rows >= left:
        return most
    return max(0, (start + rows) // step * step - start) or (most if some else 0)


def parts_of(plan: StepPlan, blocks: bool) -> tuple[Parts | None, dict[str, Ints]]:
    """How a step is cut, and of its prompts' call ``prompt_query_starts`` (P + 1,), counted from the first prompt row,
    ``prompt_lengths`` (P,) and ``prompt_share`` (P,); a block stands there with no history. None where one call has all
    rows: in a step that prefills nothing, and in one with shared histories."""
    if plan.joined or not any(share.prompt for share in plan.shares):
        return None, {}
    decodes = sum(not share.prompt for share in plan.shares)
    if any(share.prompt for share in plan.shares[:decodes]):
        raise InvariantError("a prompt stands before a share that decodes")
    decode_rows = sum(share.rows for share in plan.shares[:decodes])
    found: list[Block] = []
    queries: list[tuple[int, int, int]] = []  # share, rows, length
    at = decode_rows
    for index, share in enumerate(plan.shares[decodes:], decodes):
        block = _block_rows(share) if blocks else 0
        if block:
            found.append(Block(index, at, block, share.own_start))
            queries.append((index, block, 0))
        if share.rows > block:
            queries.append((index, share.rows - block, share.own_start + share.rows))
        at += share.rows
    attended = [(rows, length) for _, rows, length in queries if length]
    longest = max((rows for rows, _ in attended), default=0), max((length for _, length in attended), default=0)
    table = np.array(queries, np.int32)
    arrays: dict[str, Ints] = {
        "prompt_query_starts": np.concatenate(([0], np.cumsum(table[:, 1]))).astype(np.int32),
        "prompt_lengths": table[:, 2],
        "prompt_share": table[:, 0],
    }
    return Parts(decodes, decode_rows, tuple(found), *longest), arrays


def _block_rows(share: Share) -> int:
    return share.rows // BLOCK_STEP_TOKENS * BLOCK_STEP_TOKENS if share.rows >= BLOCK_MIN_TOKENS else 0
