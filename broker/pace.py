"""values: how fast a total grows, from what it was at the times it was looked at: jobs' lines, tokens, bytes.

A rate between two looks that happen to lie close together says nothing; here older looks count too, each half as much
for every ``half_s`` that has passed since. Time stands still between looks: nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

JOB_S, WORKER_S = 60.0, 2.0
"""Half of what counts is younger than this: of a job's lines, and of what a worker's beats tell."""
LOOK_S = 0.25
"""A look so close to the one before is none."""


@dataclass(slots=True, eq=False)
class Pace:
    """One total's. Seconds are on the caller's clock."""

    half_s: float
    _at: float = -1.0
    _total: float = 0.0
    _grown: float = 0.0
    _elapsed: float = 0.0

    def see(self, total: float, now: float) -> None:
        """It is ``total`` now (0 or more). A total that fell began again: what it lost is no growth."""
        if self._at >= 0:
            elapsed = now - self._at
            if elapsed < LOOK_S:
                return
            kept = 0.5 ** (elapsed / self.half_s)
            self._grown = self._grown * kept + max(0.0, total - self._total)
            self._elapsed = self._elapsed * kept + elapsed
        self._at, self._total = now, total

    @property
    def a_second(self) -> float:
        """Growth a second; 0 until there were two looks."""
        return self._grown / self._elapsed if self._elapsed else 0.0
