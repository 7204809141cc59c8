"""rules: lines that may kill their worker (D5): found by halving, set aside after two deaths while running alone.

Lines that ran in a session that died are suspects: they wait apart, run again without unsuspected neighbours, one
group in the whole fleet at a time, and a group that dies again is halved. Suspicion costs a line only time. A death is
counted against a line only if it ran alone and the worker's process is known to have ended: it came back as a later
run. A lost link, a drain, a kill without running evidence blame no one. Does not know who else gets work.
"""

from __future__ import annotations

from broker.effects import CountDeath, Step, StoreResult
from broker.inputs import Now
from broker.recovery import hold
from broker.state import Job, Line, Session, State
from common import limits
from common.messages import LineRef

SET_ASIDE = "worker_died"
"""The error code of a line that is given to nobody any more."""


def died(state: State, session: Session, step: Step) -> None:
    """A session is over and nobody said goodbye: what its last beat saw running is under suspicion from now on."""
    seen = [
        session.lines.get((ref.job, ref.index)) for ref in sorted(session.running, key=lambda ref: (ref.job, ref.index))
    ]
    evidence = [line for line in seen if line is not None]
    if not evidence:
        return
    if len(evidence) == 1 and len(session.running) == 1:
        ref = next(iter(session.running))
        state.accused[session.worker] = (session.fence.worker_incarnation, ref.line)
    _regroup(state, evidence)
    step.note("suspects", worker=session.worker, lines=len(evidence), alone=len(session.running) == 1)


def confirm(state: State, worker: str, incarnation: int, step: Step) -> None:
    """A worker logs in: a later run means that the line it ran alone killed it, the same one that its link broke."""
    run, accused = state.accused.pop(worker, (0, None))
    if accused is None or incarnation <= run:
        return
    job, line = state.jobs.get(accused.job), state.find(accused)
    if job is not None and line is not None:
        _count_death(job, line, worker, step)


def testify(state: State, worker: str, ran: tuple[LineRef, ...], step: Step) -> None:
    """A later run of a worker says what the one before ran at its end: more than any beat, which is up to a beat old.

    So a line that kills its worker before the next beat is a suspect too, and nobody is if that run ended in order.
    """
    state.accused.pop(worker, None)
    ids = sorted({ref.line for ref in ran})
    found = [(state.jobs.get(line.job), state.find(line)) for line in ids]
    evidence = [(job, line) for job, line in found if job is not None and line is not None]
    if len(ids) == 1:
        for job, line in evidence:
            _count_death(job, line, worker, step)
    free = [(job, line) for job, line in evidence if line.session is None]
    _regroup(state, [line for _, line in free])
    for job, line in free:
        window = job.windows.get(line.model)
        if window is not None and window.drop(line.index):
            job.suspects[line.index] = line
    if evidence:
        step.note("suspects", worker=worker, lines=len(evidence), alone=len(ids) == 1)


def next_trial(state: State, now: Now, step: Step) -> tuple[Session, list[tuple[Job, Line]]] | None:
    """The session under trial and the suspects it gets now; it gets nothing else while it is (``state.trial``)."""
    group = _next_group(state, now, step)
    session = state.sessions.get(state.trial)
    if session is None or not _fit(session, group) or not (session.lines or session.credit_lines > 0):
        state.trial = b""
        session = _choose(state, group)
    if session is None:
        return None
    state.trial = session.peer
    if session.lines:  # what it has comes first; its suspects, if those are they, are being tried
        return None
    if not group:
        state.trial = b""
        return None
    if session.credit_lines <= 0:
        return None
    given = group[: min(session.credit_lines, limits.BATCH_MAX_LINES)]
    for job, line in given:
        hold(job, line, session, line.attempt + 1, now, step)
        session.credit_lines -= 1
        session.credit_bytes -= line.size
    step.note("trial", worker=session.worker, lines=len(given))
    return session, given


def _regroup(state: State, lines: list[Line]) -> None:
    """Lines that ran in one process when it died are one group of suspects, or two if all of them were before."""
    half = (len(lines) + 1) // 2 if all(line.group for line in lines) else len(lines)
    for part in (lines[:half], lines[half:]):
        if part:
            state.next_group += 1
            for line in part:
                line.group = state.next_group


def _count_death(job: Job, line: Line, worker: str, step: Step) -> None:
    line.deaths += 1
    step.writes.append(CountDeath(line.deaths, job.number, line.index))
    step.note("death_counted", job=job.id, line=line.index, worker=worker, deaths=line.deaths)


def _next_group(state: State, now: Now, step: Step) -> list[tuple[Job, Line]]:
    """The oldest group of suspects that wait, of one model; lines that have killed too often are set aside here."""
    found: list[tuple[Job, Line]] = []
    for job in state.jobs.values():
        if job.status != "in_progress":
            continue
        for line in list(job.suspects.values()):
            if line.deaths >= limits.DEATHS_ALONE_MAX_COUNT:
                _set_aside(job, line, now, step)
            else:
                found.append((job, line))
    if not found:
        return []
    first = min(found, key=lambda one: one[1].group)[1]
    return [one for one in found if (one[1].group, one[1].model) == (first.group, first.model)]


def _fit(session: Session, group: list[tuple[Job, Line]]) -> bool:
    """Whether the session can be, or still is, the one under trial."""
    if session.phase != "ready" or session.draining or session.schema != limits.SCHEMA_VERSION:
        return False
    if any(line.group for line in session.lines.values()):
        return True
    return not group or any(one.name == group[0][1].model for one in session.models)


def _choose(state: State, group: list[tuple[Job, Line]]) -> Session | None:
    """The session with the least to finish before it can try a group; one that takes nothing now only if all do not."""
    if not group:
        return None
    able = [one for one in state.sessions.values() if _fit(one, group)]
    return min(
        able, key=lambda one: (one.credit_lines <= 0 and not one.lines, len(one.lines), one.worker), default=None
    )


def _set_aside(job: Job, line: Line, now: Now, step: Step) -> None:
    words = f"{line.deaths} workers died while they ran this line alone; it is given to no other"
    del job.suspects[line.index]
    step.writes.append(
        StoreResult(job.number, line.index, 1, job.failed, line.attempt, 0, SET_ASIDE, words, 0, 0, "", b"", now.wall)
    )
    job.failed += 1
    job.dirty = True
    step.note("line_ended", outcome="failed")
    step.note("line_set_aside", job=job.id, line=line.index, deaths=line.deaths)
