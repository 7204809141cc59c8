"""shell: ``haulier bench engine --series``: nothing kept, H1 alone, H2 alone and both, all measured in one run (H2).

Each series is a ``bench`` of its own, beside its own floor and its own reference. Knows no command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.errors import UsageError
from worker.engine.bench import BenchSettings, bench

SHOWN = ("series", "ms_step", "tokens_s", "staged_gb_step", "hit_gb_step", "headroom_gb_step", "of_floor", "bitwise")
"""What people read of each series; the JSON has all."""


def series(settings: BenchSettings) -> Iterator[dict[str, Any]]:
    """One row of figures a series, as they are measured. Raises ``UsageError`` when there is nothing to compare."""
    if not settings.retained or settings.headroom_gib == "0":
        raise UsageError("--series compares H1 with H2: say --retained SHARE and --headroom-gib N")
    for name, retained, headroom in (
        ("streamed", 0.0, "0"),
        ("H1", settings.retained, "0"),
        ("H2", 0.0, settings.headroom_gib),
        ("H1+H2", settings.retained, settings.headroom_gib),
    ):
        yield {"series": name, **bench(replace(settings, retained=retained, headroom_gib=headroom))}
