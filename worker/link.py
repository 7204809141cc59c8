"""shell: the worker's one connection (S1): a fresh socket for each login, watched from its handshake on (S5).

Turns what happens on it into inputs of the session. Never waits: a frame that cannot leave at once loses the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import zmq

from common import codec, limits, wire
from common.config import KeySettings
from common.errors import PeerFault, RefusedError
from worker.inputs import LinkLost, LinkReady, Received

WRONG_KEY = (
    "check --keys: the folder must hold the broker's server.key and a client key that it lets in; one that was revoked "
    "must be replaced (haulier keys add NAME)"
)


class Link:
    """One socket to one endpoint. One thread. Raises ``RefusedError`` when the keys or the endpoint cannot be used."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: KeySettings) -> None:
        self.endpoint = endpoint
        self.socket = wire.dealer(context, endpoint, keys)
        self._monitor = wire.Monitor(self.socket)
        self._secure = not keys.insecure
        self._ready = False
        self._reached = False
        try:
            wire.connect(self.socket, endpoint)
        except RefusedError:
            self.close()
            raise

    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll: the connection and its monitor."""
        return self.socket, self._monitor.socket

    def inputs(self) -> Iterator[LinkReady | LinkLost | Received]:
        """All that came since the last call; after a ``LinkLost`` nothing more."""
        for news in self._monitor.news():
            if news.kind == "connected":
                self._reached = True
            elif news.kind == "ready":
                self._ready = True
                yield LinkReady()
            else:
                # what the broker said before it closed comes first: a refusal says more than a closed connection
                yield from self._messages()
                yield LinkLost(*self._why(news))
                return
        yield from self._messages()

    def _messages(self) -> Iterator[Received | LinkLost]:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise PeerFault("frames", f"a message of {len(frames)} frames")
                yield Received(codec.decode(frames[0]))
            except PeerFault as fault:
                yield LinkLost(f"the broker broke the protocol: {fault}")
                return

    def _why(self, news: wire.LinkNews) -> tuple[str, bool]:
        if news.kind == "denied":
            return f"{self.endpoint} does not let this worker in: {WRONG_KEY} [{news.detail}]", True
        if self._reached and not self._ready:
            hint = f"wrong key? {WRONG_KEY}" if self._secure else "does it ask for keys? --insecure is set here"
            return f"{self.endpoint} closed the connection during the handshake: {hint}", True
        if not self._reached:
            return f"nobody answers at {self.endpoint}", False
        return f"the connection to {self.endpoint} was closed", False

    def send(self, message: object) -> LinkLost | None:
        """Send, or say why the link counts as lost: a queue that is full is a broker that does not read."""
        data = codec.encode(message)
        for _ in range(2):
            try:
                self.socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self.socket.getsockopt(zmq.EVENTS)  # takes in what the I/O thread did meanwhile, then once more
            except zmq.ZMQError as failure:
                return LinkLost(f"cannot send to {self.endpoint}: {failure.strerror}")
            else:
                return None
        return LinkLost(f"{self.endpoint} does not take what is sent to it")

    def close(self, linger: bool = False) -> None:
        """Close; ``linger`` gives the last frames a moment to leave."""
        self._monitor.close()
        self.socket.close(limits.CLOSE_LINGER_MS if linger else 0)
