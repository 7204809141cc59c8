"""values: everything that crosses a socket, in order of flow (style habit 8). Knows neither sockets nor rules.

First the worker's session with its broker (S1-S5), then the client's requests. Every field is checked against its
type and against ``common.limits`` by ``common.codec`` before anyone sees the message. Bodies are bytes of JSON, so
that a broker carries them without looking inside. What travels once for each line is a named tuple (made, hashed and
compared at a fraction of a dataclass's cost), the rest are frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.ids import LineId

# ---------------------------------------------------------------------------------------------------- shared values


@dataclass(frozen=True, slots=True)
class Fence:
    """What a message after WELCOME must agree with (S4): store, broker run, worker run, login."""

    store_id: str
    broker_incarnation: int
    worker_incarnation: int
    epoch: int


class LineRef(NamedTuple):
    """One try at one line: DONE is judged by it alone."""

    job: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody here needs
    attempt: int

    @property
    def line(self) -> LineId:
        return LineId(self.job, self.index)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model a worker serves. ``fingerprint`` covers weights, tokenizer, template, dtype and kernel."""

    name: str
    fingerprint: str
    context_tokens: int


@dataclass(frozen=True, slots=True)
class RingReport:
    """The ring's books (R4), bytes unless named otherwise."""

    capacity: int = 0
    taken: int = 0
    returned: int = 0
    live: int = 0
    padding_live: int = 0
    tokens_pending: int = 0
    items_unresolved: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a worker's engine says of itself, as it stands; ``staged_bytes`` only grows."""

    contexts_running: int = 0
    contexts_waiting: int = 0
    pages_held: int = 0
    pages_free: int = 0
    """Device pages of retained history."""
    headroom_held_bytes: int = 0
    headroom_bytes: int = 0
    """Of headroom: what holds history, and all of it."""
    staged_bytes: int = 0
    """History copied over the link."""
    link_bytes_s: float = 0.0
    """What the link carries, measured; 0 where it is not known."""


class HeldLine(NamedTuple):
    """A line the worker holds: ``state`` is ``running`` (not finished) or ``finished`` (durable in its outbox)."""

    ref: LineRef
    state: str


class Verdict(NamedTuple):
    """The broker's word on a held or delivered line.

    For a HELLO's lines: ``keep`` (go on), ``cancel`` (stop, nobody wants it), ``stored`` (durable already, drop it),
    ``send`` (finished: deliver it). In an ACK: ``stored``, ``known`` (another result was first), ``refused`` (kept
    aside, the line ends ``result_refused``).
    """

    ref: LineRef
    verdict: str
    reason: str = ""


# ---------------------------------------------------------------------------------------------- worker, logging in


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker to broker: a login, one page of what it holds. ``more`` says that another page follows.

    ``schema``, ``worker``, ``incarnation`` and ``login`` keep their places in every schema version.
    """

    schema: int
    worker: str
    incarnation: int
    login: int
    store_id: str
    """The store whose rows the outbox holds; empty when it holds none."""
    models: tuple[ModelInfo, ...]
    concurrency: int
    ring_bytes: int
    held: tuple[HeldLine, ...]
    page: int
    more: bool
    ran: tuple[LineRef, ...] | None = None
    """In the first page: what the engine ran when this worker's former run ended without saying so (D5's evidence);
    empty if that run ended in order or ran nothing. None in later pages, and from workers that keep no such record."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Broker to worker: the session stands. Verdicts of held lines come in pages; only the last has ``more`` false."""

    fence: Fence
    beat_s: float
    liveness_s: float
    verdicts: tuple[Verdict, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Broker to worker or client: not let in; ``code`` is stable, ``reason`` says what to change."""

    code: str
    reason: str


# ---------------------------------------------------------------------------------------------- worker, at work


class BatchLine(NamedTuple):
    """A line to run. ``total`` is the body's whole length; ``body`` is all of it or, for a long one, its first part."""

    ref: LineRef
    url: str
    total: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """Broker to worker: an assignment, within the worker's credit."""

    fence: Fence
    assignment: int
    lines: tuple[BatchLine, ...]


@dataclass(frozen=True, slots=True)
class BodyPart:
    """Broker to worker: the next part of a body longer than ``PART_MAX_BYTES``; parts come in order."""

    fence: Fence
    ref: LineRef
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """Worker to broker, every ``beat_s``: alive, and what its engine does (S3). Credit is what it can still take."""

    fence: Fence
    phase: str
    """``loading``, ``ready`` or ``draining``."""
    steps: int
    tokens: int
    concurrency: int
    credit_lines: int
    credit_bytes: int
    running: tuple[LineRef, ...]
    """Lines the engine has admitted (D5's evidence), at most a page of them."""
    ring: RingReport
    models: tuple[ModelInfo, ...] = ()
    """Filled once the model is loaded: a worker logs in before it knows its fingerprint."""
    assignment: int = 0
    """The last assignment that came in before this beat was written: credit sent after it is not in these figures."""
    head: LineRef | None = None
    """The first line that waits inside the engine (A7), and ``waits`` why: its kind of reason, a colon, and words."""
    waits: str = ""
    engine: EngineReport = EngineReport()


@dataclass(frozen=True, slots=True)
class BrokerBeat:
    """Broker to worker, every ``beat_s``."""

    fence: Fence


class Result(NamedTuple):
    """A finished line. ``status`` is ``ok``, ``failed`` (the line's own fault) or ``cancelled`` (was told to stop).

    ``total`` is the whole length of ``body``; a longer body than ``PART_MAX_BYTES`` starts here and goes on in
    ``ResultPart``. ``body`` is the JSON of the output line's ``response`` (ok, failed) or empty (cancelled).
    """

    ref: LineRef
    status: str
    status_code: int
    prompt_tokens: int
    completion_tokens: int
    total: int
    body: bytes
    notes: str = ""
    """What it waited for in the worker and which device pages moved for it, one note a line; for people alone."""


@dataclass(frozen=True, slots=True)
class Done:
    """Worker to broker: results that are durable on the worker already (D1)."""

    fence: Fence
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class ResultPart:
    """Worker to broker: the next part of a long result; the broker confirms with ``PartTaken``."""

    fence: Fence
    ref: LineRef
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PartTaken:
    """Broker to worker: it holds this result up to ``offset`` (not stored yet)."""

    fence: Fence
    ref: LineRef
    offset: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Broker to worker: stored durably, nothing less (D1)."""

    fence: Fence
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class CancelLines:
    """Broker to worker: stop these; each is answered by its finished result or by a ``cancelled`` one."""

    fence: Fence
    lines: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Either side: no new work from now on."""

    fence: Fence
    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Worker to broker: leaving; the lines it hands back unfinished, unblamed."""

    fence: Fence
    reason: str
    handed_back: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Broker to worker: no session of mine; log in again."""

    reason: str


# ---------------------------------------------------------------------------------------------------- the client
# Each request carries ``request``, a number of the client's own, and its answer repeats it.


@dataclass(frozen=True, slots=True)
class Submit:
    """A job announced. Idempotent by ``job``; the same id with another ``sha256`` is refused."""

    request: int
    job: str
    name: str
    size: int
    sha256: str
    lenient: bool
    priority: int
    window_s: int
    """Seconds the job may take; 0 for no limit."""
    model: str
    """What every line's ``model`` must be; empty for any."""
    url: str = ""
    """What every line's ``url`` must be; empty for any."""


@dataclass(frozen=True, slots=True)
class Need:
    """Broker: send the input from ``offset`` on; ``offset == size`` means nothing is missing: seal it."""

    request: int
    job: str
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the input file; answered by ``Need``."""

    request: int
    job: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """All of the input is there; answered by ``JobInfo`` (``validating`` or later)."""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Answered by ``JobInfo``. ``watch`` polls it, so that nothing is lost with a broker."""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class AskJobs:
    """Answered by ``Jobs``: those the key may see, newest first, ``offset`` skipped."""

    request: int
    offset: int
    open_only: bool = False
    """Only those that have not ended."""


@dataclass(frozen=True, slots=True)
class AskProblems:
    """Answered by ``Problems``: the bad lines of a job's input."""

    request: int
    job: str
    offset: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Answered by ``Lines``: finished lines from ``offset`` on, ``which`` is ``output`` or ``error``."""

    request: int
    job: str
    which: str
    offset: int


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Answered by ``JobInfo``."""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Forget an ended job with all its lines; answered by ``Deleted``, also when it was deleted before."""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class AskWorkers:
    """Answered by ``Workers``."""

    request: int


@dataclass(frozen=True, slots=True)
class AskAudit:
    """Answered by ``Audit``: does D4 hold for this job?"""

    request: int
    job: str


@dataclass(frozen=True, slots=True)
class Explain:
    """Answered by ``Explained``: what became of a job, or of one line of it."""

    request: int
    job: str
    custom_id: str
    """Empty for the job as a whole."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as people see it. ``status`` is one of the service's words; counts are lines."""

    request: int
    job: str
    name: str
    status: str
    total: int
    completed: int
    failed: int
    running: int
    waiting: int
    wasted: int
    prompt_tokens: int
    completion_tokens: int
    created_at: float
    started_at: float
    ended_at: float
    """Wall seconds; 0 for not yet."""
    problems: int
    """Bad lines of the input."""
    reason: str
    """Why it waits or failed, in words; empty when there is nothing to say."""
    lines_read: int = 0
    """Input lines checked so far, while ``validating``."""
    expires_at: float = 0.0
    """Wall seconds at which the job's window ends; 0 for no limit."""
    lines_s: float = 0.0
    """Lines that end a second, of late; 0 where nothing ends, or nobody has looked twice yet."""


@dataclass(frozen=True, slots=True)
class Jobs:
    request: int
    jobs: tuple[JobInfo, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """One bad line of an input file; ``line`` counts from 1."""

    line: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Problems:
    request: int
    job: str
    problems: tuple[Problem, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Lines:
    """Output lines (JSON bytes without the line end) from ``offset`` on; ``next_offset`` asks for the following ones.

    A line longer than ``PART_MAX_BYTES`` comes alone, in pieces: ``piece_offset`` > 0 or ``piece_more`` mark them.
    ``ended`` says that the job is closed and nothing follows.
    """

    request: int
    job: str
    lines: tuple[bytes, ...]
    next_offset: int
    ended: bool
    piece_more: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as people see it."""

    worker: str
    incarnation: int
    epoch: int
    phase: str
    models: tuple[ModelInfo, ...]
    concurrency: int
    credit_lines: int
    running: int
    assigned: int
    steps: int
    tokens: int
    last_beat_s: float
    ring: RingReport
    credit_bytes: int = 0
    engine: EngineReport = EngineReport()
    tokens_s: float = 0.0
    staged_bytes_s: float = 0.0
    """What its beats make of both totals, of late."""
    waits: str = ""
    """Why the first line that waits in its engine does: the kind of reason alone, since anybody may ask."""


@dataclass(frozen=True, slots=True)
class Workers:
    request: int
    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """``holds`` is D4: lines(output) + lines(error) = total, each custom_id once."""

    request: int
    job: str
    holds: bool
    total: int
    output_lines: int
    error_lines: int
    duplicates: int
    missing: int
    wasted: int
    runs: int
    findings: tuple[str, ...]
    finished: bool = True
    """Whether the job has ended; until then ``holds`` is false."""
    sound: bool = True
    """Whether nothing was found wrong (so far)."""


@dataclass(frozen=True, slots=True)
class Explained:
    """What happened, in order, in words."""

    request: int
    job: str
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """The job is gone; ``lines`` it had, 0 if it was gone before."""

    request: int
    job: str
    lines: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Broker to client: a request that cannot be met; ``code`` and ``exit_code`` are stable."""

    request: int
    code: str
    message: str
    exit_code: int


FLEET = (
    Hello, Welcome, Refused, Batch, BodyPart, WorkerBeat, BrokerBeat, Done, ResultPart, PartTaken, Ack, CancelLines,
    Drain, Bye, Unknown,
)  # fmt: skip
CLIENT = (
    Submit, Need, Chunk, Seal, AskStatus, AskJobs, AskProblems, Fetch, CancelJob, DeleteJob, AskWorkers, AskAudit,
    Explain, JobInfo, Jobs, Problems, Lines, Workers, Audit, Explained, Deleted, Failure,
)  # fmt: skip
