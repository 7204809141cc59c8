"""shell: the server's side of one connection, which waits for the head of a request for a bounded time only.

The server under it (uvicorn) bounds how long a connection may idle between two requests, and not how long its first
head, or any head, may take: some hundred connections that say nothing would keep everybody else out.
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from common import limits


class BoundedHead(H11Protocol):
    """One connection. On the server's event loop."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in its parent
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if not self._under_way() and self._waiting is None:
            self._wait()
        super().data_received(data)
        if self._under_way():
            self._heard()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        super().connection_lost(exc)

    def _under_way(self) -> bool:
        """Whether a whole head has come whose request is not answered yet."""
        cycle = cast("object | None", self.cycle)
        return cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(limits.HTTP_HEAD_S, self._give_up)

    def _heard(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._under_way() and not self.transport.is_closing():
            self.transport.close()
