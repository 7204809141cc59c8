"""rules: a worker's end of its one session (S1, S2, S4), as a machine: ``handle(input, now)`` gives effects.

Logs in with what it holds, takes work within the credit it grants, beats with its engine's progress (S3), hands over
what is durable (D1, D2) and leaves in order. ``TABLE`` says which input is legal in which state, ``MESSAGES`` which
message; an illegal input raises and changes nothing, an illegal message costs the broker its session. Knows no socket,
clock, disk or chance: these are inputs and arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from common import limits
from common import messages as wire
from common.errors import InvariantError
from common.messages import Fence, LineRef, ModelInfo
from worker import effects as do
from worker import inputs as on
from worker.backoff import Backoff
from worker.greeting import hellos
from worker.lines import Stage, target
from worker.states import FATAL, WELCOMED, Identity, State
from worker.watch import StallWatch
from worker.work import COUNTS, Work


class Session:
    """The machine. One thread, one door: ``handle``. ``rows`` are the outbox's: ref, store id, bytes."""

    def __init__(
        self, identity: Identity, rows: Iterable[tuple[LineRef, str, int]], chance: Callable[[], float], now: float
    ) -> None:
        self.identity = identity
        self.state = State.OUT
        self.counts = dict.fromkeys(COUNTS, 0)
        self.work = Work(rows, self._emit, self.counts)
        self.backoff = Backoff(chance, now)
        self.watch = StallWatch(now)
        self.store_id = identity.last_store
        self.fence: Fence | None = None
        self.models: tuple[ModelInfo, ...] = ()
        self.concurrency = 0
        self.ring_bytes = 0
        self.login = 0
        self.leaving = ""
        self.blocked = ""
        self.snapshot = on.Snapshot()
        self._now = now
        self._endpoint = 0
        self._since = now
        self._heard_at = now
        self._beat_at = now
        self._beat_s = limits.BEAT_S
        self._liveness_s = limits.LIVENESS_S
        self._drain_until = 0.0
        self._assignment = 0
        self._told_credit = 0
        self._told_models = False
        self._said = ("", now)
        self._verdicts: dict[LineRef, str] = {}
        self._out: list[do.Effect] = []

    # -- the one door -------------------------------------------------------------------------------------------

    def handle(self, item: on.Input, now: float) -> list[do.Effect]:
        """What follows from ``item``. Raises ``InvariantError``, unchanged, for an input illegal in this state."""
        return self.handle_all((item,), now)

    def handle_all(self, items: Iterable[on.Input], now: float) -> list[do.Effect]:
        """What follows from inputs of one moment, in order; one that is illegal raises after those before it."""
        self._now = now
        found = self._out = []
        for item in items:
            handler = TABLE[self.state].get(type(item))
            if handler is None:
                raise InvariantError(f"{type(item).__name__} cannot happen to a session that is {self.state.value}")
            handler(self, item)
        return found

    def due(self) -> float:
        """When the next ``Tick`` has something to do, at the latest."""
        if self.state == State.OUT:
            at = self.backoff.retry_at
        elif self.state in WELCOMED:
            at = min(self._beat_at, self._heard_at + self._liveness_s)
        else:
            at = self._since + self._patience()
        return min(at, self._drain_until) if self.leaving else at

    def check(self) -> None:
        """Raise ``InvariantError`` unless the session's books agree."""
        self.work.check()
        if (self.fence is None) != (self.state not in WELCOMED):
            raise InvariantError(f"a session that is {self.state.value} has fence {self.fence}")

    # -- link ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self.state = State.CONNECTING
        self.login += 1
        self._since = self._now
        self._emit(do.Connect(self.identity.brokers[self._endpoint]))

    def _link_ready(self, _: on.LinkReady) -> None:
        self.state = State.GREETING
        self._since = self._heard_at = self._now
        self._greet()

    def _greet(self) -> None:
        self._verdicts = {}
        serves = (self.models, self.concurrency, self.ring_bytes)
        for page in hellos(self.identity, self.login, self.store_id, serves, self.work.lines.held(self.store_id)):
            self._send(page)

    def _lose(self, reason: str, *, level: str = "warning", at_once: bool = False) -> None:
        """The session is gone (S2): what is held stays held (D2), what was half received is not held."""
        self._say_lost(reason, level)
        self.state = State.OUT
        self.fence = None
        self.work.link_lost()
        self._endpoint = (self._endpoint + (0 if at_once else 1)) % len(self.identity.brokers)
        self.backoff.failed(self._now, at_once=at_once)
        self._emit(do.Disconnect())

    def _link_lost(self, item: on.LinkLost) -> None:
        self._lose(item.reason, level="error" if item.denied else "warning")

    def _say_lost(self, reason: str, level: str) -> None:
        """Once when a session goes; of tries that fail alike, one in a while."""
        if self.fence is not None or reason != self._said[0] or self._now - self._said[1] >= limits.SAY_AGAIN_S:
            where = self.identity.brokers[self._endpoint]
            self._note("session_gone", level, endpoint=where, was=self.state.value, reason=reason)
            self._said = (reason, self._now)

    # -- messages -----------------------------------------------------------------------------------------------

    def _received(self, item: on.Received) -> None:
        message: Any = item.message
        handler = MESSAGES[self.state].get(type(message))
        if handler is None:
            self._lose(
                f"protocol broken by the broker: {type(message).__name__} to a session that is {self.state.value}"
            )
            return
        fence = getattr(message, "fence", None)
        if self.state in WELCOMED and fence is not None and fence != self.fence:
            self.counts["stale"] += 1
            self._note("stale_message", "warning", message=type(message).__name__)
            return
        self._heard_at = self._now
        handler(self, message)

    def _welcome(self, message: wire.Welcome) -> None:
        fence = message.fence
        if fence.worker_incarnation != self.identity.incarnation:
            self._lose(
                f"protocol broken by the broker: WELCOME to incarnation {fence.worker_incarnation}", level="error"
            )
            return
        if fence.store_id != self.store_id:
            self._other_store(fence.store_id)
            if self.state != State.GREETING:
                return
        for verdict in message.verdicts:
            self._verdicts[verdict.ref] = verdict.verdict
        if message.more:
            return
        self.fence = fence
        self.state = State.UP
        self._beat_s = max(0.05, message.beat_s)
        self._liveness_s = max(self._beat_s * 2, message.liveness_s)
        self.backoff.succeeded()
        self.counts["logins"] += 1
        self._assignment = 0
        self._told_models = False
        self._note("welcomed", epoch=fence.epoch, store=fence.store_id, broker_incarnation=fence.broker_incarnation)
        self.work.settle(self._verdicts, fence.store_id)
        self._verdicts = {}
        if self.leaving:
            self._start_draining(fence)
        self._beat()
        self._hand_over()

    def _other_store(self, store_id: str) -> None:
        """Another store answered than the HELLO was for: log in again if something of it is held, else begin afresh."""
        held = self.work.lines.stores()
        if self.store_id in held:
            self._note("rows_of_another_store", "warning", store=self.store_id, lines=held[self.store_id])
        former, self.store_id = self.store_id, store_id
        if store_id in held and former != store_id:
            self._lose("logging in again with what is held of this store", level="info", at_once=True)
        else:
            self._verdicts = {}

    def _refused(self, message: wire.Refused) -> None:
        if message.code in FATAL:
            self._exit(4, f"the broker refuses this worker ({message.code}): {message.reason}")
        else:
            self._lose(f"refused ({message.code}): {message.reason}", level="error")

    def _unknown(self, message: wire.Unknown) -> None:
        self._lose(f"the broker knows no such session: {message.reason}", at_once=True)

    def _batch(self, message: wire.Batch) -> None:
        self._assignment = message.assignment
        taken = self.work.receive(message.lines, self.store_id, refuse=bool(self.leaving))
        if isinstance(taken, str):
            self._lose(taken)
            return
        self._told_credit -= taken

    def _ack(self, message: wire.Ack) -> None:
        self.work.acknowledged(message.verdicts)
        self._hand_over()

    def _part_taken(self, message: wire.PartTaken) -> None:
        self.work.part_taken(message)
        self._hand_over()

    def _told_to_drain(self, message: wire.Drain) -> None:
        self._note("told_to_drain", reason=message.reason)
        self.state = State.DRAINING
        self._beat()

    # -- inside the worker --------------------------------------------------------------------------------------

    def _loaded(self, item: on.Loaded) -> None:
        self.models, self.concurrency, self.ring_bytes = item.models, item.concurrency, item.ring_bytes
        self._told_models = False

    def _stored(self, item: on.Stored) -> None:
        self.blocked = ""
        self.work.stored(item.refs, self.store_id if self.fence is not None else None)
        self._hand_over()

    def _store_blocked(self, item: on.StoreBlocked) -> None:
        if item.reason != self.blocked:
            self._note("outbox_blocked", "error", reason=item.reason)
        self.blocked = item.reason

    def _hand_over(self) -> None:
        """Send what may be sent (D1: only what is durable is ever told to ``delivery``)."""
        if self.fence is not None:
            self.work.deliver(self.fence)
            self._beat_if_due()

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self, item: on.Tick) -> None:
        self.snapshot = item.snapshot
        self.counts["suspended"] += self.watch.see(item.snapshot, self.work.lines.in_engine, self._now)
        stalled = self.watch.stalled(self._now)
        if stalled:
            self._exit(70, stalled)
        elif self.leaving and self._may_leave():
            self._bye()
        elif self.state == State.OUT:
            if self._now >= self.backoff.retry_at:
                self._connect()
        elif self.state in WELCOMED:
            if self._now - self._heard_at > self._liveness_s:
                self._lose(f"the broker was silent for {self._now - self._heard_at:.1f} s")
                return
            self._hand_over()
        elif self._now - self._since >= self._patience():
            self._lose(f"no answer within {self._patience():g} s while {self.state.value}")

    def _patience(self) -> float:
        connecting = self.state == State.CONNECTING
        return self.backoff.connect_s(len(self.identity.brokers)) if connecting else limits.HANDSHAKE_S

    def _credit(self) -> tuple[int, int]:
        if self.state != State.UP or self.leaving or not self.models or self.blocked:
            return 0, 0
        return self.work.lines.credit(self.concurrency, self.snapshot)

    def _beat_if_due(self) -> None:
        """Every ``beat_s``, and at once when a quarter of the credit has come back or the model is loaded."""
        if self.state not in WELCOMED:
            return
        news = bool(self.models) and not self._told_models
        grown = self._credit()[0] - max(0, self._told_credit)
        if self._now >= self._beat_at or news or grown >= max(1, target(self.concurrency) // 4):
            self._beat()

    def _beat(self) -> None:
        if self.fence is None:
            return
        lines, size = self._credit()
        phase = "loading" if not self.models else "ready" if self.state == State.UP else "draining"
        head, waits = self.snapshot.held_up or (None, "")
        self._send(
            wire.WorkerBeat(
                self.fence, phase, self.snapshot.steps, self.snapshot.tokens, self.concurrency, lines, size,
                self.work.lines.running(limits.PAGE_MAX_COUNT), self.snapshot.ring, self.models, self._assignment,
                head, waits[: limits.TEXT_MAX_CHARS], self.snapshot.engine,
            )
        )  # fmt: skip
        self._told_credit = lines
        self._told_models = bool(self.models)
        self._beat_at = self._now + self._beat_s

    # -- leaving ------------------------------------------------------------------------------------------------

    def _terminate(self, item: on.Terminate) -> None:
        if item.at_once or (self.leaving and self._now > self._drain_until):
            self._exit(0 if not item.at_once else 143, item.reason)
            return
        if self.leaving:
            return
        self.leaving = item.reason
        self._drain_until = self._now + limits.DRAIN_S
        self.work.hand_back_unrun()
        if self.fence is not None:
            self._start_draining(self.fence)

    def _start_draining(self, fence: Fence) -> None:
        self.state = State.DRAINING
        self._send(wire.Drain(fence, self.leaving))

    def _may_leave(self) -> bool:
        if self._now >= self._drain_until:
            return True
        if self.work.lines.unfinished:
            return False
        if self.state in WELCOMED:
            return self.work.delivery.pending == 0
        return not self.work.lines.durable(self.store_id)

    def _bye(self) -> None:
        back = [*self.work.handed_back, *(line.ref for line in self.work.lines.before(Stage.ENDED))]
        if self.fence is not None:
            self._send(wire.Bye(self.fence, self.leaving, tuple(back[: limits.PAGE_MAX_COUNT])))
        kept = len(self.work.lines.durable(self.store_id))
        self._exit(0, f"{self.leaving}; {len(back)} lines handed back, {kept} results kept for the next start")

    def _exit(self, code: int, reason: str) -> None:
        self._emit(do.Disconnect(linger=self.fence is not None))
        self.state = State.LEFT
        self.fence = None
        self.work.link_lost()
        self._note("leaving", "info" if code == 0 else "error", code=code, reason=reason)
        self._emit(do.Exit(code, reason))

    def _emit(self, effect: do.Effect) -> None:
        self._out.append(effect)

    def _send(self, message: object) -> None:
        self._emit(do.Send(message))

    def _note(self, name: str, level: str = "info", **fields: object) -> None:
        self._emit(do.Note(name, level, fields))


_Handler = Callable[[Session, Any], None]
_ALWAYS: dict[type, _Handler] = {
    on.Loaded: Session._loaded,
    on.Tokenized: lambda session, item: session.work.tokenized(item.prepared),
    on.Published: lambda session, item: session.work.lines.published(item.refs),
    on.Admitted: lambda session, item: session.work.admitted(item.refs),
    on.Ended: lambda session, item: session.work.ended(item.outcome),
    on.Stored: Session._stored,
    on.StoreBlocked: Session._store_blocked,
    on.Tick: Session._tick,
    on.Terminate: Session._terminate,
}
_LINKED: dict[type, _Handler] = {**_ALWAYS, on.Received: Session._received, on.LinkLost: Session._link_lost}
TABLE: dict[State, dict[type, _Handler]] = {
    State.OUT: {**_ALWAYS, on.LinkLost: lambda *_: None},  # told twice: by a send and by the monitor
    State.CONNECTING: {**_ALWAYS, on.LinkReady: Session._link_ready, on.LinkLost: Session._link_lost},
    State.GREETING: _LINKED,
    State.UP: _LINKED,
    State.DRAINING: _LINKED,
    State.LEFT: {},
}
"""Which input is legal in which state, and what answers it."""
_WORK: dict[type, _Handler] = {
    wire.Refused: Session._refused,
    wire.Unknown: Session._unknown,
    wire.Batch: Session._batch,
    wire.BodyPart: lambda session, message: session.work.receive_part(message),
    wire.BrokerBeat: lambda session, _: session._hand_over(),
    wire.PartTaken: Session._part_taken,
    wire.Ack: Session._ack,
    wire.CancelLines: lambda session, message: session.work.cancel(message.lines, session.store_id),
    wire.Drain: Session._told_to_drain,
    wire.Bye: lambda session, message: session._lose(f"the broker leaves: {message.reason}", level="info"),
}
MESSAGES: dict[State, dict[type, _Handler]] = {
    State.GREETING: {
        wire.Welcome: Session._welcome,
        wire.Refused: Session._refused,
        wire.Unknown: Session._unknown,
        wire.BrokerBeat: lambda *_: None,
    },
    State.UP: _WORK,
    State.DRAINING: _WORK,
}
"""Which message is legal in which state, and what answers it."""
