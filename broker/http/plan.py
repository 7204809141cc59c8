"""values: what the broker tells its HTTP server's process, as one argument of its command line. No secret is in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """What the process is to do."""

    descriptor: int
    """The listening socket, inherited."""
    broker: str
    state: str
    keys: str
    """The broker's key folder; empty with ``--insecure``."""
    http_keys: str
    """Empty for none: everybody on loopback."""
    upload_bytes: int
    reserve_bytes: int
    cert: str = ""
    key: str = ""
    """Files of TLS; empty for plain HTTP."""

    def written(self) -> str:
        return json.dumps(asdict(self))


def read(text: str) -> Plan:
    return Plan(**json.loads(text))
