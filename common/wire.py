"""shell: sockets made the one way haulier makes them, with every trap of ZeroMQ's defaults closed. Knows no message.

No lingering frames, no queueing before a connection stands (IMMEDIATE), no silent reconnect (a login takes a fresh
socket), bounded frames and queues, a ROUTER that tells what it cannot route (MANDATORY), handshakes watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from common import limits
from common.config import KeySettings
from common.errors import RefusedError
from common.keys import Authorized, load_client, load_server

QUEUE_MAX_FRAMES = 256
"""Frames waiting in one direction of one connection."""
ZAP_DOMAIN = "haulier"
EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_KINDS = {
    zmq.EVENT_CONNECTED: "connected",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "ready",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "cut",
    zmq.EVENT_CONNECT_RETRIED: "lost",
    zmq.EVENT_DISCONNECTED: "lost",
    zmq.EVENT_CLOSED: "lost",
}


@dataclass(frozen=True, slots=True)
class LinkNews:
    """What became of a connection: ``connected`` (heard), ``ready`` (let in), ``denied`` (wrong keys), ``lost``.

    ``cut``: the other side closed during the handshake. It holds another server key than we were given, or it is a
    proxy that accepts for a broker that is not up: the socket cannot tell.
    """

    kind: str
    detail: str


class Monitor:
    """Watches one socket's connections. Used by the thread that owns the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(EVENTS)

    def news(self) -> Iterator[LinkNews]:
        """All that happened since the last call; never waits."""
        while self.socket.poll(0):
            event: dict[str, Any] = dict(recv_monitor_message(self.socket, zmq.NOBLOCK))
            kind = _KINDS.get(event["event"])
            if kind is not None:
                where = event["endpoint"].decode(errors="replace")
                yield LinkNews(kind, f"{where} ({zmq.Event(event['event']).name or ''} {event['value']})")

    def close(self) -> None:
        """Stop watching; before the watched socket is closed."""
        with contextlib.suppress(zmq.ZMQError):
            self._watched.disable_monitor()
        self.socket.close(0)


class _Provider:
    """Answers the authenticator's question for each handshake from the key folder as it stands now."""

    def __init__(self, authorized: Authorized) -> None:
        self._authorized = authorized

    def callback(self, domain: str, key: bytes) -> bool:
        self._authorized.refresh()
        return self._authorized.name(_z85(key)) is not None


def _z85(key: bytes) -> bytes:
    return key if len(key) == 40 else bytes(zmq.utils.z85.encode(key))


@contextlib.contextmanager
def authenticator(context: zmq.Context[Any], keys: KeySettings) -> Iterator[Authorized | None]:
    """Let only the keys of the folder in while the block runs (S5); None with ``--insecure``. Before ``router``."""
    if keys.directory is None or keys.insecure:
        yield None
        return
    load_server(keys.directory)
    authorized = Authorized(keys.directory)
    guard = ThreadAuthenticator(context)
    guard.start()
    try:
        guard.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=_Provider(authorized))
        yield authorized
    finally:
        guard.stop()


def router(context: zmq.Context[Any], bind: str, keys: KeySettings) -> zmq.Socket[bytes]:
    """The broker's socket, bound. Raises ``RefusedError`` when the address cannot be had."""
    # keys first: a socket made and then left behind by an unusable key would keep its context from ending
    pair = None if keys.directory is None or keys.insecure else load_server(keys.directory)
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _bound(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    try:
        socket.bind(bind)
    except zmq.ZMQError as error:
        socket.close(0)
        raise RefusedError(f"cannot listen on {bind}: {error.strerror}; is another broker there? see --bind") from error
    return socket


def dealer(context: zmq.Context[Any], endpoint: str, keys: KeySettings) -> zmq.Socket[bytes]:
    """A fresh socket for one login at one endpoint; it never reconnects by itself."""
    pair = None if keys.directory is None or keys.insecure else load_client(keys.directory)
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _bound(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(limits.HANDSHAKE_S * 1000))
    if pair is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, pair.server)
    return socket


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect after a ``Monitor`` is in place, so that no handshake goes unseen."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise RefusedError(f"{endpoint} is no address to connect to: {error.strerror}") from error


def _bound(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MAX_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MAX_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_MAX_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.IPV6, 1)
