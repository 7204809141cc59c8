"""shell: the broker's turn: take in, decide, commit, speak (D1: nothing is said before its write is synced).

``Server.turn`` is the process's flow diagram. Failures of socket and disk become inputs; a failure of the store stops
the process with nothing said, and the next one starts from what was synced. One thread; knows no rule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from broker import jobs, rules, scheduler
from broker.answers import answer, job_asked_for
from broker.effects import AppendInput, Note, Query, SealInput, Send, SendBatch, Write
from broker.inputs import Came, Deaf, Input, InputFailed, Loaded, Now, Stop, Tick, Unsendable, WaitingEnded
from broker.intake import Intake
from broker.link import Link
from broker.questions import Questions
from broker.spool import Spool
from broker.standby import pulse
from broker.state import Job, State
from broker.store import Store
from broker.upkeep import Upkeep
from common import limits, messages
from common.clock import Clock
from common.database import free_bytes, wal_bytes
from common.metrics import OUTCOMES, Metrics

log = structlog.get_logger(room="broker.server")
STORE_NAME = "broker.sqlite"
IDLE_S = 0.1
"""Longest pause of an idle broker: timers are this exact."""
QUIET = frozenset({"line_wasted"})
"""Notes that are counted and not logged one by one; ``line_ended`` likewise, a turn's at once."""


class Server:
    """One broker run over an open store, spool and link."""

    def __init__(
        self, state: State, store: Store, spool: Spool, link: Link, clock: Clock, folder: Path, metrics: Metrics,
        questions: Questions | None = None, upkeep: Upkeep | None = None,
    ) -> None:  # fmt: skip
        self.state, self.store, self.spool, self.link, self.clock = state, store, spool, link, clock
        self.questions, self.upkeep = questions, upkeep
        self.intake = Intake(store, spool)
        self.metrics = metrics
        self._folder = folder
        self._sends: list[Send | SendBatch | Query] = []
        self._writes: list[Write] = []
        self._pending: list[Input] = []
        self._closed: list[str] = []
        self._measured_at = 0.0
        self._listened_at, self._busy_s = clock.monotonic(), 0.0
        self._heard = True
        self._ended = dict.fromkeys(OUTCOMES, 0)
        self._shown: dict[str, None] = {}
        self.stopping = False
        state.disk_free = free_bytes(folder)

    def turn(self) -> None:
        """One round: wait, take in, decide, commit, speak."""
        self._wait()
        with self.store.turn():
            for input in self._pending_inputs():
                self._feed(input)
            for input in self.link.receive():
                self._feed(input)
            self._check_and_end()
            self._keep_house()
            self._load_windows()
            self._feed(Tick(free_bytes(self._folder)))
            self._flush()
        self._drop_inputs()
        self._speak()
        self._measure()
        self._busy_s = self.clock.monotonic() - self._listened_at

    def run(self) -> None:
        """Turns until ``stopping`` is set (by a signal), then a last one that tells the workers."""
        while not self.stopping:
            self.turn()
        self._pending.append(Stop())
        self.turn()
        log.info("stopped", lines_assigned=sum(len(job.assigned) for job in self.state.jobs.values()))

    def _pause(self) -> float:
        if self._pending or self.stopping or jobs.work_wanted(self.state):
            return 0.0
        if self.upkeep is not None and self.upkeep.busy:
            return IDLE_S / 10
        return IDLE_S / 4 if self.link.busy else IDLE_S

    def _wait(self) -> None:
        """Until something came in. Time in which nobody listened is no silence of the workers' (S3)."""
        pause, since = self._pause(), self.clock.monotonic()
        self.link.wait(pause)
        self._listened_at = self.clock.monotonic()
        deaf = self._busy_s + self._listened_at - since - pause
        if deaf >= limits.BEAT_S:
            self._pending.insert(0, Deaf(deaf))

    def _now(self) -> Now:
        return Now(self.clock.monotonic(), self.clock.wall())

    def _pending_inputs(self) -> list[Input]:
        pending, self._pending = self._pending, []
        return pending

    def _feed(self, input: Input) -> None:
        """One input through the rules; what it writes is in this turn's transaction, what it says waits for the end."""
        if isinstance(input, Came):
            self._heard = True
            input = self._with_facts(input)
        step = rules.handle(self.state, input, self._now())
        for note in step.notes:
            self._tell(note)
        for write in step.writes:
            if isinstance(write, AppendInput):
                failure = self._append(write)
                if failure is not None:
                    self._pending.append(failure)
                    return
            elif isinstance(write, SealInput):
                self.spool.seal(write.job)
        self._writes += step.writes
        self._sends += step.sends

    def _flush(self) -> None:
        """Bring the writes so far into the transaction: before the store is read, and at the turn's end."""
        writes, self._writes = self._writes, []
        self.store.apply(writes)

    def _with_facts(self, came: Came) -> Came:
        refs = rules.lookups(self.state, came)
        if refs or isinstance(came.message, messages.Submit | messages.DeleteJob):
            self._flush()
        facts = self.store.facts(refs, self.state) if refs else {}
        closed = None
        if isinstance(came.message, messages.Submit | messages.DeleteJob) and came.message.job not in self.state.jobs:
            closed = self.store.closed_job(came.message.job)
        if not facts and closed is None:
            return came
        return Came(came.peer, came.user, came.admin, came.message, facts, closed)

    def _append(self, write: AppendInput) -> InputFailed | None:
        try:
            self.spool.append(write.job, write.offset, write.data)
        except OSError as error:
            return InputFailed(write.job, write.offset, write.peer, write.request, error.strerror or str(error))
        return None

    # -- work in slices -----------------------------------------------------------------------------------------

    def _check_and_end(self) -> None:
        """A slice of the input of each job that is being checked, and of the waiting lines of each that ends."""
        self._flush()
        for job in jobs.work_wanted(self.state):
            if job.status == "validating":
                checked = self.intake.step(job, self.clock.wall())
                if checked is not None:
                    self._ended["failed"] += checked.bad_stored
                    self._feed(checked)
            else:
                self._end_waiting(job)

    def _end_waiting(self, job: Job) -> None:
        code, words = jobs.ENDS_LINES[job.status]
        count, left = self.store.end_waiting(job, code, words, limits.END_LINES_A_TURN, self.clock.wall())
        self._ended["cancelled" if job.status == "cancelling" else "expired"] += count
        self._feed(WaitingEnded(job.id, count, left))

    def _keep_house(self) -> None:
        if self.upkeep is not None:
            self._flush()
            self.upkeep.within_turn(self._now())

    def _load_windows(self) -> None:
        self._flush()
        for job, window, count in list(scheduler.windows_wanted(self.state)):
            lines, cursor, exhausted = self.store.window(job.number, window.model, window.cursor, count)
            self._feed(Loaded(job.id, window.model, lines, cursor, exhausted))

    def _drop_inputs(self) -> None:
        """Inputs of jobs whose end is committed: nobody reads them any more, and disks fill. Then other upkeep."""
        closed, self._closed = self._closed, []
        for job in closed:
            self.intake.forget(job)
            self.link.forget(job)
            self.spool.drop(job)
        if self.upkeep is not None:
            self.upkeep.between_turns(self._now(), quiet=not self._heard)
        self._heard = False

    # -- out ----------------------------------------------------------------------------------------------------

    def _speak(self) -> None:
        """Say what this turn's commit made true. Who does not take it loses its session in the next turn."""
        sends, self._sends = self._sends, []
        deaf: set[bytes] = set()
        for send in sends:
            if send.peer in deaf:
                continue
            if isinstance(send, Query):
                reply = self._answer(send)
                heard = reply is None or self.link.send(send.peer, reply)
            elif isinstance(send, SendBatch):
                heard = self.link.send_batch(send)
            else:
                heard = self.link.send(send.peer, send.message)
            if not heard:
                deaf.add(send.peer)
        for peer, late in self.questions.answers() if self.questions is not None else ():
            self.link.send(peer, late)
        deaf.update(self.link.send_parts(self.clock.monotonic()))
        self._pending += [Unsendable(peer) for peer in deaf]

    def _answer(self, query: Query) -> Any:
        """The answer; None when it comes in a later turn."""
        with self.store.failing():
            if self.questions is None or not isinstance(query.message, messages.AskAudit):
                return answer(self.store, self.state, query, self.clock.monotonic())
            job = job_asked_for(self.store, self.state, query)
        return job if isinstance(job, messages.Failure) else self.questions.ask(query, job)

    def _tell(self, note: Note) -> None:
        if note.kind == "line_ended":
            self._ended[note.fields["outcome"]] += 1
            return
        if note.kind not in QUIET:
            log.info(note.kind, **note.fields)
        match note.kind:
            case "job_ended":
                self._closed.append(note.fields["job"])
            case "job_deleted" if self.upkeep is not None:
                self.upkeep.deleted()
            case "line_wasted":
                self.metrics.lines_wasted.inc()
            case "message_dropped":
                self.metrics.messages_dropped.labels(reason=note.fields["reason"]).inc()
            case "session_gone" if note.fields["held"]:
                self.metrics.sessions_gone_working.labels(reason=note.fields["reason"]).inc()

    def _measure(self) -> None:
        for outcome, count in self._ended.items():
            if count:
                self.metrics.lines.labels(outcome=outcome).inc(count)
                self._ended[outcome] = 0
        mono = self.clock.monotonic()
        if mono - self._measured_at < limits.BEAT_S:
            return
        self._measured_at = mono
        pulse(self._folder)
        self._show_workers()
        self.metrics.lines_waiting.set(sum(max(0, job.waiting) for job in self.state.jobs.values()))
        self.metrics.wal_bytes.labels(store="broker").set(wal_bytes(self._folder / STORE_NAME))

    def _show_workers(self) -> None:
        """Sessions by worker: 1 while it is here, then 0, until too many others are gone too."""
        here = self.state.by_worker
        for worker in here:
            self._shown.pop(worker, None)
            self._shown[worker] = None  # behind those that are gone: these go first
        for worker in list(self._shown)[: max(0, len(self._shown) - len(here) - limits.WORKERS_SHOWN_MAX_COUNT)]:
            del self._shown[worker]
            self.metrics.sessions.remove(worker)
        for worker in self._shown:
            self.metrics.sessions.labels(worker=worker).set(int(worker in here))


def prepare(store: Store, spool: Spool, clock: Clock, grace_s: float, reserve_bytes: int) -> State:
    """Take the store over and read back what a broker must know."""
    store.take_over()
    now = Now(clock.monotonic(), clock.wall())
    state = store.load(now, grace_s)
    state.disk_reserve = reserve_bytes
    spool.sweep(state.jobs)
    for job in state.jobs.values():
        job.received = min(job.size, spool.size(job.id)) if job.status == "receiving" else job.size
    if state.absent:
        log.info("grace_began", lines=sum(1 for _ in state.unclaimed()), workers=sorted(state.absent), grace_s=grace_s)
    return state
