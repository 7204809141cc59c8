"""shell: the broker process from lock to leave: opens what it needs, runs turns, and goes when told to. Knows no rule.

SIGTERM and SIGINT: no more clients, workers are told, a last commit, exit 0. A second one ends the process at once.
With ``--standby`` it waits for the lock first (``broker.standby``) and then goes the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

import structlog
import zmq

from broker.full import Full
from broker.http import child
from broker.link import Link
from broker.questions import Questions
from broker.reader import Reader
from broker.server import STORE_NAME, Server, prepare
from broker.spool import Spool
from broker.standby import Standby, pulse
from broker.store import Store
from broker.upkeep import Upkeep
from common import metrics, wire
from common.clock import SystemClock
from common.config import GIB, BrokerSettings, KeySettings
from common.errors import DiskFullError, RefusedError
from common.folders import announce, made
from common.keys import exposed, load_server
from common.locks import Lock

log = structlog.get_logger(room="broker.process")
ENDPOINT_NAME = "endpoint"
"""File in the state folder that names where the broker listens, once it does."""


def serve(settings: BrokerSettings) -> None:
    """Be a broker until told to stop. Main thread. Raises ``RefusedError`` for what must be changed first."""
    _check_keys(settings.keys)
    child.check(settings)
    made(settings.state, "the broker's store")
    told = _Told()
    figures = metrics.Metrics()
    lock = Lock(settings.state / "lock")
    port = metrics.start(figures, settings.metrics_port)
    try:
        if _take(lock, settings, told, figures):
            _serve(settings, told, figures)
    finally:
        lock.release()
        if port is not None:
            port.stop()


def _take(lock: Lock, settings: BrokerSettings, told: _Told, figures: metrics.Metrics) -> bool:
    """Whether the store is ours; a standby waits for it, until it is told to stop."""
    if lock.try_take():
        return True
    if settings.standby:
        return Standby(lock, settings.state, SystemClock(), figures).wait(told.stop)
    raise RefusedError(
        f"{settings.state} is in use by another broker (process {lock.holder()}); stop it, choose another --state, "
        "or wait for its end with --standby"
    )


def _serve(settings: BrokerSettings, told: _Told, figures: metrics.Metrics) -> None:
    """Be the broker of a store that is locked for us; through times without room on its disk too (D6)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    path = settings.state / STORE_NAME
    store: Store | None = None
    spool = Spool(settings.state / "spool")
    try:
        store = Store.open(path)
        with wire.authenticator(context, settings.keys) as authorized:
            socket = wire.router(context, settings.bind, settings.keys)
            link = Link(socket, authorized, spool, wire.Monitor(socket))
            try:
                checker: Reader | None = Reader(path)
                with child.serving(settings, _endpoint(settings, socket)):
                    while store is not None:
                        words = _turns(settings, store, spool, link, told, figures, checker)
                        store.close()
                        store, checker = None, None
                        if words:
                            link.forget_all()
                            store = _with_room(Full(link, path, SystemClock(), words), told)
            finally:
                link.close()
    finally:
        if store is not None:
            store.close()
        spool.close()
        context.term()


def _turns(
    settings: BrokerSettings, store: Store, spool: Spool, link: Link, told: _Told, figures: metrics.Metrics,
    checker: Reader | None,
) -> str:  # fmt: skip
    """Turns until told to stop; if the disk is full before that, what it said."""
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(store.failing())
            reader = Reader(store.path)
            stack.callback(reader.close)
            upkeep = Upkeep(store.connection, store.path, settings.keep_s, checker)
            stack.callback(upkeep.close)
            clock = SystemClock()
            state = prepare(store, spool, clock, settings.grace_s, int(settings.disk_reserve_gib * GIB))
            state.weights = link.weights
            questions = Questions(reader, store.path)
            server = Server(state, store, spool, link, clock, settings.state, figures, questions, upkeep)
            told.tell(server)
            pulse(settings.state)
            _announce(settings, link.socket, state.incarnation, len(state.jobs))
            server.run()
    except DiskFullError as error:
        return str(error)
    return ""


def _with_room(full: Full, told: _Told) -> Store | None:
    """The store, once there is room for it; None when told to stop before."""
    while not told.stop.is_set():
        store = full.turn()
        if store is not None:
            return store
    return None


def _check_keys(keys: KeySettings) -> None:
    """A standby with keys that cannot be used must say so now, and not when it is needed; so with keys others read."""
    if keys.directory is not None and not keys.insecure:
        load_server(keys.directory)
        if words := exposed(keys.directory):
            log.warning("keys_exposed", reason=words)


def _announce(settings: BrokerSettings, socket: zmq.Socket[bytes], incarnation: int, jobs: int) -> None:
    endpoint = _endpoint(settings, socket)
    announce(settings.state, ENDPOINT_NAME, endpoint)
    log.info("listening", endpoint=endpoint, incarnation=incarnation, open_jobs=jobs, insecure=settings.keys.insecure)


def _endpoint(settings: BrokerSettings, socket: zmq.Socket[bytes]) -> str:
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{settings.bind.rpartition(':')[0]}:{port}"  # the socket's own word has the host in a mapped form


class _Told:
    """What signals ask of this process: to stop in good order, and told again, to end at once. Main thread."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._server: Server | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def tell(self, server: Server) -> None:
        """From now on it is this one that has to stop."""
        self._server = server
        server.stopping = self.stop.is_set()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.stop.is_set():
            os._exit(128 + number)
        self.stop.set()
        if self._server is not None:
            self._server.stopping = True
