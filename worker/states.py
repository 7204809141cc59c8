"""values: where a worker's session may stand (S1), and who logs in. The transitions are in ``worker.session``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.messages import LineRef

FATAL = frozenset({"incarnation", "schema", "worker_id"})
"""Refusals that trying again cannot mend: a newer process of this worker is there, or one side must be upgraded."""


class State(Enum):
    """Where the session stands. DRAINING is UP without new work."""

    OUT = "logged out"
    CONNECTING = "connecting"
    GREETING = "hello sent"
    UP = "welcomed"
    DRAINING = "draining"
    LEFT = "left"


WELCOMED = (State.UP, State.DRAINING)
LINKED = (State.CONNECTING, State.GREETING, State.UP, State.DRAINING)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who logs in: ``worker`` and ``incarnation`` are the state folder's, ``brokers`` are tried one at a time."""

    worker: str
    incarnation: int
    brokers: tuple[str, ...]
    last_store: str = ""
    """The store this worker's outbox has rows of; its HELLO lists that one's first."""
    ran: tuple[LineRef, ...] = ()
    """What the engine ran when this worker's former run ended without saying so (D5): at most a page of it."""
