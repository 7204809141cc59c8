"""rules: the one door of the broker's rules: an input in, a ``Step`` out. Home of who may say what.

A peer's fault closes its own session here and costs nobody else anything. Does not decide anything itself: jobs,
sessions, recovery, delivery and scheduler do.
"""

from __future__ import annotations

from typing import Any

from broker import delivery, jobs, recovery, scheduler, sessions
from broker.effects import Send, Step
from broker.inputs import (
    Came,
    Checked,
    Deaf,
    Faulted,
    Input,
    InputFailed,
    Loaded,
    Now,
    Stop,
    Tick,
    Unsendable,
    WaitingEnded,
)
from broker.state import State
from common import messages
from common.errors import InvariantError, PeerFault
from common.messages import LineRef

FROM_WORKERS = (
    messages.WorkerBeat, messages.Done, messages.ResultPart, messages.Drain, messages.Bye,
)  # fmt: skip


def handle(state: State, input: Input, now: Now) -> Step:
    """What follows from one input. Changes ``state``; nothing of the ``Step`` has happened yet when this returns."""
    step = Step()
    match input:
        case Came():
            _came(state, input, now, step)
        case Faulted():
            _fault(state, input.peer, input.code, input.reason, now, step)
        case Unsendable():
            sessions.gone(state, input.peer, "unsendable", now, step)
        case Loaded():
            scheduler.loaded(state, input.job, input.model, input.lines, input.cursor, input.exhausted)
        case Checked():
            jobs.checked(state, input, now, step)
        case WaitingEnded():
            jobs.waiting_ended(state, input)
        case InputFailed():
            jobs.input_failed(state, input, step)
        case Deaf():
            sessions.was_deaf(state, input.seconds, now, step)
        case Tick():
            _tick(state, input, now, step)
        case Stop():
            sessions.stop(state, step)
        case _:
            raise InvariantError(f"no rule for {type(input).__name__}")
    return step


def _tick(state: State, input: Tick, now: Now, step: Step) -> None:
    state.disk_free = input.disk_free
    jobs.watch_clock(state, now, step)
    sessions.tick(state, now, step)
    recovery.tick(state, now, step)
    scheduler.dispatch(state, now, step)
    jobs.tick(state, now, step)


def _came(state: State, came: Came, now: Now, step: Step) -> None:
    message = came.message
    try:
        if isinstance(message, messages.Hello):
            sessions.hello(state, came, now, step)
        elif isinstance(message, FROM_WORKERS):
            _from_worker(state, came, message, now, step)
        elif isinstance(message, jobs.CLIENT_REQUESTS):
            jobs.asked(state, came, now, step)
        else:
            raise PeerFault("wrong_way", f"{type(message).__name__} is ours to say")
    except PeerFault as fault:
        _fault(state, came.peer, fault.code, str(fault), now, step)


def _from_worker(state: State, came: Came, message: Any, now: Now, step: Step) -> None:
    session = state.sessions.get(came.peer)
    if session is None:
        if came.peer not in state.logins:  # while pages of a login come, nothing else can: the answer is on its way
            step.sends.append(Send(came.peer, messages.Unknown("no session on this connection")))
        return
    sessions.heard(session, now)
    if isinstance(message, messages.Done) and message.fence.store_id == state.store_id:
        delivery.done(state, session, came, now, step)  # judged by line and attempt alone
        return
    if not sessions.fenced(state, session, message, step):
        return
    match message:
        case messages.WorkerBeat():
            sessions.beat(session, message, now)
        case messages.ResultPart():
            delivery.part(state, session, came, now, step)
        case messages.Drain():
            sessions.drain(state, session)
        case messages.Bye():
            sessions.bye(state, session, message, now, step)


def _fault(state: State, peer: bytes, code: str, reason: str, now: Now, step: Step) -> None:
    """The peer's own fault: its session ends and it hears why."""
    step.note("peer_fault", code=code, reason=reason)
    sessions.gone(state, peer, "fault", now, step)
    step.sends.append(Send(peer, messages.Refused(code, reason)))


def lookups(state: State, came: Came) -> list[LineRef]:
    """Lines of which the shell must put the store's facts into ``came`` before it is handled."""
    message = came.message
    if isinstance(message, messages.Hello) and not message.more:
        login = state.logins.get(came.peer)
        pages = [] if login is None or message.page == 0 else login.held
        return [one.ref for one in (*pages, *message.held)]
    if isinstance(message, messages.Done | messages.ResultPart) and came.peer in state.sessions:
        return delivery.lookups(state, message)
    return []
