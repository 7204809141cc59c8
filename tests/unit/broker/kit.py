"""What the tests of the broker's rules share: a state with a job and workers, and inputs in a line or two each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker import rules
from broker.effects import Query, Send, SendBatch, Step
from broker.inputs import Came, ClosedJob, Facts, Now, Tick
from broker.state import Fact, Job, Line, Session, State, Window
from common import limits, messages
from common.messages import HeldLine, LineRef, ModelInfo, Result

JOB = "00000000-0000-4000-8000-000000000001"
STORE = "store"
MODEL = ModelInfo("m", "f", 1000)
NOW = Now(100.0, 1_700_000_000.0)


def later(seconds: float) -> Now:
    return Now(NOW.mono + seconds, NOW.wall + seconds)


def running_job(state: State, lines: int = 4, job: str = JOB, keys: Sequence[int] = (0,), **changes: Any) -> Job:
    """An ``in_progress`` job whose lines all wait in its window; ``keys`` of how they begin, again and again."""
    one = Job(job, state.next_job, "", "test", 10, "0" * 64, False, 0, 0, "m", NOW.wall, status="in_progress")
    for name, value in changes.items():
        setattr(one, name, value)
    state.next_job += 1
    window = Window(one.model, exhausted=True)
    for index in range(lines):
        window.add(Line(index, "/v1/completions", one.model, index * 10, 10, prefix=keys[index % len(keys)]))
    one.windows[one.model] = window
    one.good = lines
    state.jobs[job] = one
    return one


def fresh(**changes: Any) -> State:
    state = State(STORE, 3, disk_free=10**12)
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def feed(state: State, input: Any, now: Now = NOW) -> Step:
    """Through the door, and the books agree afterwards."""
    step = rules.handle(state, input, now)
    state.check()
    return step


def came(message: Any, peer: bytes = b"p", user: str = "", admin: bool = False, facts: Facts | None = None,
         closed: ClosedJob | None = None) -> Came:  # fmt: skip
    return Came(peer, user, admin, message, facts or {}, closed)


def hello(login: int = 1, incarnation: int = 1, held: tuple[HeldLine, ...] = (), **changes: Any) -> messages.Hello:
    fields: dict[str, Any] = {
        "schema": limits.SCHEMA_VERSION, "worker": "w", "incarnation": incarnation, "login": login,
        "store_id": STORE if held else "", "models": (MODEL,), "concurrency": 4, "ring_bytes": 1000, "held": held,
        "page": 0, "more": False,
    }  # fmt: skip
    return messages.Hello(**{**fields, **changes})


def log_in(state: State, peer: bytes = b"p", now: Now = NOW, facts: Facts | None = None, **changes: Any) -> Session:
    feed(state, came(hello(**changes), peer, facts=facts), now)
    return state.sessions[peer]


def beat(session: Session, lines: int = 4, size: int = 1000, **changes: Any) -> messages.WorkerBeat:
    fields: dict[str, Any] = {
        "fence": session.fence, "phase": "ready", "steps": 1, "tokens": 1, "concurrency": 4, "credit_lines": lines,
        "credit_bytes": size, "running": (), "ring": messages.RingReport(), "models": (MODEL,), "assignment": 0,
    }  # fmt: skip
    return messages.WorkerBeat(**{**fields, **changes})


def give(state: State, session: Session, lines: int = 4, **changes: Any) -> tuple[LineRef, ...]:
    """Grant credit and let the broker dispatch: what the session was given."""
    feed(state, came(beat(session, lines, **changes), session.peer))
    step = feed(state, Tick(10**12))
    return tuple(line.ref for send in step.sends if isinstance(send, SendBatch) for line in send.lines)


def result(ref: LineRef, status: str = "ok", body: bytes = b"{}", **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "ref": ref, "status": status, "status_code": 200, "prompt_tokens": 1, "completion_tokens": 2,
        "total": len(body), "body": body,
    }  # fmt: skip
    return Result(**{**fields, **changes})


def done(session: Session, *results: Result) -> messages.Done:
    return messages.Done(session.fence, results)


def said(step: Step, kind: type, peer: bytes | None = None) -> list[Any]:
    """Messages of a kind that a step says."""
    return [
        send.message
        for send in step.sends
        if isinstance(send, Send | Query) and isinstance(send.message, kind) and (peer is None or send.peer == peer)
    ]


def wrote(step: Step, kind: type) -> list[Any]:
    return [write for write in step.writes if isinstance(write, kind)]


def waiting(index: int, attempt: int = 1) -> Fact:
    """The store's word on a line that waits and is not in memory."""
    return Fact(1, 0, Line(index, "/v1/completions", "m", index * 10, 10, attempt))


def ended(index: int, attempt: int = 1) -> Fact:
    return Fact(1, 2, Line(index, "/v1/completions", "m", index * 10, 10, attempt), attempt)
