"""rules: who gets which line next: within credit, by the weighted fair share of keys, priority, the share of jobs.

Credit, not guessing: a session gets at most what its last beat granted, less what was sent since; an idle worker may
get one line however long. A line whose model nobody serves waits, with its reason in words. Shares are counted in
tokens: guessed from a body's length when a line is given out, and set right by what its result says. A priority orders
the jobs of one key: nobody gets ahead of other keys by it. Which lines of a window a session gets is ``affinity``'s.
Does not know how lines come back.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker import affinity, recovery, suspects
from broker.effects import BodyAt, SendBatch, Step
from broker.inputs import Now
from broker.state import Job, Line, Session, State, Window
from common import limits
from common.messages import LineRef

QUANTUM_LINES = 32
"""Lines given to one session before the fair share is looked at again."""
QUANTUM_BYTES = 256 * 1024


def can_take(session: Session) -> bool:
    """Whether the session may be given a line now."""
    return (
        session.phase == "ready"
        and not session.draining
        and session.credit_lines > 0
        and (session.credit_bytes > 0 or not session.lines)
        and session.schema == limits.SCHEMA_VERSION
    )


def serves(session: Session, model: str) -> bool:
    return any(one.name == model for one in session.models)


def _takers(state: State) -> dict[str, list[Session]]:
    """Sessions that may be given lines, by model."""
    found: dict[str, list[Session]] = {}
    for session in state.sessions.values():
        if can_take(session) and session.peer != state.trial:
            for model in session.models:
                found.setdefault(model.name, []).append(session)
    return found


def windows_wanted(state: State) -> Iterator[tuple[Job, Window, int]]:
    """Windows that run low while somebody could take their lines, and how many lines to load into each."""
    takers = _takers(state)
    if state.stopping or not takers:
        return
    running = [job for job in state.jobs.values() if job.status == "in_progress"]
    count = max(limits.WAITING_LOADED_MIN_COUNT, limits.WAITING_LOADED_MAX_COUNT // max(1, len(running)))
    for job in running:
        for window in job.windows.values():
            if not window.exhausted and len(window.lines) < count // 4 and window.model in takers:
                yield job, window, count


def loaded(state: State, job_id: str, model: str, lines: tuple[Line, ...], cursor: int, exhausted: bool) -> None:
    """Waiting lines from the store, in order, behind those in the window already."""
    job = state.jobs.get(job_id)
    window = job.windows.get(model) if job is not None else None
    if job is None or window is None:
        return
    for line in lines:
        index = line.index
        if not (index in job.assigned or index in job.suspects or index in window.lines):
            window.add(line)
    window.cursor, window.exhausted = cursor, exhausted


def dispatch(state: State, now: Now, step: Step) -> None:
    """Give out what can be given out: suspects to the session that tries them, the rest to all others."""
    if state.stopping:
        return
    trial = suspects.next_trial(state, now, step)
    if trial is not None:
        _send(state, *trial, step)
    takers = _takers(state)
    given: dict[bytes, list[tuple[Job, Line]]] = {}
    while takers:
        choice = _next(state, takers)
        if choice is None:
            break
        job, window = choice
        session = _taker(takers[window.model], window.head.prefix)
        _give(state, job, window, session, given.setdefault(session.peer, []), now, step)
        if not can_take(session):
            takers = _takers(state)
    for peer, lines in given.items():
        _send(state, state.sessions[peer], lines, step)


def _next(state: State, takers: dict[str, list[Session]]) -> tuple[Job, Window] | None:
    """The job and model whose turn it is: of the key served least, the highest priority, the job served least."""
    best: tuple[Job, Window] | None = None
    least: tuple[float, ...] = ()
    for job in state.jobs.values():
        if job.status != "in_progress":
            continue
        for window in job.windows.values():
            if window.lines and window.model in takers:
                share = state.served.get(job.owner, 0.0) / state.weights.get(job.owner, 1.0)
                rank = (share, -job.priority, job.served, job.number)
                if best is None or rank < least:
                    best, least = (job, window), rank
    return best


def _taker(takers: list[Session], key: int) -> Session:
    """Who has the most room; of equals, who has the key of the window's head."""
    return max(takers, key=lambda one: (one.credit_lines, key in one.keys, one.worker))


def _give(
    state: State, job: Job, window: Window, session: Session, given: list[tuple[Job, Line]], now: Now, step: Step
) -> None:
    """One quantum of one window to one session, within its credit; which of the lines is ``affinity``'s to say."""
    stack = affinity.own_keys(session, window)
    lines = size = 0
    while window.lines and lines < QUANTUM_LINES and size < QUANTUM_BYTES and session.credit_lines > 0:
        line, why = affinity.choose(state, session, window, stack)
        if line.size > session.credit_bytes and session.lines:
            session.credit_bytes = 0  # the next line must not be overtaken for ever by shorter ones
            break
        affinity.chosen(state, session, window, line, why, stack)
        recovery.hold(job, line, session, line.attempt + 1, now, step)
        session.credit_lines -= 1
        session.credit_bytes -= line.size
        given.append((job, line))
        lines += 1
        size += line.size
    charge(state, job, sum(guessed_tokens(line) for _, line in given[-lines:]) if lines else 0.0)


def guessed_tokens(line: Line) -> float:
    """What a line is charged with when it is given out."""
    return 1.0 + line.size / limits.TOKEN_GUESS_BYTES


def charge(state: State, job: Job, tokens: float) -> None:
    """The job and its key were served so many tokens more (or fewer than was guessed)."""
    job.served = max(0.0, job.served + tokens)
    state.served[job.owner] = max(0.0, state.served.get(job.owner, 0.0) + tokens)


def _send(state: State, session: Session, lines: list[tuple[Job, Line]], step: Step) -> None:
    """What a session was given, as assignments of bounded size; a line too long for one travels alone, in parts."""
    batch: list[BodyAt] = []
    size = 0
    for job, line in lines:
        if batch and (len(batch) == limits.BATCH_MAX_LINES or size + line.size > limits.BATCH_MAX_BYTES):
            _assign(state, session, batch, size, step)
            batch, size = [], 0
        batch.append(BodyAt(LineRef(job.id, line.index, line.held), line.url, line.offset, line.size))
        size += line.size
    if batch:
        _assign(state, session, batch, size, step)


def _assign(state: State, session: Session, batch: list[BodyAt], size: int, step: Step) -> None:
    number, state.next_assignment = state.next_assignment, state.next_assignment + 1
    session.sent.append((number, len(batch), size))
    step.sends.append(SendBatch(session.peer, session.fence, number, tuple(batch)))


def why_waiting(state: State, job: Job, model: str = "") -> str:
    """In words, why lines of a running job wait (A7), or those that ask for ``model``; empty when they do not."""
    if job.status != "in_progress" or job.waiting == 0:
        return ""
    unclaimed = sum(line.session is None for line in job.assigned.values())
    if unclaimed and state.grace_until:
        return f"{unclaimed} lines wait for the workers that held them before the broker's restart"
    if not state.sessions:
        return "no worker is connected"
    if len(job.suspects) == job.waiting:
        return f"{len(job.suspects)} lines ran when a worker died and wait to be tried apart"
    asked = {model} if model else {one.model for one in job.windows.values() if one.lines or not one.exhausted}
    by_model = {one: [session for session in state.sessions.values() if serves(session, one)] for one in sorted(asked)}
    # what nobody serves comes first: those lines wait until somebody does something about it
    for model, serving in sorted(by_model.items(), key=lambda item: len(item[1]) > 0):
        if not serving:
            if any(one.phase == "loading" for one in state.sessions.values()):
                return f"no worker serves model {model!r} yet; some are still loading"
            served = sorted({one.name for session in state.sessions.values() for one in session.models})
            return (
                f"no worker serves model {model!r}; served are: {', '.join(served) or 'none'}; its lines wait until a "
                f"worker is started with --model {model}, or the job is cancelled"
            )
        if all(one.phase == "loading" for one in serving):
            return f"the workers that serve model {model!r} are still loading"
        if all(one.draining or one.phase == "draining" for one in serving):
            return f"the workers that serve model {model!r} are draining"
    return "all workers are busy"
