"""shell: a broker that stands by: waits for the store's lock without listening, and tells when the active one hangs.

The lock goes with its holder's process, so a standby takes over within ``LOOK_S`` of its end. A process that hangs
keeps the lock, and rightly: it may wake up and write. That is an outage for people to end, so it is told again and
again. Knows no rule and opens no store.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import structlog

from common import limits
from common.clock import Clock
from common.locks import Lock
from common.metrics import Metrics

log = structlog.get_logger(room="broker.standby")
PULSE_NAME = "pulse"
"""File in the state folder that the active broker touches once a beat, at the end of a turn."""
LOOK_S = 0.1
"""Between two looks at the lock: what a takeover waits at most before it begins."""


def pulse(folder: Path) -> None:
    """The active broker is at work."""
    with contextlib.suppress(OSError):  # a full disk stops no broker: then its standby takes it for hung, which is near
        (folder / PULSE_NAME).touch(mode=0o600)


class Standby:
    """Waits for ``lock``. One thread."""

    def __init__(self, lock: Lock, folder: Path, clock: Clock, figures: Metrics) -> None:
        self._lock, self._pulse, self._clock, self._figures = lock, folder / PULSE_NAME, clock, figures
        self._seen = self._stamp()
        self._since = clock.monotonic()
        self._said_at = 0.0
        self._hung = False

    def wait(self, stop: threading.Event) -> bool:
        """Wait until the lock is ours (True) or ``stop`` is set (False)."""
        log.info("standing_by", active=self._lock.holder())
        self._figures.standby.set(1)
        while not stop.is_set():
            if self.look():
                return True
            stop.wait(LOOK_S)
        return False

    def look(self) -> bool:
        """One look: whether the lock is ours now; else whether its holder still beats."""
        former = self._lock.holder()
        if self._lock.try_take():
            log.warning("taking_over", former=former, silent_s=round(self._silent(), 3))
            self._figures.standby.set(0)
            self._figures.active_silent_seconds.set(0)
            return True
        stamp, now = self._stamp(), self._clock.monotonic()
        if stamp != self._seen:
            if self._hung:
                log.warning("active_beats_again", active=former, silent_s=round(self._silent(), 1))
            self._seen, self._since, self._hung = stamp, now, False
        silent = self._silent()
        self._figures.active_silent_seconds.set(silent)
        if silent >= limits.LIVENESS_S and (not self._hung or now - self._said_at >= limits.SAY_AGAIN_S):
            self._hung, self._said_at = True, now
            log.error(
                "active_hung", active=former, silent_s=round(silent, 1),
                advice="it holds the store's lock and does no turns: end that process, and this one takes over",
            )  # fmt: skip
        return False

    @property
    def hung(self) -> bool:
        """Whether the active broker holds the lock and has done no turn for a liveness time."""
        return self._hung

    def _silent(self) -> float:
        return self._clock.monotonic() - self._since

    def _stamp(self) -> int:
        try:
            return self._pulse.stat().st_mtime_ns
        except OSError:  # not there yet, or out of reach: as silent as one that does not beat
            return 0
