"""rules: what a worker says of itself when it logs in: the pages of its HELLO. Knows no state of the link.

The first page also tells what the engine ran when the run before this one ended without saying so: D5's evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import limits
from common.messages import HeldLine, Hello, ModelInfo
from worker.states import Identity


def hellos(
    identity: Identity,
    login: int,
    store_id: str,
    serves: tuple[tuple[ModelInfo, ...], int, int],
    held: Sequence[HeldLine],
) -> list[Hello]:
    """One login's pages, in order. ``serves``: models, concurrency, ring bytes. ``held`` is of ``store_id`` alone."""
    size = limits.PAGE_MAX_COUNT
    pages = [held[at : at + size] for at in range(0, len(held), size)] or [()]
    return [
        Hello(
            limits.SCHEMA_VERSION, identity.worker, identity.incarnation, login, store_id if held else "", *serves,
            tuple(page), number, number + 1 < len(pages), None if number else identity.ran,
        )
        for number, page in enumerate(pages)
    ]  # fmt: skip
