"""values: what the broker's rules decide. ``Step`` keeps writes and sends apart: first synced, then said (D1).

Writes are tuples in the order of their statement's parameters; ``job`` is the job's number in the store. Knows no
statement, no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker.state import Job
from common.messages import Fence, LineRef

# ---------------------------------------------------------------------------------------------------------- writes


class NewJob(NamedTuple):
    job: Job


class SaveJob(NamedTuple):
    """The job's row as the object stands when the turn ends."""

    job: Job


class AppendInput(NamedTuple):
    """A piece of an input file, to its end, which is at ``offset``; ``peer`` hears about ``request`` if it fails."""

    job: str
    offset: int
    data: bytes
    peer: bytes
    request: int


class SealInput(NamedTuple):
    """Sync an input file."""

    job: str


class AssignLine(NamedTuple):
    """A line is held by ``worker`` under attempt ``held``; ``attempt`` is the highest number given out."""

    attempt: int
    held: int
    worker: str
    job: int
    idx: int


class ReturnLine(NamedTuple):
    """A line waits again."""

    deaths: int
    job: int
    idx: int


class CountDeath(NamedTuple):
    """A line ran alone when its worker died (D5)."""

    deaths: int
    job: int
    idx: int


class EndAttempt(NamedTuple):
    """How an attempt ended otherwise than as the line's stored result: ``known``, ``lost``, ``handed_back``..."""

    job: int
    idx: int
    attempt: int
    worker: str
    how: str
    at: float


class StoreResult(NamedTuple):
    """The one end of a line. ``kind`` 0 is output, 1 error; ``seq`` its place there. ``code`` only if it never ran."""

    job: int
    idx: int
    kind: int
    seq: int
    attempt: int
    status_code: int
    code: str
    message: str
    prompt_tokens: int
    completion_tokens: int
    worker: str
    body: bytes
    at: float
    notes: str = ""


class SaveSession(NamedTuple):
    """The last login of a worker; ``state`` is ``open``, ``left`` (said goodbye) or ``lost``."""

    worker: str
    user: str
    incarnation: int
    login: int
    epoch: int
    state: str
    at: float


class ForgetWorker(NamedTuple):
    """A worker that came once, long before many others, is known no more."""

    worker: str


class History(NamedTuple):
    """Something that happened, for people and for ``explain``."""

    at: float
    kind: str
    job: str
    worker: str
    detail: str


class DropJob(NamedTuple):
    """A closed job is deleted: gone at once, its rows later."""

    job: str
    at: float


Write = (
    NewJob | SaveJob | AppendInput | SealInput | AssignLine | ReturnLine | EndAttempt | StoreResult | SaveSession
    | ForgetWorker | History | CountDeath | DropJob
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- sends


class Send(NamedTuple):
    peer: bytes
    message: Any


class BodyAt(NamedTuple):
    """A line to run, its body still in the input file of ``ref.job``."""

    ref: LineRef
    url: str
    offset: int
    size: int


class SendBatch(NamedTuple):
    """An assignment; the shell reads the bodies and sends long ones in parts."""

    peer: bytes
    fence: Fence
    assignment: int
    lines: tuple[BodyAt, ...]


class Query(NamedTuple):
    """A client's question, answered from the store as it stands after the commit."""

    peer: bytes
    user: str
    admin: bool
    message: Any


class Note(NamedTuple):
    """Something for log and metrics; ``kind`` is stable."""

    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Step:
    """What one input leads to. Nothing in ``sends`` may leave before all of ``writes`` is synced."""

    writes: list[Write] = field(default_factory=list)
    sends: list[Send | SendBatch | Query] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def note(self, kind: str, **fields: Any) -> None:
        self.notes.append(Note(kind, fields))
