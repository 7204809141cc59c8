"""rules: the broker's half of a session (S1-S4): login in pages, fences, beats, farewell and death by silence.

``TRANSITIONS`` is the machine of one connection. A session is alive or gone, no third thing (S2); everything a worker
does counts as a sign of life, and only silence is death (S3); a message that does not agree with the session's fence
is dropped and counted (S4). Does not know lines: what a session held is judged in ``recovery`` and ``delivery``.
"""

from __future__ import annotations

from typing import Any

from broker import affinity, recovery, suspects
from broker.effects import ForgetWorker, History, SaveSession, Send, Step
from broker.inputs import Came, Now
from broker.state import KnownWorker, Login, Session, State
from common import limits, messages
from common.errors import InvariantError, PeerFault

TRANSITIONS: dict[tuple[str, str], str] = {
    ("none", "hello"): "logging_in",
    ("none", "last_hello"): "open",
    ("none", "refused"): "none",
    ("logging_in", "hello"): "logging_in",
    ("logging_in", "last_hello"): "open",
    ("logging_in", "refused"): "none",
    ("logging_in", "fault"): "none",
    ("logging_in", "silence"): "none",
    ("logging_in", "unsendable"): "none",
    ("open", "hello"): "logging_in",
    ("open", "last_hello"): "open",
    ("open", "refused"): "none",
    ("open", "work"): "open",
    ("open", "drain"): "draining",
    ("open", "bye"): "none",
    ("open", "silence"): "none",
    ("open", "fault"): "none",
    ("open", "unsendable"): "none",
    ("open", "superseded"): "none",
    ("draining", "hello"): "logging_in",
    ("draining", "last_hello"): "open",
    ("draining", "refused"): "none",
    ("draining", "work"): "draining",
    ("draining", "drain"): "draining",
    ("draining", "bye"): "none",
    ("draining", "silence"): "none",
    ("draining", "fault"): "none",
    ("draining", "unsendable"): "none",
    ("draining", "superseded"): "none",
}
"""(what a connection is, what happens) -> what it is then. ``none`` answers other messages with UNKNOWN."""
PHASES = ("loading", "ready", "draining")
OLDEST_SCHEMA = max(1, limits.SCHEMA_VERSION - 1)
"""Older workers may log in and deliver down to this one, but get no work."""


def standing(state: State, peer: bytes) -> str:
    """What the connection is now: a key of ``TRANSITIONS``."""
    if peer in state.logins:
        return "logging_in"
    session = state.sessions.get(peer)
    if session is None:
        return "none"
    return "draining" if session.draining else "open"


def legal(state: State, peer: bytes, what: str) -> None:
    """Raise ``InvariantError`` if the table does not have it."""
    here = standing(state, peer)
    if (here, what) not in TRANSITIONS:
        raise InvariantError(f"a connection that is {here} cannot have {what!r}")


# ----------------------------------------------------------------------------------------------------------- login


def hello(state: State, came: Came, now: Now, step: Step) -> None:
    """One page of a login. With the last one the session stands, or the worker hears why not."""
    page: messages.Hello = came.message
    session = state.sessions.get(came.peer)
    if session is not None and (page.incarnation, page.login) == _run(session):
        if page.page == 0:  # asked twice on one connection: the same answer, and nothing is judged again
            step.sends += [Send(came.peer, welcome) for welcome in session.welcome]
        return
    login = _page(state, came, page, now, step)
    if login is None or page.more:
        return
    legal(state, came.peer, "last_hello")
    del state.logins[came.peer]
    _open(state, came, login, now, step)


def _page(state: State, came: Came, page: messages.Hello, now: Now, step: Step) -> Login | None:
    refusal = _refusal(state, came, page)
    if refusal is not None:
        legal(state, came.peer, "refused")
        state.logins.pop(came.peer, None)
        gone(state, came.peer, "refused", now, step)
        step.sends.append(Send(came.peer, messages.Refused(*refusal)))
        step.note("login_refused", worker=page.worker, code=refusal[0], reason=refusal[1])
        return None
    legal(state, came.peer, "hello")
    login = state.logins.get(came.peer)
    if page.page == 0:
        login = state.logins[came.peer] = Login(page, came.user, list(page.held), now.mono)
        return login
    if login is None or page.page != login.pages or _key(page) != _key(login.hello):
        raise PeerFault("bad_login_page", f"page {page.page} of a login does not follow the page before")
    login.pages += 1
    login.heard_at = now.mono
    login.held += page.held
    if len(login.held) > limits.HELD_MAX_COUNT:
        raise PeerFault("too_many_held", f"more than {limits.HELD_MAX_COUNT} lines listed")
    return login


def _key(page: messages.Hello) -> tuple[str, int, int]:
    return page.worker, page.incarnation, page.login


def _run(session: Session) -> tuple[int, int]:
    return session.fence.worker_incarnation, session.login


def _refusal(state: State, came: Came, page: messages.Hello) -> tuple[str, str] | None:
    ours = limits.SCHEMA_VERSION
    if page.schema > ours:
        return "schema", f"the worker speaks schema {page.schema}, this broker {ours}: upgrade the broker"
    if page.schema < OLDEST_SCHEMA:
        range_ = f"{OLDEST_SCHEMA} to {ours}"
        return "schema", f"the worker speaks schema {page.schema}, this broker {range_}: upgrade the worker"
    if not page.worker:
        return "worker_id", "a worker must have a name"
    if state.stopping:
        return "stopping", "this broker is stopping; log in again in a moment"
    live = state.by_worker.get(page.worker)
    if live is not None and live.user != came.user:
        return "name_taken", f"another key's worker is logged in as {page.worker!r}"
    known = state.known.get(page.worker)
    if known is not None and page.incarnation < known.incarnation:
        return (
            "incarnation",
            f"run {page.incarnation} of worker {page.worker!r} is over: run {known.incarnation} has logged in",
        )
    if known is not None and page.incarnation == known.incarnation and page.login < known.login:
        return "stale_login", f"login {page.login} of worker {page.worker!r} is over: login {known.login} came later"
    return None


def _open(state: State, came: Came, login: Login, now: Now, step: Step) -> None:
    page = login.hello
    known = state.known.get(page.worker)
    former = state.by_worker.get(page.worker)
    if known is not None and former is not None and (known.incarnation, known.login) == (page.incarnation, page.login):
        epoch = known.epoch
    else:
        epoch, state.next_epoch = state.next_epoch, state.next_epoch + 1
    if former is not None:
        legal(state, former.peer, "superseded")
        if page.incarnation > former.fence.worker_incarnation and page.ran is None:
            suspects.died(state, former, step)
        recovery.orphan(former)
        _forget(state, former)
        step.note("session_gone", worker=former.worker, reason="superseded", held=0)
    fence = messages.Fence(state.store_id, state.incarnation, page.incarnation, epoch)
    session = Session(
        came.peer, login.user, page.worker, page.login, page.schema, fence, page.models, page.concurrency, now.mono,
        now.mono,
    )  # fmt: skip
    state.sessions[came.peer] = state.by_worker[page.worker] = session
    if page.ran is None:
        suspects.confirm(state, page.worker, page.incarnation, step)
    elif known is not None and page.incarnation > known.incarnation:
        suspects.testify(state, page.worker, page.ran, step)
    state.known.pop(page.worker, None)
    state.known[page.worker] = KnownWorker(login.user, page.incarnation, page.login, epoch)
    _forget_oldest(state, step)
    # rows of another store are none of ours: they are neither asked for nor judged, the worker keeps them
    held = login.held if page.store_id in ("", state.store_id) else []
    verdicts = recovery.claim(state, session, held, came.facts, now, step)
    _save(session, "open", now, step)
    detail = f"epoch {epoch}, {len(held)} lines held"
    step.writes.append(History(now.wall, "login", "", session.worker, detail))
    step.note("session_open", worker=session.worker, epoch=epoch, held=len(held), foreign=len(login.held) - len(held))
    session.welcome = tuple(_welcomes(fence, verdicts))
    step.sends += [Send(came.peer, welcome) for welcome in session.welcome]


def _welcomes(fence: messages.Fence, verdicts: tuple[messages.Verdict, ...]) -> list[messages.Welcome]:
    size = limits.PAGE_MAX_COUNT
    pages = [verdicts[first : first + size] for first in range(0, len(verdicts), size)] or [()]
    last = len(pages) - 1
    return [
        messages.Welcome(fence, limits.BEAT_S, limits.LIVENESS_S, page, number < last)
        for number, page in enumerate(pages)
    ]


# --------------------------------------------------------------------------------------------------------- at work


def fenced(state: State, session: Session, message: Any, step: Step) -> bool:
    """Whether a message agrees with the session it came through (S4); if not it is counted and must be dropped."""
    if message.fence == session.fence:
        return True
    step.note("message_dropped", reason="stale_fence", worker=session.worker, message=type(message).__name__)
    return False


def heard(session: Session, now: Now) -> None:
    """Anything from the worker is a sign of life."""
    session.heard_at = now.mono


def beat(session: Session, message: messages.WorkerBeat, now: Now) -> None:
    """Progress and credit. Assignments the worker had not seen when it wrote this are taken off again."""
    if message.phase not in PHASES:
        raise PeerFault("bad_phase", f"a worker is {', '.join(PHASES)}, not {message.phase[:40]!r}")
    session.phase = message.phase
    session.told_at = now.mono
    session.tokens_pace.see(message.tokens, now.mono)
    session.staged_pace.see(message.engine.staged_bytes, now.mono)
    session.engine = message.engine
    session.steps, session.tokens, session.ring = message.steps, message.tokens, message.ring
    session.concurrency = message.concurrency
    session.running = frozenset(message.running)
    session.head, session.waits = message.head, message.waits
    if message.models:
        session.models = message.models
    session.welcome = ()
    while session.sent and session.sent[0][0] <= message.assignment:
        session.sent.popleft()
    session.credit_lines = message.credit_lines - sum(lines for _, lines, _ in session.sent)
    session.credit_bytes = message.credit_bytes - sum(size for _, _, size in session.sent)


def drain(state: State, session: Session) -> None:
    """The worker takes no more work."""
    legal(state, session.peer, "drain")
    session.draining = True


def bye(state: State, session: Session, message: messages.Bye, now: Now, step: Step) -> None:
    """The worker leaves; what it hands back waits again, unblamed."""
    legal(state, session.peer, "bye")
    for ref in message.handed_back:
        job = state.jobs.get(ref.job)
        line = session.lines.get((ref.job, ref.index))
        if job is not None and line is not None and line.held == ref.attempt:
            recovery.release(job, line, "handed_back", now, step)
    gone(state, session.peer, "bye", now, step)


def gone(state: State, peer: bytes, why: str, now: Now, step: Step) -> None:
    """The session, or a login under way, is over. Its lines wait again at once: no grace without a restart."""
    state.logins.pop(peer, None)
    session = state.sessions.get(peer)
    if session is None:
        return
    if why in ("silence", "unsendable"):
        suspects.died(state, session, step)
    held = list(session.lines.items())
    for (job_id, _), line in reversed(held):  # each goes before those that wait: so they keep their order
        recovery.release(state.jobs[job_id], line, "lost", now, step)
    _forget(state, session)
    _save(session, "left" if why == "bye" else "lost", now, step)
    step.writes.append(History(now.wall, "session_gone", "", session.worker, f"{why}, {len(held)} lines held"))
    step.note("session_gone", worker=session.worker, reason=why, held=len(held))


def _forget(state: State, session: Session) -> None:
    affinity.forget(state, session)
    del state.sessions[session.peer]
    del state.by_worker[session.worker]


def _forget_oldest(state: State, step: Step) -> None:
    """Of too many workers the one that logged in longest ago is known no more, unless it is here or awaited."""
    if len(state.known) <= limits.WORKERS_KNOWN_MAX_COUNT:
        return
    oldest = next((one for one in state.known if one not in state.by_worker and one not in state.absent), None)
    if oldest is not None:
        del state.known[oldest]
        state.accused.pop(oldest, None)
        step.writes.append(ForgetWorker(oldest))


def _save(session: Session, how: str, now: Now, step: Step) -> None:
    fence = session.fence
    step.writes.append(
        SaveSession(session.worker, session.user, fence.worker_incarnation, session.login, fence.epoch, how, now.wall)
    )


def tick(state: State, now: Now, step: Step) -> None:
    """Deaths by silence, of logins that never end too, and this broker's own beats."""
    for peer, login in list(state.logins.items()):
        if now.mono - login.heard_at >= limits.LIVENESS_S:
            legal(state, peer, "silence")
            del state.logins[peer]
            step.note("login_given_up", worker=login.hello.worker, pages=login.pages)
    for session in list(state.sessions.values()):
        patience = limits.LOADING_LIVENESS_S if session.phase == "loading" else limits.LIVENESS_S
        if now.mono - session.heard_at >= patience:
            legal(state, session.peer, "silence")
            gone(state, session.peer, "silence", now, step)
        elif now.mono - session.beat_at >= limits.BEAT_S:
            session.beat_at = now.mono
            step.sends.append(Send(session.peer, messages.BrokerBeat(session.fence)))


def was_deaf(state: State, seconds: float, now: Now, step: Step) -> None:
    """Nobody listened for a while: what a worker said then may still be on its way, so it is not silent yet (S3)."""
    step.note("was_deaf", seconds=round(seconds, 1), sessions=len(state.sessions))
    for session in state.sessions.values():
        session.heard_at = min(now.mono, session.heard_at + seconds)


def stop(state: State, step: Step) -> None:
    """This broker leaves: workers look for the next one at once instead of waiting for silence; lines stay theirs."""
    state.stopping = True
    step.sends += [Send(peer, messages.Unknown("this broker is stopping")) for peer in state.sessions]
