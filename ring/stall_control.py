"""rules: the published failure on purpose: a ring that forgets its padding stalls full, with nothing in it (R3, R6).

With the padding given back the same work runs for ever. Tests and the self-check use both: a check that cannot fail
proves nothing. Pure: no memory, thread or clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvariantError
from ring.accounting import Accounting, Finding

CONSUMERS = 2


class PaddingForgotten(Accounting):
    """The control: giving back returns the length alone, and nobody compares. Never used by a running worker."""

    def _freed_by(self, length: int, padding: int) -> int:
        return length

    def _check(self) -> None:
        """Silent, as the published ring was."""


@dataclass(frozen=True, slots=True)
class StallReport:
    """How a run of equal batches over two consumers in turn ended."""

    batches: int
    """Batches consumed in all."""
    wraps: int
    stalled: bool
    bytes_free: int
    consumed: tuple[int, ...]
    """Batches consumed by each consumer."""
    waiting: tuple[int, ...]
    """Batches dispatched to each consumer that never reached it."""
    finding: Finding | None


def predicted_wraps(capacity_bytes: int, length: int) -> int:
    """Wraps after which equal batches of ``length`` stall a ring that forgets its padding, with 0 < padding a wrap.

    A lap holds ``capacity // length`` batches and strands ``padding = capacity % length`` at its end. The next wrap
    needs ``padding + length`` free of the ``capacity - wraps * padding`` that are left, so the last one that succeeds
    is number ``(capacity - length) // padding``.
    """
    padding = capacity_bytes % length
    if not padding or length > capacity_bytes:
        raise InvariantError(f"batches of {length} leave no padding in a ring of {capacity_bytes}")
    return (capacity_bytes - length) // padding


def run_equal_batches(books: Accounting, length: int, batches: int) -> StallReport:
    """Deal ``batches`` of ``length`` to two consumers in turn, each reading at once, until done or stalled for good.

    Everything dispatched is unresolved from the start, as in life; the first consumer's batch at the head keeps the
    second's behind it out of the ring.
    """
    tokens = length // 4
    consumed = [0] * CONSUMERS
    for number in range(batches):
        taken = books.take(length, tokens, 1)
        if taken is None:  # every consumer is idle and nothing is in flight: nothing will ever change this
            break
        books.give_back(taken.sequence)
        books.resolve(1)
        consumed[number % CONSUMERS] += 1
    done = sum(consumed)
    waiting = tuple(len(range(first, batches, CONSUMERS)) - consumed[first] for first in range(CONSUMERS))
    return StallReport(
        batches=done,
        wraps=books.wraps,
        stalled=done < batches,
        bytes_free=books.bytes_free,
        consumed=tuple(consumed),
        waiting=waiting,
        finding=books.finding(engine_idle=True, waiting_items=sum(waiting)),
    )
