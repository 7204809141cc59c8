"""shell: the HTTP server's process: opens what it needs, serves a socket it was handed, ends with its broker.

A process of its own, so that parsing uploads never takes the interpreter from the broker's loop, and a fault here costs
no session. Started by ``broker.http.child`` alone, with its settings as one JSON argument.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import uvicorn

from broker.http.app import Api
from broker.http.bearer import Bearer
from broker.http.carrier import Carrier
from broker.http.door import Door
from broker.http.fleet import Fleet
from broker.http.head import BoundedHead
from broker.http.plan import Plan, read
from broker.http.shelf import Shelf
from broker.http.visits import Visits
from broker.standby import PULSE_NAME
from common import limits, log
from common.clock import SystemClock
from common.config import KeySettings
from common.errors import HaulierError, RefusedError
from common.locks import Lock
from common.parent import follow_parent

KEEP_ALIVE_S = 30


def serve(plan: Plan) -> None:
    """Serve until SIGTERM. Main thread."""
    state = Path(plan.state)
    lock = _locked(state / "http" / "lock")
    clock = SystemClock()
    bearer = Bearer(Path(plan.http_keys), Path(plan.keys) if plan.keys else None) if plan.http_keys else None
    keys = KeySettings(Path(plan.keys)) if plan.keys else KeySettings(None, insecure=True)
    fleet = Fleet(plan.broker, keys, by_tenant=bearer is not None)
    shelf = Shelf(state / "http" / "tenants", clock, plan.reserve_bytes)
    carrier = Carrier(shelf, fleet, clock)
    visits = Visits(bearer, clock) if bearer is not None else None
    api = Api(shelf, fleet, carrier, clock, plan.upload_bytes, state / PULSE_NAME, visits)
    config = uvicorn.Config(
        Door(api.app(), bearer, visits=visits),
        http=BoundedHead, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, limit_concurrency=limits.HTTP_CONNECTIONS_MAX_COUNT, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(limits.HTTP_STOP_S), ssl_certfile=plan.cert or None, ssl_keyfile=plan.key or None,
    )  # fmt: skip
    carrier.start()
    try:
        uvicorn.Server(config).run(sockets=[socket.socket(fileno=plan.descriptor)])
    finally:
        carrier.stop()
        api.close()
        fleet.close()
        lock.release()


def _locked(path: Path) -> Lock:
    """The folder is ours once the server of a broker that was killed just now is gone."""
    lock, until = Lock(path), time.monotonic() + limits.PARENT_GRACE_S * 2
    while not lock.try_take():
        if time.monotonic() > until:
            raise RefusedError(f"{path} is held by process {lock.holder()}, which should have ended with its broker")
        time.sleep(0.05)
    return lock


if __name__ == "__main__":
    follow_parent()
    log.setup()
    try:
        serve(read(sys.argv[1]))
    except HaulierError as failure:
        log.get("broker.http.main").error("http_refused", reason=str(failure))
        sys.exit(failure.exit_code)
