"""rules: H3: how many rows of history came over the link, from a context's own pages and from headroom, kept apart.

Counted when a step is planned, for each context: an end in the middle counts what was planned. Knows no bytes but those
that it is told a row has.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.retention import Placement

MIB = 1024**2


@dataclass(slots=True, eq=False)
class Served:
    """Rows of all layers, over the steps so far."""

    link_rows: int = 0
    page_rows: int = 0
    headroom_rows: int = 0

    def add(self, placement: Placement) -> None:
        """One step's."""
        self.page_rows += placement.hit_rows
        if placement.copies:
            self.link_rows += placement.link_rows
        if placement.borrowed:
            self.headroom_rows += placement.borrowed_rows

    def words(self, token_bytes: int) -> str:
        """For the request's story; ``token_bytes`` a row."""
        link, pages, headroom = (
            f"{rows * token_bytes / MIB:.1f} MiB" for rows in (self.link_rows, self.page_rows, self.headroom_rows)
        )
        return f"history: {link} over the link, {pages} from its pages, {headroom} from headroom"
