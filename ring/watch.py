"""rules: the watchdog of R6: "full with nothing in it" is a finding when it lasts, and is told once.

A result on its way looks the same for a moment: items unresolved, no token pending, engine idle. What lasts does not
end by itself. Knows no clock: ``now`` is an argument; and no log: the caller writes the line and counts the finding.
"""

from __future__ import annotations

from common.limits import RING_STUCK_S
from ring.accounting import Finding


class RingWatch:
    """Watches one ring. Seconds are on the caller's clock; the thread is the session's."""

    def __init__(self, bound_s: float = RING_STUCK_S) -> None:
        self._bound_s = bound_s
        self._since: float | None = None
        self._last: tuple[object, ...] = ()
        self._told = False

    def see(self, finding: Finding | None, progress: int, now: float) -> Finding | None:
        """What ``Producer.finding`` says now, with a counter that moves when anything ended (entries returned, steps).

        Returns the finding once, when it has lasted ``bound_s`` without any progress; None otherwise.
        """
        if finding is None:
            self._since, self._told = None, False
            return None
        seen = (finding.items_unresolved, progress)
        if self._since is None or seen != self._last:
            self._since, self._last, self._told = now, seen, False
        if self._told or now - self._since < self._bound_s:
            return None
        self._told = True
        return finding
