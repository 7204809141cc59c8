"""shell: what other threads have for the session's thread, and how they wake it. Knows no content.

The session sleeps in its poller; a byte on a socket pair wakes it. One byte a sleep is enough, however much is posted.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque


class Inbox:
    """Many threads ``post``, one ``drain``\\ s."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._rung = False

    def fileno(self) -> int:
        """Readable when something was posted."""
        return self._bell.fileno()

    def post(self, item: object) -> None:
        """Leave ``item`` and wake the session. Any thread, signal handlers too."""
        self._items.append(item)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # full of bytes: it is awake already; closed: nobody sleeps any more
                self._ring.send(b"!")

    def drain(self) -> list[object]:
        """All that was posted, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        self._rung = False  # before the items are taken: whoever posts from here on rings again
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Nobody posts any more."""
        self._bell.close()
        self._ring.close()
