"""rules: how long a worker waits between two logins (D2): doubling, with a lower ceiling in an outage's first minute.

So a broker that restarts sees its workers well within its grace, and one that is away for long is not hammered.
"""

from __future__ import annotations

from collections.abc import Callable

from common import limits


class Backoff:
    """Pauses between tries. ``chance`` gives numbers from 0 to 1; ``retry_at`` is on the caller's clock."""

    def __init__(self, chance: Callable[[], float], now: float) -> None:
        self._chance = chance
        self._failures = 0
        self._outage_since: float | None = None
        self.retry_at = now

    def failed(self, now: float, *, at_once: bool = False) -> None:
        """A try failed or a session ended. ``at_once``: nothing is wrong with the broker, try the first pause only."""
        if self._outage_since is None:
            self._outage_since = now
        early = now - self._outage_since < limits.BACKOFF_EARLY_S
        ceiling = limits.BACKOFF_MAX_EARLY_S if early else limits.BACKOFF_MAX_S
        doublings = 0 if at_once else min(self._failures, 16)
        pause = min(ceiling, limits.BACKOFF_FIRST_S * 2**doublings)
        self._failures += 1
        self.retry_at = now + pause * (0.5 + 0.5 * self._chance())

    def connect_s(self, endpoints: int) -> float:
        """How long one try at one of so many endpoints may take before the next one is tried."""
        return min(limits.HANDSHAKE_S, limits.CONNECT_S * 2.0 ** min(self._failures // endpoints, 16))

    def succeeded(self) -> None:
        """A session stands."""
        self._failures = 0
        self._outage_since = None
