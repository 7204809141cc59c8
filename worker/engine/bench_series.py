"""shell: ``haulier bench engine --series``: nothing kept, H1 alone, H2 alone and both, all measured in one run (H2).

Each series is a ``bench`` of its own, beside its own floor and its own reference. One that is refused says so in its
row, and the others are measured. Knows no command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.errors import RefusedError, UsageError
from worker.engine.bench import BenchSettings, bench

SHOWN = ("series", "ms_step", "tokens_s", "staged_gb_step", "hit_gb_step", "headroom_gb_step", "of_floor", "bitwise")
"""What people read of each series; the JSON has all."""


def series(settings: BenchSettings) -> Iterator[dict[str, Any]]:
    """One row of figures a series, as they are measured; of one that is refused, ``refused`` says why. Raises
    ``UsageError`` when there is nothing to compare."""
    lacks = [
        option
        for option, given in (
            ("--retained SHARE (0 to 1)", settings.retained),
            ("--headroom-gib N (whole GiB, or auto)", settings.headroom_gib != "0"),
        )
        if not given
    ]
    if lacks:
        raise UsageError(
            "--series measures nothing kept, device pages alone (--retained), headroom alone (--headroom-gib) and "
            f"both: say {' and '.join(lacks)} as well"
        )
    for name, retained, headroom in (
        ("streamed", 0.0, "0"),
        ("H1", settings.retained, "0"),
        ("H2", 0.0, settings.headroom_gib),
        ("H1+H2", settings.retained, settings.headroom_gib),
    ):
        try:
            found = bench(replace(settings, retained=retained, headroom_gib=headroom))
        except (RefusedError, UsageError) as refusal:
            found = {"refused": str(refusal)}
        yield {"series": name, **found}
