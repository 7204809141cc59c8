"""rules: a job from its announcement to its end, and what its owner may ask of it. Home of D4's accounting by job.

``TRANSITIONS`` is the job's machine: what stands there is legal, the rest is a bug of ours. Does not know workers:
lines are given out by ``scheduler`` and come back through ``delivery`` and ``recovery``.
"""

from __future__ import annotations

import re
from typing import Any

from broker.effects import AppendInput, DropJob, History, NewJob, Query, SaveJob, SealInput, Send, Step
from broker.inputs import Came, Checked, InputFailed, Now, WaitingEnded
from broker.state import Job, State, Window
from common import limits, messages
from common.errors import InvariantError
from common.ids import is_id

TRANSITIONS: dict[tuple[str, str], str] = {
    ("receiving", "seal"): "validating",
    ("receiving", "cancel"): "cancelled",
    ("receiving", "expire"): "expired",
    ("validating", "seal"): "validating",
    ("validating", "pass"): "in_progress",
    ("validating", "fail"): "failed",
    ("validating", "cancel"): "cancelled",
    ("validating", "expire"): "expired",
    ("in_progress", "seal"): "in_progress",
    ("in_progress", "cancel"): "cancelling",
    ("in_progress", "expire"): "expiring",
    ("in_progress", "settle"): "completed",
    ("cancelling", "seal"): "cancelling",
    ("cancelling", "cancel"): "cancelling",
    ("cancelling", "expire"): "cancelling",
    ("cancelling", "settle"): "cancelled",
    ("expiring", "seal"): "expiring",
    ("expiring", "cancel"): "expiring",
    ("expiring", "expire"): "expiring",
    ("expiring", "settle"): "expired",
}
"""(status, what happens) -> status. Closed jobs are not in memory and change no more."""
SHOWN = {"receiving": "validating", "expiring": "finalizing"}
"""Our words where the service has none of its own."""
ENDS_LINES = {
    "cancelling": ("batch_cancelled", "the job was cancelled"),
    "expiring": ("batch_expired", "the job's time window ended"),
}
"""The error of lines that end with their job: its code, and what ended; ``cut_short`` says where that met the line."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
CLIENT_REQUESTS = (
    messages.Submit, messages.Chunk, messages.Seal, messages.CancelJob, messages.AskStatus, messages.AskJobs,
    messages.AskProblems, messages.Fetch, messages.AskWorkers, messages.AskAudit,
    messages.DeleteJob, messages.Explain,
)  # fmt: skip


def cut_short(words: str, attempt: int, tokens: int | None = None) -> str:
    """The error of a line that ends with its job: never given out, stopped with so many ``tokens`` of its answer made,
    or given out ``attempt`` times, of which nobody says how far they came."""
    if not attempt:
        return f"{words} before this line ran"
    if tokens is None:
        often = "once" if attempt == 1 else f"{attempt} times"
        return f"{words} before this line had an answer; it had been given out {often}"
    made = "1 token" if tokens == 1 else f"{tokens or 'no'} tokens"
    return f"{words} while this line {'ran' if tokens else 'was at its worker'}; {made} of its answer had been made"


def move(job: Job, what: str) -> bool:
    """Move the job's machine; True if its status changed. ``InvariantError`` for what the table does not have."""
    target = TRANSITIONS.get((job.status, what))
    if target is None:
        raise InvariantError(f"job {job.id}: {what!r} cannot happen while {job.status}")
    changed = target != job.status
    job.status = target
    job.dirty = job.dirty or changed
    return changed


def asked(state: State, came: Came, now: Now, step: Step) -> None:
    """A client's request. What changes something is decided here, questions are answered from the store."""
    message = came.message
    if isinstance(message, messages.Submit):
        _submit(state, came, message, now, step)
        return
    if isinstance(message, messages.DeleteJob) and came.closed is not None and may_see(came.closed.owner, came):
        if not came.closed.deleted:
            step.writes += [DropJob(message.job, now.wall), History(now.wall, "deleted", message.job, "", came.user)]
            step.note("job_deleted", job=message.job, by=came.user)
        step.sends.append(Send(came.peer, messages.Deleted(message.request, message.job, came.closed.lines)))
        return
    if isinstance(message, messages.Chunk | messages.Seal | messages.CancelJob | messages.DeleteJob):
        job = state.jobs.get(message.job)
        if job is not None and may_see(job.owner, came):
            _CHANGES[type(message)](state, job, came, message, now, step)
            return
    step.sends.append(Query(came.peer, came.user, came.admin, message))


def may_see(owner: str, came: Came | Query) -> bool:
    """Jobs belong to the key that submitted them; an admin's key sees all."""
    return came.admin or owner == came.user


def _fail(came: Came, code: str, message: str, exit_code: int = 4) -> Send:
    return Send(came.peer, messages.Failure(came.message.request, code, message, exit_code))


def _submit(state: State, came: Came, message: messages.Submit, now: Now, step: Step) -> None:
    job = state.jobs.get(message.job)
    there = job if job is not None else came.closed
    if there is not None:
        if came.closed is not None and came.closed.deleted:
            step.sends.append(_fail(came, "job_deleted", f"job {message.job} was there and is deleted; use a new id"))
            return
        if not may_see(there.owner, came) or (there.size, there.sha256) != (message.size, message.sha256):
            step.sends.append(
                _fail(came, "job_exists", f"job {message.job} is there already with another input; use a new id")
            )
            return
        received = job.received if job is not None else there.size
        step.sends.append(Send(came.peer, messages.Need(message.request, message.job, received)))
        return
    refusal = _refusal(state, message)
    if refusal is not None:
        step.sends.append(_fail(came, *refusal))
        return
    job = Job(
        message.job, state.next_job, came.user, message.name, message.size, message.sha256, message.lenient,
        message.priority, message.window_s, message.model, now.wall,
        deadline=now.mono + message.window_s if message.window_s else 0.0, heard_at=now.mono, url=message.url,
    )  # fmt: skip
    state.next_job += 1
    state.jobs[job.id] = job
    step.writes += [NewJob(job), History(now.wall, "submitted", job.id, "", f"{job.size} bytes by {job.owner!r}")]
    step.note("job_submitted", job=job.id, bytes=job.size)
    step.sends.append(Send(came.peer, messages.Need(message.request, job.id, 0)))


def _refusal(state: State, message: messages.Submit) -> tuple[str, str, int] | None:
    if state.stopping:
        return "stopping", "this broker is stopping; ask again in a moment", 3
    if not is_id(message.job):
        return "bad_job_id", f"{message.job[:80]!r} is no job id: a UUID in canonical form is needed", 2
    if _SHA256.fullmatch(message.sha256) is None:
        return "bad_sha256", "sha256 must be 64 hexadecimal digits", 2
    promised = sum(job.size - job.received for job in state.jobs.values() if job.status == "receiving")
    left = state.disk_free - promised - message.size
    if left < state.disk_reserve:
        return (
            "disk_reserve",
            f"the input of {message.size} bytes would leave {max(left, 0)} bytes of the broker's disk, and "
            f"{state.disk_reserve} are kept for results (--disk-reserve-gib); free some space there",
            4,
        )
    return None


def _chunk(state: State, job: Job, came: Came, message: messages.Chunk, now: Now, step: Step) -> None:
    if job.status == "receiving" and message.offset == job.received and message.data:
        if job.received + len(message.data) > job.size:
            step.sends.append(_fail(came, "too_much_input", f"the input was announced with {job.size} bytes"))
            return
        step.writes.append(AppendInput(job.id, job.received, message.data, came.peer, message.request))
        job.received += len(message.data)
        job.heard_at = now.mono
    received = job.received if job.status == "receiving" else job.size
    step.sends.append(Send(came.peer, messages.Need(message.request, job.id, received)))


def input_failed(state: State, input: InputFailed, step: Step) -> None:
    """The disk did not take a piece of input: the client hears why, and may try again."""
    job = state.jobs.get(input.job)
    if job is not None and job.status == "receiving":
        job.received = min(job.received, input.offset)
    step.note("input_failed", job=input.job, reason=input.reason)
    words = f"the broker cannot keep the input: {input.reason}; free some space on its disk and submit again"
    step.sends.append(Send(input.peer, messages.Failure(input.request, "disk", words, 4)))


def _seal(state: State, job: Job, came: Came, message: messages.Seal, now: Now, step: Step) -> None:
    if job.received < job.size:
        step.sends.append(Send(came.peer, messages.Need(message.request, job.id, job.received)))
        return
    if move(job, "seal"):
        step.writes += [SealInput(job.id), History(now.wall, "sealed", job.id, "", "")]
    step.sends.append(Query(came.peer, came.user, came.admin, message))


def _cancel(state: State, job: Job, came: Came, message: messages.CancelJob, now: Now, step: Step) -> None:
    if job.status in ("receiving", "validating", "in_progress"):
        end(state, job, "cancel", f"cancelled by {came.user or 'a client'}", now, step)
    step.sends.append(Query(came.peer, came.user, came.admin, message))


def _delete(state: State, job: Job, came: Came, message: messages.DeleteJob, now: Now, step: Step) -> None:
    words = f"job {job.id} is {SHOWN.get(job.status, job.status)}; only ended jobs are deleted: haulier cancel it first"
    step.sends.append(_fail(came, "job_open", words))


_CHANGES: dict[type, Any] = {
    messages.Chunk: _chunk, messages.Seal: _seal, messages.CancelJob: _cancel, messages.DeleteJob: _delete,
}  # fmt: skip


def end(state: State, job: Job, what: str, reason: str, now: Now, step: Step) -> None:
    """Cancel or expire: nothing more is given out, sessions are told to stop, what waits gets its error line."""
    move(job, what)
    job.reason = reason
    step.writes.append(History(now.wall, what, job.id, "", reason))
    job.windows.clear()
    job.suspects.clear()
    if not job.is_open:  # nothing ran yet: all there is are the error lines that bad lines have already (``lenient``)
        job.good = job.completed = 0
        job.problems = job.failed = job.bad_stored
        close(state, job, now, step)
        return
    told: dict[bytes, list[messages.LineRef]] = {}
    for line in job.assigned.values():
        if line.session is not None:
            told.setdefault(line.session.peer, []).append(messages.LineRef(job.id, line.index, line.held))
    for peer, refs in told.items():
        cancel_lines(state, peer, refs, step)


def cancel_lines(state: State, peer: bytes, refs: list[messages.LineRef], step: Step) -> None:
    """Tell a session to stop these, in pages."""
    fence = state.sessions[peer].fence
    for first in range(0, len(refs), limits.PAGE_MAX_COUNT):
        page = tuple(refs[first : first + limits.PAGE_MAX_COUNT])
        step.sends.append(Send(peer, messages.CancelLines(fence, page)))


def checked(state: State, input: Checked, now: Now, step: Step) -> None:
    """A slice of a job's file was checked; at the end of the file the job starts or fails."""
    job = state.jobs.get(input.job)
    if job is None or job.status != "validating":
        return
    job.dirty = True
    job.lines_read += input.lines
    job.good += input.good
    job.problems += input.problems
    job.bad_stored += input.bad_stored
    job.failed += input.bad_stored
    job.checked_bytes = input.checked_bytes
    for model in input.models:
        job.windows.setdefault(model, Window(model))
    if input.first_problem is not None and not job.reason:
        first = input.first_problem
        job.reason = f"line {first.line}: {first.code}: {first.message}"
    if not input.ended:
        return
    problem = ""
    if not input.sha256_fits:
        problem = "sha256_mismatch: the input that arrived is not the file that was announced; submit it again"
    elif job.total == 0:
        problem = "empty_file: the input holds no request"
    elif job.problems and not job.lenient:
        more = f" (and {job.problems - 1} more)" if job.problems > 1 else ""
        problem = f"{job.problems} of {job.total} lines are bad and nothing ran; {job.reason}{more}"
    if problem:
        move(job, "fail")
        job.reason = problem
        step.note("job_failed", job=job.id, reason=problem)
        close(state, job, now, step)
        return
    move(job, "pass")
    job.reason = ""
    job.started_at = now.wall
    job.served = min((one.served for one in state.jobs.values() if _runs(one, job)), default=0.0)
    state.served.setdefault(job.owner, min(state.served.values(), default=0.0))
    step.writes.append(History(now.wall, "started", job.id, "", f"{job.good} lines"))
    step.note("job_started", job=job.id, lines=job.good, problems=job.problems)


def _runs(one: Job, job: Job) -> bool:
    return one is not job and one.owner == job.owner and one.status == "in_progress"


def waiting_ended(state: State, input: WaitingEnded) -> None:
    """Waiting lines of an ending job got their error line."""
    job = state.jobs.get(input.job)
    if job is None or job.status not in ENDS_LINES:
        raise InvariantError(f"lines of job {input.job} were ended while it does not end")
    job.failed += input.count
    job.waiting_ended = not input.left
    job.dirty = True


def watch_clock(state: State, now: Now, step: Step) -> None:
    """Timers are monotonic. When the wall clock parts from them by more than a minute (it was set, or the machine
    slept), deadlines go with it, so that a job's window stays as long as it was, a restart included.
    """
    difference = now.wall - now.mono
    jump = 0.0 if state.clock is None else difference - state.clock
    if state.clock is None or abs(jump) > limits.CLOCK_JUMP_S:
        state.clock = difference
    if abs(jump) <= limits.CLOCK_JUMP_S:
        return
    shifted = [job for job in state.jobs.values() if job.window_s]
    for job in shifted:
        job.shift_s += jump
        job.dirty = True
    step.writes.append(History(now.wall, "clock_jumped", "", "", f"{jump:.1f} s, {len(shifted)} deadlines shifted"))
    step.note("clock_jumped", seconds=round(jump, 1), deadlines_shifted=len(shifted))


def tick(state: State, now: Now, step: Step) -> None:
    """Deadlines, jobs that are through, and the rows of jobs that changed."""
    for job in list(state.jobs.values()):
        if job.status == "in_progress":
            job.pace.see(job.completed + job.failed, now.mono)
        if job.deadline and now.mono >= job.deadline and job.status not in ENDS_LINES:
            end(state, job, "expire", f"its window of {job.window_s} s ended", now, step)
        elif job.status == "receiving" and now.mono - job.heard_at >= limits.UPLOAD_PATIENCE_S:
            hours = limits.UPLOAD_PATIENCE_S / 3600
            end(state, job, "expire", f"nothing more of its input came for {hours:g} hours: submit it anew", now, step)
        if job.is_open and _is_through(job):
            move(job, "settle")
            close(state, job, now, step)
        elif job.is_open and job.dirty:
            step.writes.append(SaveJob(job))
            job.dirty = False


def _is_through(job: Job) -> bool:
    if job.assigned:
        return False
    if job.status in ENDS_LINES:
        return job.waiting_ended
    return job.status == "in_progress" and job.waiting == 0


def close(state: State, job: Job, now: Now, step: Step) -> None:
    """The job is over: out of memory, into the store for good."""
    if job.status in ("completed", "cancelled", "expired") and job.waiting != 0:
        raise InvariantError(f"job {job.id} ends as {job.status} with {job.waiting} lines unaccounted for")
    job.ended_at = now.wall
    if job.status == "completed" and job.failed:
        job.reason = f"{job.failed} of {job.total} lines failed"
    del state.jobs[job.id]
    step.writes += [SaveJob(job), History(now.wall, job.status, job.id, "", job.reason)]
    step.note("job_ended", job=job.id, status=job.status, completed=job.completed, failed=job.failed, reason=job.reason)
    if not any(one.owner == job.owner for one in state.jobs.values()):
        state.served.pop(job.owner, None)


def work_wanted(state: State) -> list[Job]:
    """Jobs of which a slice is to be done by the shell in this turn: checked, or their waiting lines ended."""
    return [
        job
        for job in state.jobs.values()
        if job.status == "validating" or (job.status in ENDS_LINES and not job.waiting_ended)
    ]


def info(job: Job, request: int, wasted: int, reason: str) -> messages.JobInfo:
    """The job as people see it."""
    done = job.is_open and job.status not in ("receiving", "validating")
    if job.status == "receiving":
        reason = f"{job.received} of {job.size} bytes of its input have arrived"
    return messages.JobInfo(
        request, job.id, job.name, SHOWN.get(job.status, job.status), job.total, job.completed, job.failed,
        len(job.assigned), job.waiting if done else 0, wasted, job.prompt_tokens, job.completion_tokens,
        job.created_at, job.started_at, job.ended_at, job.problems, (reason or job.reason)[: limits.REASON_MAX_CHARS],
        job.lines_read, job.expires_at, job.pace.a_second if job.status == "in_progress" else 0.0,
    )  # fmt: skip
