"""rules: H2: how many chunks of headroom there may be: at start, as arithmetic with its numbers, and as memory changes.

Pure functions of free bytes and settings. Knows no device and no page.
"""

from __future__ import annotations

import math

from common.config import GIB, EngineSettings
from common.errors import RefusedError


def chunks_at_start(
    settings: EngineSettings, free_bytes: int, chunk_bytes: int, chunk_pages: int, pages_of_all: int
) -> tuple[int, str]:
    """Chunks to take once the engine is warm, and the arithmetic to print. ``free_bytes`` of the device after warm-up;
    ``pages_of_all`` histories need: more is not taken. ``RefusedError`` when a number asked for is not free (A6)."""
    if settings.headroom_gib == "0":
        return 0, "headroom = 0: --headroom-gib is 0"
    if not chunk_pages:
        raise RefusedError(
            f"a page of {settings.page_tokens} tokens is larger than a chunk of headroom; lower --page-tokens, "
            "or set --headroom-gib to 0"
        )
    reserve = settings.headroom_reserve_gib
    there = max(0, math.floor((free_bytes - reserve * GIB) / chunk_bytes))
    asked = None if settings.headroom_gib == "auto" else int(settings.headroom_gib) * GIB // chunk_bytes
    if asked is not None and there < asked and settings.fit == "refuse":
        raise RefusedError(
            f"--headroom-gib {settings.headroom_gib}: {free_bytes / GIB:.3f} GiB are free after warm-up, less "
            f"--headroom-reserve-gib {reserve:.10g} that is {there * chunk_bytes / GIB:.10g} GiB in chunks; set "
            "--headroom-gib to that or to auto, lower --headroom-reserve-gib or --device-pages-gib, or use --fit shrink"
        )
    useful = -(-pages_of_all // chunk_pages)
    chunks = min(there, useful) if asked is None else min(asked, there, useful)
    return chunks, (
        f"headroom = min({settings.headroom_gib if asked is None else f'{settings.headroom_gib} GiB'} asked, "
        f"free {free_bytes / GIB:.3f} GiB after warm-up - reserve {reserve:.10g} GiB, {useful} chunks hold all "
        f"histories) = {chunks} chunks of {chunk_bytes / GIB:.10g} GiB = {chunks * chunk_pages} pages"
    )


def change(
    free_bytes: int, reserve_bytes: int, chunk_bytes: int, held: int, leaving: int, most: int, quiet: int
) -> int:
    """Chunks to take (above 0) or to give back (below 0) when ``free_bytes`` are free, ``held`` chunks are in use and
    ``leaving`` ones are on their way back. One is taken at a time, when another one would still be free beyond the
    reserve and ``quiet`` looks to wait are over: what was just given back is not taken again."""
    coming = free_bytes + leaving * chunk_bytes
    if coming < reserve_bytes:
        return -min(held, -(-(reserve_bytes - coming) // chunk_bytes))
    if held < most and not leaving and quiet <= 0 and free_bytes >= reserve_bytes + 2 * chunk_bytes:
        return 1
    return 0
