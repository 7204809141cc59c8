"""rules: results come in, each line ends exactly once (D1, D4). Home of the judgement of a DONE.

A result is judged by its line and attempt alone, whatever session brings it: the first durable one wins, a later one is
``known`` and counted as wasted work. The verdict is part of the same ``Step`` as the write, so it is never said before
the commit. Does not know where a result is stored, nor how lines come to be assigned.
"""

from __future__ import annotations

from broker import recovery, scheduler
from broker.effects import EndAttempt, Note, Send, Step, StoreResult
from broker.inputs import Came, Facts, Now
from broker.jobs import ENDS_LINES, cancel_lines, cut_short
from broker.state import ENDED, Fact, Job, Line, Partial, Session, State
from common import limits, messages
from common.errors import PeerFault
from common.messages import LineRef, Result, Verdict

OUTPUT, ERROR = 0, 1
"""Kinds of results: the two files they end up in."""
STATUSES = ("ok", "failed", "cancelled")
_COMPLETED, _FAILED = (Note("line_ended", {"outcome": outcome}) for outcome in ("completed", "failed"))
_BY_CODE = {
    code: Note("line_ended", {"outcome": outcome})
    for code, outcome in (("batch_cancelled", "cancelled"), ("batch_expired", "expired"))
}


def done(state: State, session: Session, came: Came, now: Now, step: Step) -> None:
    """Whole results are judged and answered in one ACK; the first part of a long one is kept until the rest is here."""
    message: messages.Done = came.message
    verdicts: dict[LineRef, Verdict] = {}
    for result in message.results:
        _sane(result)
        if len(result.body) < result.total:
            _begin(session, result, step)
        elif result.ref not in verdicts:  # twice in one message: the facts are those from before the first
            verdicts[result.ref] = judge(state, session, result, came.facts, now, step)
    _answer(session, list(verdicts.values()), step)


def part(state: State, session: Session, came: Came, now: Now, step: Step) -> None:
    """The next part of a long result."""
    message: messages.ResultPart = came.message
    partial = session.partial.get(message.ref)
    if partial is None or message.offset > len(partial.data):
        raise PeerFault("bad_part", f"a part of {message.ref.line} at {message.offset} follows nothing")
    fresh = message.data[len(partial.data) - message.offset :]
    partial.data += fresh
    if len(partial.data) > partial.result.total:
        most = partial.result.total
        raise PeerFault("bad_part", f"the result of {message.ref.line} is longer than the {most} bytes announced")
    step.sends.append(Send(session.peer, messages.PartTaken(session.fence, message.ref, len(partial.data))))
    if len(partial.data) == partial.result.total:
        del session.partial[message.ref]
        whole = partial.result._replace(body=bytes(partial.data))
        _answer(session, [judge(state, session, whole, came.facts, now, step)], step)


def _answer(session: Session, verdicts: list[Verdict], step: Step) -> None:
    if verdicts:
        step.sends.append(Send(session.peer, messages.Ack(session.fence, tuple(verdicts))))


def _sane(result: Result) -> None:
    if result.status not in STATUSES:
        raise PeerFault("bad_status", f"a result is {', '.join(STATUSES)}, not {result.status[:40]!r}")
    if len(result.body) > result.total:
        raise PeerFault("bad_length", f"a result of {result.total} bytes comes with {len(result.body)}")


def _begin(session: Session, result: Result, step: Step) -> None:
    session.partial.pop(result.ref, None)
    if session.open_bytes + result.total > limits.RESULTS_OPEN_MAX_BYTES:
        raise PeerFault("too_much_open", f"long results of more than {limits.RESULTS_OPEN_MAX_BYTES} bytes are open")
    session.partial[result.ref] = Partial(result, bytearray(result.body))
    step.sends.append(Send(session.peer, messages.PartTaken(session.fence, result.ref, len(result.body))))


def judge(state: State, session: Session, result: Result, facts: Facts, now: Now, step: Step) -> Verdict:
    """The word on one whole result; what it changes is in ``step``."""
    ref = result.ref
    job = state.jobs.get(ref.job)
    line = job.assigned.get(ref.index) if job is not None else None
    if job is None or line is None:
        fact = facts.get(ref.line)
        if fact is None:
            return Verdict(ref, "known", "there is no such line here")
        if fact.state == ENDED or job is None or job.status == "validating":
            return _late(fact, session, result, now, step)
        line = state.find(ref.line) or fact.line
    if ref.attempt > line.attempt:
        step.note("result_refused", job=ref.job, line=ref.index, worker=session.worker, reason="never given out")
        return Verdict(ref, "refused", f"attempt {ref.attempt} of this line was never given out")
    if result.status == "cancelled":
        return _cancelled(state, job, line, session, result, now, step)
    problem = _unfit(result)
    if problem:
        step.note("result_refused", job=ref.job, line=ref.index, worker=session.worker, reason=problem)
        _store(state, job, line, session, result, ("result_refused", problem), now, step)
        return Verdict(ref, "refused", problem)
    _store(state, job, line, session, result, None, now, step)
    return Verdict(ref, "stored")


def _late(fact: Fact, session: Session, result: Result, now: Now, step: Step) -> Verdict:
    """The line has its end already."""
    if fact.state == ENDED and fact.result_attempt == result.ref.attempt:
        return Verdict(result.ref, "stored")  # this very one, sent again because our word was lost
    if result.status != "cancelled":
        step.writes.append(
            EndAttempt(fact.job, result.ref.index, result.ref.attempt, session.worker, "known", now.wall)
        )
        step.note("line_wasted", job=result.ref.job, line=result.ref.index, worker=session.worker)
    return Verdict(result.ref, "known", "the line has ended already")


def _cancelled(
    state: State, job: Job, line: Line, session: Session, result: Result, now: Now, step: Step
) -> Verdict:  # fmt: skip
    """The worker was told to stop and did. The line waits again; if its job is ending, this is its end."""
    if line.session is None or line.session.worker != session.worker or line.held != result.ref.attempt:
        return Verdict(result.ref, "known", "stopped")
    if job.status not in ENDS_LINES:
        recovery.release(job, line, "cancelled", now, step)
        return Verdict(result.ref, "known", "stopped")
    code, words = ENDS_LINES[job.status]
    tokens = result.completion_tokens
    result = result._replace(prompt_tokens=result.prompt_tokens if tokens else 0, body=b"")
    _store(state, job, line, session, result, (code, cut_short(words, line.held, tokens)), now, step)
    return Verdict(result.ref, "stored")


def _unfit(result: Result) -> str:
    """Why a body cannot be part of an output file, or nothing. It is not parsed: only what would break the file."""
    if result.total > limits.LINE_MAX_BYTES:
        return f"the result has {result.total} bytes; {limits.LINE_MAX_BYTES} are the most"
    if b"\n" in result.body or not result.body.startswith(b"{") or not result.body.endswith(b"}"):
        return "the result is not a JSON object on one line"
    if not 100 <= result.status_code <= 599:
        return f"{result.status_code} is no status code"
    return ""


def _store(
    state: State, job: Job, line: Line, session: Session, result: Result, refused: tuple[str, str] | None, now: Now,
    step: Step,
) -> None:  # fmt: skip
    """The line ends here. Whoever else works on it is told to stop."""
    ref = result.ref
    if line.session is not None and (line.session is not session or line.held != ref.attempt):
        step.writes.append(EndAttempt(job.number, line.index, line.held, line.worker, "overtaken", now.wall))
        cancel_lines(state, line.session.peer, [LineRef(ref.job, ref.index, line.held)], step)
    recovery.drop(job, line)
    window = job.windows.get(line.model)
    if window is not None:
        window.drop(line.index)
    job.suspects.pop(line.index, None)
    ok = result.status == "ok" and refused is None
    code, message = refused or ("", "")
    step.writes.append(
        StoreResult(
            job.number, line.index, OUTPUT if ok else ERROR, job.completed if ok else job.failed, ref.attempt,
            0 if refused else result.status_code, code, message, result.prompt_tokens, result.completion_tokens,
            session.worker, b"" if refused else result.body, now.wall, result.notes,
        )
    )  # fmt: skip
    if ok:
        job.completed += 1
    else:
        job.failed += 1
    scheduler.charge(state, job, result.prompt_tokens + result.completion_tokens - scheduler.guessed_tokens(line))
    job.prompt_tokens += result.prompt_tokens
    job.completion_tokens += result.completion_tokens
    job.dirty = True
    step.notes.append(_COMPLETED if ok else _BY_CODE.get(code, _FAILED))


def lookups(state: State, message: messages.Done | messages.ResultPart) -> list[LineRef]:
    """Lines of which the store must be asked before this message is handled: those not assigned in memory."""
    refs = [message.ref] if isinstance(message, messages.ResultPart) else [one.ref for one in message.results]
    found = []
    for ref in refs:
        job = state.jobs.get(ref.job)
        if job is None or ref.index not in job.assigned:
            found.append(ref)
    return found
