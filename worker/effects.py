"""values: what a worker's session decides, for its shell to carry out. Knows no socket, no thread and no database.

``WRITES`` go into the outbox in one transaction a turn; only then are the ``SENDS`` spoken (style habit 5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from common.messages import Fence, LineRef
from worker.structures import Outcome, Request, TokenizeJob


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a fresh socket to this endpoint (the one before is closed already)."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the socket; ``linger`` gives its last frames a moment to leave."""

    linger: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    message: object


@dataclass(frozen=True, slots=True)
class SendResults:
    """Read these whole results from the outbox and send them in one DONE."""

    fence: Fence
    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class SendPart:
    """Read this result from the outbox and send ``length`` bytes from ``offset``; offset 0 goes in a DONE."""

    fence: Fence
    ref: LineRef
    offset: int
    length: int


class Tokenize(NamedTuple):
    """Hand a line to the tokenizer."""

    job: TokenizeJob


@dataclass(frozen=True, slots=True)
class StopRequests:
    """Tell the engine, through the ring, to stop these."""

    requests: tuple[Request, ...]


class Resolve(NamedTuple):
    """So many requests that were in the ring have ended (R4's items)."""

    items: int


class Save(NamedTuple):
    """Store a result durably, as one of this store's; answered by ``Stored``."""

    outcome: Outcome
    store_id: str


class Discard(NamedTuple):
    """The broker has these durably, or wants them no more: their rows may go."""

    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """The broker refused this result: keep its row, and never send it again."""

    ref: LineRef
    reason: str


class NoteRunning(NamedTuple):
    """The engine runs these: on record, unsynced (D5's evidence after a death)."""

    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class NoteStopped:
    """The engine runs these no more, and there is no result of them to store."""

    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log and its counter: ``name`` is stable, ``level`` one of info, warning, error."""

    name: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process."""

    code: int
    reason: str


WRITES = (Save, Discard, SetAside, NoteRunning, NoteStopped)
SENDS = (Connect, Disconnect, Send, SendResults, SendPart)
Effect: TypeAlias = (
    Connect
    | Disconnect
    | Send
    | SendResults
    | SendPart
    | Tokenize
    | StopRequests
    | Resolve
    | Save
    | Discard
    | SetAside
    | NoteRunning
    | NoteStopped
    | Note
    | Exit
)
