"""values: what the broker holds in memory between turns, and the check of its own books. Decides nothing.

Lines that wait are held in windows, so that memory does not grow with a job; lines that are assigned are all here.
The store holds the same and more: after a crash, this is rebuilt from it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from broker.pace import JOB_S, WORKER_S, Pace
from common.errors import InvariantError
from common.ids import LineId
from common.messages import EngineReport, Fence, HeldLine, Hello, LineRef, ModelInfo, Result, RingReport, Welcome

OPEN = ("receiving", "validating", "in_progress", "cancelling", "expiring")
CLOSED = ("completed", "failed", "cancelled", "expired")
WAITING, ASSIGNED, ENDED = 0, 1, 2
"""States of a line in the store. ``ENDED``: its one result is there."""
NOT_SAID, HAS_IT, UNOWNED, HELPS, PASSED_OVER = range(5)
"""Why a line went to its worker: it was not the window's to give; the worker has its key; nobody had it; others have
it, and there was nothing else to do; it was passed over often enough (``broker.affinity``)."""


@dataclass(slots=True, eq=False)
class Line:
    """One line in memory: waiting in a window, or assigned. ``offset`` and ``size`` find its body in the input file."""

    index: int
    url: str
    model: str
    offset: int
    size: int
    attempt: int = 0
    """The highest attempt given out; 0 for never."""
    held: int = 0
    """The attempt under which it is assigned now."""
    worker: str = ""
    session: Session | None = None
    """None while it waits, and while it is assigned but unclaimed after a restart."""
    deaths: int = 0
    """Workers that died while they ran this line alone (D5)."""
    group: int = 0
    """Suspects that run together; 0 for no suspect."""
    prefix: int = 0
    """The key of how it begins (``common.prefixes``); 0 for none."""
    passed: int = 0
    """How often another line was taken while this one was the head of its window."""
    why: int = NOT_SAID
    """Why it went where it is now; known to the broker's run that gave it out."""
    since: float = 0.0
    """Wall seconds since when its session holds it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What the store says about a line: its state, the line as it stands there, the attempt whose result is stored.

    ``job`` is the job's number.
    """

    job: int
    state: int
    line: Line
    result_attempt: int = 0


@dataclass(slots=True, eq=False)
class Window:
    """Waiting lines of one job and one model. Those beyond ``cursor`` are still in the store only.

    ``groups`` are the same lines by key, each key where its first line came, in order within a key: what is looked for
    is found without going through the lines. Put in and taken out by ``add`` and ``drop`` alone.
    """

    model: str
    lines: OrderedDict[int, Line] = field(default_factory=OrderedDict)
    groups: OrderedDict[int, OrderedDict[int, Line]] = field(default_factory=OrderedDict)
    cursor: int = 0
    exhausted: bool = False

    def add(self, line: Line, first: bool = False) -> None:
        """Behind all others, or before them."""
        group = self.groups.get(line.prefix)
        if group is None:
            group = self.groups[line.prefix] = OrderedDict()
        self.lines[line.index] = group[line.index] = line
        if first:
            self.lines.move_to_end(line.index, last=False)
            group.move_to_end(line.index, last=False)
            self.groups.move_to_end(line.prefix, last=False)

    def drop(self, index: int) -> bool:
        """Whether it was there."""
        line = self.lines.pop(index, None)
        if line is None:
            return False
        group = self.groups[line.prefix]
        del group[index]
        if not group:
            del self.groups[line.prefix]
        return True

    @property
    def head(self) -> Line:
        return next(iter(self.lines.values()))

    def group_head(self, key: int) -> Line:
        return next(iter(self.groups[key].values()))

    def first(self, key: int) -> Line | None:
        """The first line with ``key``, if one waits."""
        return self.group_head(key) if key in self.groups else None

    def waiting(self, key: int) -> int:
        return len(self.groups[key])


@dataclass(slots=True, eq=False)
class Job:
    """An open job. ``number`` is its key in the store; counts are lines, ``failed`` counts all error lines."""

    id: str
    number: int
    owner: str
    name: str
    size: int
    sha256: str
    lenient: bool
    priority: int
    window_s: int
    model: str
    created_at: float
    status: str = "receiving"
    started_at: float = 0.0
    ended_at: float = 0.0
    shift_s: float = 0.0
    """Seconds by which the wall clock was set since the job came: its deadline goes with it."""
    deadline: float = 0.0
    """Monotonic seconds of this process; 0 for none."""
    received: int = 0
    heard_at: float = 0.0
    """When something of its input came last, monotonic seconds."""
    checked_bytes: int = 0
    lines_read: int = 0
    good: int = 0
    problems: int = 0
    completed: int = 0
    failed: int = 0
    bad_stored: int = 0
    """Bad lines with an error line of their own (``lenient``): among ``failed``."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reason: str = ""
    served: float = 0.0
    """Tokens served, for the fair share; begins at the least of its owner's other jobs."""
    assigned: dict[int, Line] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    suspects: dict[int, Line] = field(default_factory=dict)
    """Waiting lines that are given out on trial only (D5); in no window."""
    waiting_ended: bool = False
    """Nothing waits in the store any more: every waiting line of an ending job has its error line."""
    dirty: bool = False
    url: str = ""
    """What every line's ``url`` must be; empty for any."""
    pace: Pace = field(default_factory=lambda: Pace(JOB_S))
    """Of lines that end."""

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def expires_at(self) -> float:
        """Wall seconds at which its window ends; 0 for never."""
        return self.created_at + self.window_s + self.shift_s if self.window_s else 0.0

    @property
    def total(self) -> int:
        return self.good + self.problems

    @property
    def waiting(self) -> int:
        """Good lines that are neither assigned nor ended."""
        return self.good - (self.completed + self.failed - self.bad_stored) - len(self.assigned)


@dataclass(slots=True)
class Partial:
    """A long result that is coming in parts."""

    result: Result
    data: bytearray


@dataclass(slots=True, eq=False)
class Login:
    """A login whose pages are still coming."""

    hello: Hello
    user: str
    held: list[HeldLine]
    heard_at: float
    """When its newest page came, monotonic seconds."""
    pages: int = 1


@dataclass(slots=True, eq=False)
class Session:
    """The one live relation of a worker to this broker (S1)."""

    peer: bytes
    user: str
    worker: str
    login: int
    schema: int
    fence: Fence
    models: tuple[ModelInfo, ...]
    concurrency: int
    heard_at: float
    beat_at: float
    phase: str = "loading"
    credit_lines: int = 0
    credit_bytes: int = 0
    sent: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(assignment, lines, bytes) sent and not yet in the worker's own figures."""
    told_at: float = 0.0
    """When its last beat came, monotonic seconds; 0 for never."""
    steps: int = 0
    tokens: int = 0
    tokens_pace: Pace = field(default_factory=lambda: Pace(WORKER_S))
    staged_pace: Pace = field(default_factory=lambda: Pace(WORKER_S))
    """Of the tokens and the staged bytes in its beats."""
    engine: EngineReport = field(default_factory=EngineReport)
    ring: RingReport = field(default_factory=RingReport)
    head: LineRef | None = None
    waits: str = ""
    """The first line that waits inside its engine, and why, as its last beat said."""
    lines: dict[tuple[str, int], Line] = field(default_factory=dict)
    running: frozenset[LineRef] = frozenset()
    keys: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Beginnings of lines it holds or lately held, oldest first; bounded."""
    partial: dict[LineRef, Partial] = field(default_factory=dict)
    draining: bool = False
    welcome: tuple[Welcome, ...] = ()
    """The answer to its HELLO, to be repeated if asked again before the first beat."""

    @property
    def open_bytes(self) -> int:
        return sum(one.result.total for one in self.partial.values())


@dataclass(slots=True, eq=False)
class KnownWorker:
    """What is remembered of a worker's logins, beyond sessions and restarts (S4)."""

    user: str
    incarnation: int
    login: int
    epoch: int


@dataclass(slots=True, eq=False)
class State:
    """All of it. ``grace_until`` and ``absent`` are D3's: who held lines before the restart and is not back."""

    store_id: str
    incarnation: int
    next_job: int = 1
    next_epoch: int = 1
    next_assignment: int = 1
    grace_until: float = 0.0
    absent: set[str] = field(default_factory=set)
    trial: bytes = b""
    """The connection of the session that tries suspects, or is about to; it gets nothing else."""
    next_group: int = 0
    accused: dict[str, tuple[int, LineId]] = field(default_factory=dict)
    """By worker: the run that ended and the one line it was running; counted only if the process did end."""
    clock: float | None = None
    """Wall clock less monotonic clock, as last agreed to."""
    disk_free: int = 0
    disk_reserve: int = 0
    stopping: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)
    sessions: dict[bytes, Session] = field(default_factory=dict)
    by_worker: dict[str, Session] = field(default_factory=dict)
    logins: dict[bytes, Login] = field(default_factory=dict)
    known: dict[str, KnownWorker] = field(default_factory=dict)
    """By worker, the one that logged in longest ago first; bounded."""
    served: dict[str, float] = field(default_factory=dict)
    """Tokens served to each owner, for the fair share."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of keys that get more or less than one share."""
    owners: dict[int, int] = field(default_factory=dict)
    """How many live sessions have each beginning."""

    def unclaimed(self) -> Iterator[tuple[Job, Line]]:
        """Assigned lines that no session holds yet: only after a restart, within the grace."""
        for job in self.jobs.values():
            for line in job.assigned.values():
                if line.session is None:
                    yield job, line

    def find(self, line: LineId) -> Line | None:
        """The line, if it is in memory: assigned or in a window."""
        job = self.jobs.get(line.job)
        if job is None:
            return None
        found = job.assigned.get(line.index) or job.suspects.get(line.index)
        if found is None:
            for window in job.windows.values():
                if line.index in window.lines:
                    return window.lines[line.index]
        return found

    def check(self) -> None:
        """Raise ``InvariantError`` unless the books agree (tests call this after every input)."""
        for job in self.jobs.values():
            _need(job.is_open, f"closed job {job.id} in memory")
            _need(job.waiting >= 0, f"job {job.id}: {job.waiting} lines wait")
            for window in job.windows.values():
                _need(not window.lines.keys() & job.assigned.keys(), f"job {job.id}: a line waits and is assigned")
            _need(not job.suspects.keys() & job.assigned.keys(), f"job {job.id}: a suspect waits and is assigned")
            for window in job.windows.values():
                _need(not window.lines.keys() & job.suspects.keys(), f"job {job.id}: a suspect waits among others")
                grouped = {index: line for group in window.groups.values() for index, line in group.items()}
                _need(grouped == window.lines and all(window.groups.values()), f"job {job.id}: a window's keys")
            for index, line in job.assigned.items():
                _need(0 < line.held <= line.attempt, f"{job.id}#{index}: attempt {line.held} was never given out")
                if line.session is None:
                    _need(line.worker in self.absent, f"{job.id}#{index}: unclaimed, its worker is not awaited")
                else:
                    _need(line.session.lines.get((job.id, index)) is line, f"{job.id}#{index}: not in its session")
        for peer, session in self.sessions.items():
            _need(session.peer == peer and self.by_worker.get(session.worker) is session, "two sessions of one worker")
            for (job_id, index), line in session.lines.items():
                held = self.jobs[job_id].assigned.get(index) if job_id in self.jobs else None
                _need(held is line, f"{job_id}#{index}: in a session and not assigned")
        _need(len(self.sessions) == len(self.by_worker), "a session without a connection")
        had = Counter(key for session in self.sessions.values() for key in session.keys)
        _need(dict(had) == self.owners, "keys without a session")


def _need(holds: bool, words: str) -> None:
    if not holds:
        raise InvariantError(words)
