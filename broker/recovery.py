"""rules: lines come back (D3): claims of workers that log in, the grace after a restart, lines of sessions that ended.

Recovery trusts only what happened: durable facts and what workers say they hold. A claimed line is not run again; what
nobody claims within the grace waits again. Does not know how sessions come and go, nor who gets a line next.
"""

from __future__ import annotations

from broker import affinity
from broker.effects import AssignLine, EndAttempt, ReturnLine, Step
from broker.inputs import Facts, Now
from broker.state import ENDED, NOT_SAID, WAITING, Fact, Job, Line, Session, State
from common.messages import HeldLine, LineRef, Verdict


def hold(job: Job, line: Line, session: Session, attempt: int, now: Now, step: Step) -> None:
    """From now on ``session`` holds the line under ``attempt``; durable before anybody hears of it."""
    window = job.windows.get(line.model)
    if window is not None:
        window.drop(line.index)
    job.suspects.pop(line.index, None)
    line.session, line.worker, line.held, line.since = session, session.worker, attempt, now.wall
    line.attempt = max(line.attempt, attempt)
    job.assigned[line.index] = line
    session.lines[(job.id, line.index)] = line
    step.writes.append(AssignLine(line.attempt, attempt, session.worker, job.number, line.index))


def drop(job: Job, line: Line) -> None:
    """The line is assigned no more: out of its job's and its session's books."""
    job.assigned.pop(line.index, None)
    if line.session is not None:
        line.session.lines.pop((job.id, line.index), None)
        line.session = None


def release(job: Job, line: Line, how: str, now: Now, step: Step) -> None:
    """An assigned line waits again, at the front: of several the last is released first.

    ``how`` tells what became of its attempt; nobody is blamed here.
    """
    step.writes.append(EndAttempt(job.number, line.index, line.held, line.worker, how, now.wall))
    step.writes.append(ReturnLine(line.deaths, job.number, line.index))
    drop(job, line)
    line.worker, line.held, line.why = "", 0, NOT_SAID
    window = job.windows.get(line.model)
    if window is not None and line.group:
        job.suspects[line.index] = line
    elif window is not None:
        window.add(line, first=True)
    job.waiting_ended = False


def orphan(session: Session) -> None:
    """The lines of a session that ends because its worker logs in anew: unclaimed until its list is read."""
    for line in session.lines.values():
        line.session = None
    session.lines.clear()


def lines_of(state: State, worker: str) -> list[tuple[Job, Line]]:
    """Assigned lines of ``worker`` that no session holds."""
    return [(job, line) for job, line in state.unclaimed() if line.worker == worker]


def claim(
    state: State, session: Session, held: list[HeldLine], facts: Facts, now: Now, step: Step
) -> tuple[Verdict, ...]:
    """Judge all a worker says it holds. Lines assigned to it and not listed wait again at once, unblamed."""
    verdicts: dict[LineRef, Verdict] = {}
    for one in held:
        if one.ref not in verdicts:
            verdicts[one.ref] = Verdict(one.ref, _judge(state, session, one, facts, now, step))
    for job, line in reversed(lines_of(state, session.worker)):
        release(job, line, "unlisted", now, step)
    state.absent.discard(session.worker)
    return tuple(verdicts.values())


def _judge(state: State, session: Session, one: HeldLine, facts: Facts, now: Now, step: Step) -> str:
    """``keep``, ``send``, ``stored`` or ``cancel``."""
    ref = one.ref
    finished = one.state == "finished"
    job = state.jobs.get(ref.job)
    line = job.assigned.get(ref.index) if job is not None else None
    if job is not None and line is not None:
        if line.session is None and line.worker == session.worker and ref.attempt <= line.attempt:
            if line.held != ref.attempt:  # our later grant never reached it; the one it works on is as good
                step.writes.append(EndAttempt(job.number, ref.index, line.held, line.worker, "unlisted", now.wall))
            return _take(state, job, line, session, ref.attempt, finished, now, step)
        # somebody else works on it: the first durable result wins, so a finished one is still wanted
        return "send" if finished else "cancel"
    fact = facts.get(ref.line)
    if fact is None:
        return "cancel"
    if fact.state == ENDED:
        if not finished:
            return "cancel"
        _count_known(fact, session, ref, now, step)
        return "stored"
    if job is None or job.status == "validating":
        return "cancel"
    if fact.state == WAITING and ref.attempt <= fact.line.attempt:
        return _take(state, job, state.find(ref.line) or fact.line, session, ref.attempt, finished, now, step)
    return "send" if finished else "cancel"


def _take(
    state: State, job: Job, line: Line, session: Session, attempt: int, finished: bool, now: Now, step: Step
) -> str:
    """The worker's claim stands, unless the job is ending and the line has not finished."""
    if job.status == "in_progress" or finished:
        line.group = 0  # the worker is alive: no suspect of its death
        hold(job, line, session, attempt, now, step)
        affinity.own(state, session, line.prefix)
        return "send" if finished else "keep"
    if line.index in job.assigned:
        line.held = attempt
        release(job, line, "cancelled", now, step)
    return "cancel"


def _count_known(fact: Fact, session: Session, ref: LineRef, now: Now, step: Step) -> None:
    """Work done twice shows in the audit as wasted."""
    if fact.result_attempt != ref.attempt:
        step.writes.append(EndAttempt(fact.job, ref.index, ref.attempt, session.worker, "known", now.wall))
        step.note("line_wasted", job=ref.job, line=ref.index, worker=session.worker)


def tick(state: State, now: Now, step: Step) -> None:
    """The grace ends with its time, or when nobody is awaited any more: what is unclaimed then waits again."""
    if not state.grace_until or (now.mono < state.grace_until and state.absent):
        return
    count = 0
    for job, line in reversed(list(state.unclaimed())):
        release(job, line, "unclaimed", now, step)
        count += 1
    step.note("grace_ended", returned=count, absent=sorted(state.absent))
    state.grace_until = 0.0
    state.absent.clear()
