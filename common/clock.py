"""shell: the one place that reads a clock. Rules get ``now`` as an argument and never come here."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: ``monotonic`` for timers, ``wall`` for what people read (both in seconds)."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
