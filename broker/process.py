"""shell: the broker process from lock to leave: opens what it needs, runs turns, and goes when told to. Knows no rule.

SIGTERM and SIGINT: no more clients, workers are told, a last commit, exit 0. A second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import structlog
import zmq

from broker.link import Link
from broker.server import STORE_NAME, Server, prepare
from broker.spool import Spool
from broker.store import Store
from common import metrics, wire
from common.clock import SystemClock
from common.config import GIB, BrokerSettings
from common.errors import RefusedError
from common.locks import Lock

log = structlog.get_logger(room="broker.process")
ENDPOINT_NAME = "endpoint"
"""File in the state folder that names where the broker listens, once it does."""


def serve(settings: BrokerSettings) -> None:
    """Be a broker until told to stop. Main thread. Raises ``RefusedError`` for what must be changed first."""
    lock = Lock(settings.state / "lock")
    if not lock.try_take():
        raise RefusedError(
            f"{settings.state} is in use by another broker (process {lock.holder()}); stop it or choose another --state"
        )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    store = None
    spool = Spool(settings.state / "spool")
    try:
        store = Store.open(settings.state / STORE_NAME)
        with wire.authenticator(context, settings.keys) as authorized:
            socket = wire.router(context, settings.bind, settings.keys)
            link = Link(socket, authorized, spool)
            try:
                clock = SystemClock()
                state = prepare(store, spool, clock, settings.grace_s, int(settings.disk_reserve_gib * GIB))
                figures = metrics.Metrics()
                port = metrics.start(figures, settings.metrics_port)
                server = Server(state, store, spool, link, clock, settings.state, figures)
                _obey_signals(server)
                _announce(settings, socket, state.incarnation, len(state.jobs))
                server.run()
                if port is not None:
                    port.stop()
            finally:
                link.close()
    finally:
        if store is not None:
            store.close()
        spool.close()
        context.term()
        lock.release()


def _announce(settings: BrokerSettings, socket: zmq.Socket[bytes], incarnation: int, jobs: int) -> None:
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    endpoint = f"{settings.bind.rpartition(':')[0]}:{port}"  # the socket's own word has the host in a mapped form
    fresh = settings.state / f".{ENDPOINT_NAME}.new"
    fresh.write_text(endpoint + "\n")
    fresh.rename(settings.state / ENDPOINT_NAME)
    log.info("listening", endpoint=endpoint, incarnation=incarnation, open_jobs=jobs, insecure=settings.keys.insecure)


def _obey_signals(server: Server) -> None:
    def stop(number: int, _: FrameType | None) -> None:
        if server.stopping:
            os._exit(128 + number)
        server.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
