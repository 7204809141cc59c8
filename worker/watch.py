"""rules: an engine that holds work and makes no progress ends its process (S2): there is no third state.

A layer that went by is progress: one pass over a long history takes minutes on a slow machine. Time in which this
process was stopped as a whole (SIGSTOP, a sleeping machine) is not held against the engine.
"""

from __future__ import annotations

from common import limits
from worker.inputs import Snapshot


class StallWatch:
    """Watches the engine's counters. Seconds are on the caller's clock."""

    def __init__(self, now: float) -> None:
        self._progress_at = now
        self._seen_at = now
        self._counters = (0, 0, 0)
        self._held = 0

    def see(self, snapshot: Snapshot, held: int, now: float) -> bool:
        """The counters now, with ``held`` lines in the engine's hands. True if the process was stopped since."""
        suspended = now - self._seen_at > limits.LIVENESS_S
        if suspended:
            self._progress_at += now - self._seen_at
        self._seen_at = now
        counters = (snapshot.steps, snapshot.layers, snapshot.tokens)
        if counters != self._counters or not held or not self._held:
            self._counters = counters
            self._progress_at = now
        self._held = held
        return suspended

    def idle_s(self, now: float) -> float:
        """How long work has been held without progress."""
        return now - self._progress_at if self._held else 0.0

    def stalled(self, now: float) -> str:
        """The finding in words, or empty."""
        idle = self.idle_s(now)
        if idle <= limits.STALL_S:
            return ""
        return (
            f"the engine holds {self._held} lines and made no progress for {idle:.0f} s "
            f"(at most {limits.STALL_S:.0f} s): "
            "{} steps, {} layers, {} tokens".format(*self._counters)
        )
