"""shell: a broker whose store's disk is full (D6): it answers everybody, takes nothing, and waits for room.

Nothing of the turn that failed was said to anybody, and what memory held of it is thrown away: when there is room the
broker goes on from what was synced, as after a restart. Workers keep what they finished and log in again by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from broker.inputs import Came
from broker.jobs import CLIENT_REQUESTS
from broker.link import Link
from broker.standby import pulse
from broker.store import Store
from common import limits, messages
from common.clock import Clock
from common.database import free_bytes
from common.errors import DiskFullError

log = structlog.get_logger(room="broker.full")
CODE = "store_full"
WAIT_S = 0.1
MOST_CHARS = limits.REASON_MAX_CHARS


class Full:
    """One outage. ``words`` say what failed. One thread."""

    def __init__(self, link: Link, path: Path, clock: Clock, words: str) -> None:
        self._link, self._path, self._clock = link, path, clock
        self._words = f"the broker's disk is full, nothing is lost and nothing can be taken: {words}"[:MOST_CHARS]
        self._try_at = clock.monotonic() + limits.OUTBOX_RETRY_S
        self._said_at = self._since = clock.monotonic()
        log.error("store_full", reason=words, free_bytes=free_bytes(path.parent))

    def turn(self) -> Store | None:
        """Answer who asks; once a second try whether there is room: the store then, opened anew and tested.

        Raises ``RefusedError`` when it cannot be opened for another reason.
        """
        self._link.wait(WAIT_S)
        for came in self._link.receive():
            if isinstance(came, Came):
                self._link.send(came.peer, self._answer(came.message))
        now = self._clock.monotonic()
        if now < self._try_at:
            return None
        self._try_at = now + limits.OUTBOX_RETRY_S
        pulse(self._path.parent)
        return self._tried(now)

    def _tried(self, now: float) -> Store | None:
        try:
            store = Store.open(self._path)
        except DiskFullError as error:
            if now - self._said_at >= limits.SAY_AGAIN_S:
                self._said_at = now
                log.error("store_still_full", reason=str(error), free_bytes=free_bytes(self._path.parent))
            return None
        after = round(now - self._since, 1)
        log.warning("store_has_room", after_s=after, free_bytes=free_bytes(self._path.parent))
        return store

    def _answer(self, message: Any) -> Any:
        if isinstance(message, CLIENT_REQUESTS):
            return messages.Failure(message.request, CODE, self._words, 4)
        return messages.Refused(CODE, self._words)
