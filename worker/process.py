"""shell: the worker's process: session, tokenizer and engine threads that end together (S2).

``Worker.turn`` is its flow: what came in is told to the session's rules, what they want written is committed in one
go, and only then is anything said (D1). The session's thread is the process's main thread; it sleeps in its poller and
is woken by the socket, the other threads and signals.
"""

from __future__ import annotations

import contextlib
import queue
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import zmq

from common import garbage, limits, log, metrics
from common import messages as wire
from common.clock import Clock, SystemClock
from common.config import WorkerSettings
from common.errors import HaulierError, InvariantError
from common.messages import LineRef
from worker import effects as do
from worker import inputs as on
from worker import leaving, machinery, state_slot, tokenizer
from worker.figures import Figures
from worker.inbox import Inbox
from worker.link import Link
from worker.outbox import Outbox, OutboxBlocked
from worker.responses import result_of
from worker.session import Session
from worker.states import LINKED, Identity
from worker.structures import Finished, Outcome, Prepared, Request, TokenizeJob
from worker.witness import Witness

RING_FULL_WAIT_S = 0.005
"""While lines wait for room in the ring: nobody says when the device has read an entry, so it is looked at."""
AT_ONCE = 143
"""The exit code of a process that was told twice."""
WRITES, SENDS = frozenset(do.WRITES), frozenset(do.SENDS)
JOIN_S = 5.0
"""What the other threads get to end; an engine that is stuck does not keep its process."""


@dataclass(frozen=True, slots=True)
class ThreadEnded:
    """A thread is over; ``failure`` says why, None if it was told to."""

    name: str
    failure: BaseException | None


class Worker:
    """One worker process. Every method belongs to the main thread, except where it says otherwise."""

    def __init__(self, settings: WorkerSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock if clock is not None else SystemClock()
        self.log = log.get("worker")
        self.inbox = Inbox()
        self.slot = state_slot.take(settings.state)
        self.outbox = Outbox(self.slot.folder)
        self.witness = Witness(settings.witness)
        self.metrics = metrics.Metrics()
        self.session = self._begin()
        self.figures = Figures(self.metrics, self.outbox, self.session)
        self.exit: do.Exit | None = None
        self.failed = False
        self._link: Link | None = None
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._poller.register(self.inbox, zmq.POLLIN)
        self._writes: list[Any] = []
        self._sends: list[do.Effect] = []
        self._gone: set[LineRef] = set()  # settled in this round: what it wanted to say of them before is not said
        self._retry_at = 0.0
        self._entries = 0
        self._machinery: machinery.Machinery | None = None
        self._texts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=("tokenizer", self._tokenize), daemon=True, name="tokenizer"),
            threading.Thread(target=self._guarded, args=("engine", self._run_engine), daemon=True, name="engine"),
        ]

    def _begin(self) -> Session:
        adopted = state_slot.adopt_orphans(self.slot, self.outbox)
        found = self.outbox.begin()
        stores = {store for _, store, _ in found.rows}
        last = found.rows[-1][1] if found.rows else ""
        self.log.info("worker_starts", worker=found.worker, incarnation=found.incarnation, slot=self.slot.number,
                      results_kept=len(found.rows), stores=len(stores), adopted=adopted)  # fmt: skip
        if found.aside:
            self.log.warning("results_set_aside", count=found.aside)
        if found.ran:
            self.log.warning("died_while_running", lines=[str(ref.line) for ref in found.ran[:100]])
        ran = found.ran[: limits.PAGE_MAX_COUNT]
        identity = Identity(found.worker, found.incarnation, self.settings.brokers, last, ran)
        return Session(identity, found.rows, random.SystemRandom().random, self.clock.monotonic())

    # -- the flow -----------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Work until told to end, or until any thread ends (S2); the process's exit code."""
        with _exported(self.metrics, self.settings.metrics_port):
            for thread in self._threads:
                thread.start()
            try:
                while self.exit is None:
                    self.turn()
            except Exception as failure:  # noqa: BLE001 (S2: its end is the process's, in the same order as any thread's)
                self._thread_ended(ThreadEnded("session", failure))
            finally:
                self._end_threads()
        return self.exit.code if self.exit is not None else InvariantError.exit_code

    def turn(self) -> None:
        """One round of the session: the flow diagram of this process."""
        self._sleep()
        self._receive()
        self._collect()
        self._tick()
        self._feed_ring()
        self._commit()
        self._speak()

    def _sleep(self) -> None:
        now = self.clock.monotonic()
        wait = max(0.0, self.session.due() - now)
        if self.session.work.lines.waiting_for_ring:
            wait = min(wait, RING_FULL_WAIT_S)
        if self._writes:
            wait = min(wait, max(0.0, self._retry_at - now))
        self._poller.poll(int(wait * 1000) + 1)

    def _receive(self) -> None:
        link = self._link
        if link is None:
            return
        for item in link.inputs():
            self._tell(item)
            if self.session.state not in LINKED:  # what follows was said to a session that is over
                return

    def _collect(self) -> None:
        admitted: list[LineRef] = []
        rest: list[Any] = []  # what posts here is this file
        for item in self.inbox.drain():
            if type(item) is Request:
                admitted.append(item.ref)
            else:
                rest.append(item)
        if admitted:  # a line is admitted before it ends, so the admissions of a round may be told first
            self._tell(on.Admitted(tuple(admitted)))
        for item in rest:
            if isinstance(item, ThreadEnded):
                self._thread_ended(item)
            elif isinstance(item, machinery.Machinery):
                self._use(item)
            elif isinstance(item, list):
                self._tell(*item)
            else:
                self._tell(item)

    def _tick(self) -> None:
        built = self._machinery
        if built is not None:
            built.producer.poll()
            self.figures.look(built, self.clock.monotonic())
        self._tell(on.Tick(self.figures.snapshot(built)))

    def _feed_ring(self) -> None:
        built = self._machinery
        # an aborted ring takes nothing: its engine's thread is about to end, and says why
        while built is not None and self.exit is None and not built.producer.handover.aborted:
            batches = self.session.work.lines.next_batches(built.producer.credit()[1])
            pairs = [[(one.request, one.token_ids) for one in batch] for batch in batches]
            entries = built.producer.publish_all([(str(self._entries + at), pair) for at, pair in enumerate(pairs)])
            if not entries:
                return
            self._entries += len(entries)
            self._tell(on.Published(tuple(one.request.ref for batch in batches[: len(entries)] for one in batch)))

    def _commit(self) -> None:
        """Everything of this round in one transaction; only what is in it is stored (D1)."""
        if not self._writes or self.clock.monotonic() < self._retry_at:
            return
        try:
            self.outbox.write(self._writes, self.session.identity.incarnation)
        except OutboxBlocked as failure:
            self._retry_at = self.clock.monotonic() + limits.OUTBOX_RETRY_S
            self._tell(on.StoreBlocked(str(failure)))
            return
        saved = tuple([effect.outcome.ref for effect in self._writes if type(effect) is do.Save])
        self._writes = []
        if saved or self.session.blocked:  # a commit without results, too, says that the disk takes again
            self._tell(on.Stored(saved))

    def _speak(self) -> None:
        sends, self._sends = self._sends, []
        for effect in sends:
            lost = self._say(effect)
            if lost is not None:
                self._tell(lost)
                self._speak_after_loss()
                break
        self._gone.clear()

    def _speak_after_loss(self) -> None:
        """The link is lost in the middle: what else was to be said on it is not; what the loss asks for is done."""
        sends, self._sends = self._sends, []
        for effect in sends:
            self._say(effect)

    # -- effects ------------------------------------------------------------------------------------------------

    def _tell(self, *items: on.Input) -> None:
        """Tell the session's rules, and do or note down what follows."""
        if self.exit is not None:
            return
        jobs: list[TokenizeJob] = []
        resolved = 0
        for effect in self.session.handle_all(items, self.clock.monotonic()):
            kind = type(effect)  # by type and in bulk: some of these come several times a line
            if kind in WRITES:
                self._writes.append(effect)
                if isinstance(effect, do.Discard):
                    self._gone.update(effect.refs)
            elif kind in SENDS:
                self._sends.append(effect)
            elif isinstance(effect, do.Tokenize):
                jobs.append(effect.job)
            elif isinstance(effect, do.Resolve):
                resolved += effect.items
            elif isinstance(effect, do.StopRequests) and self._machinery is not None:
                self._machinery.producer.cancel(effect.requests)
            elif isinstance(effect, do.Note):
                getattr(self.log, effect.level)(effect.name, **effect.fields)
            elif isinstance(effect, do.Exit):
                self.exit = effect
        if jobs:
            self._texts.put(jobs)
        if resolved and self._machinery is not None:
            self._machinery.producer.resolve(resolved)

    def _say(self, effect: do.Effect) -> on.LinkLost | None:
        if isinstance(effect, do.Connect):
            self._open(effect.endpoint)
        elif isinstance(effect, do.Disconnect):
            self._close(effect.linger)
        elif self._link is None:
            return None
        elif isinstance(effect, do.Send):
            return self._link.send(effect.message)
        elif isinstance(effect, do.SendResults):
            results = tuple(map(result_of, self.outbox.read(ref for ref in effect.refs if ref not in self._gone)))
            return self._link.send(wire.Done(effect.fence, results)) if results else None
        elif isinstance(effect, do.SendPart):
            return self._link.send(self._part(effect)) if effect.ref not in self._gone else None
        return None

    def _part(self, effect: do.SendPart) -> object:
        outcome = self.outbox.read((effect.ref,))[0]
        data = outcome.body[effect.offset : effect.offset + effect.length]
        if effect.offset == 0:
            return wire.Done(effect.fence, (result_of(outcome, data),))
        return wire.ResultPart(effect.fence, effect.ref, effect.offset, data)

    def _open(self, endpoint: str) -> None:
        self._link = Link(self._context, endpoint, self.settings.keys)
        for socket in self._link.sockets():
            self._poller.register(socket, zmq.POLLIN)

    def _close(self, linger: bool) -> None:
        if self._link is None:
            return
        for socket in self._link.sockets():
            self._poller.unregister(socket)
        self._link.close(linger)
        self._link = None

    # -- threads ------------------------------------------------------------------------------------------------

    def _guarded(self, name: str, body: Callable[[], None]) -> None:
        """A thread's whole life: however it ends, the session hears of it. On that thread."""
        failure: BaseException | None = None
        try:
            body()
        except BaseException as caught:  # noqa: BLE001 - handed to the session, which ends the process with it
            failure = caught
        self.inbox.post(ThreadEnded(name, failure))

    def _tokenize(self) -> None:
        tokenizer.serve(self._texts, self._post_results)

    def _post_results(self, results: Sequence[Prepared | Outcome]) -> None:
        news = [on.Tokenized(one) if isinstance(one, Prepared) else on.Ended(one) for one in results]
        self.inbox.post(news)

    def _run_engine(self) -> None:
        """Load, then run. On the engine's thread."""
        built = machinery.build(
            self.settings, self._finish, self._admit, lambda line: self.log.info("model", says=line),
            lambda failure: self.inbox.post(ThreadEnded("ranks", failure)),
        )  # fmt: skip
        self._texts.put(built.preparer)
        self.inbox.post(built)
        built.engine.run(self._stop)

    def _finish(self, finished: Finished) -> None:
        self._texts.put(finished)

    def _admit(self, request: Request) -> None:
        self.witness.saw(request.ref)
        self.inbox.post(request)

    def _use(self, built: machinery.Machinery) -> None:
        self._machinery = built
        garbage.calm()
        self.log.info("model_ready", model=built.model.name, concurrency=built.concurrency, ring_bytes=built.ring_bytes)
        self._tell(on.Loaded((built.model,), built.concurrency, built.ring_bytes))

    def _thread_ended(self, ended: ThreadEnded) -> None:
        """S2: any thread's end is the process's end."""
        failure = ended.failure
        self.failed = self.failed or failure is not None
        if isinstance(failure, HaulierError):
            self.exit = self.exit or do.Exit(failure.exit_code, str(failure))
            self.log.error("thread_ended", thread=ended.name, reason=str(failure))
        else:
            self.exit = self.exit or do.Exit(70, f"the {ended.name} thread ended: {failure!r}")
            self.log.error("thread_ended", thread=ended.name, exc_info=failure)

    def _end_threads(self) -> None:
        self._stop.set()
        self._texts.put(tokenizer.Stop())
        if self._machinery is not None:
            self._machinery.producer.close()
        patience = 0.0 if self.exit is None or self.exit.code == AT_ONCE else JOIN_S
        for thread in self._threads:
            thread.join(patience)
        self._close(False)
        self._threads.append(leaving.end_context(self._context, JOIN_S))
        if self.exit is not None and self.exit.code != InvariantError.exit_code and not self.failed:
            try:
                self.outbox.leave()
            except OutboxBlocked as failure:
                self.log.warning("evidence_left_behind", reason=str(failure))
        self.outbox.close()
        self.inbox.close()
        self.slot.release()

    def still_running(self) -> list[str]:
        """Threads that did not end in time."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def terminate(self, reason: str, at_once: bool) -> None:
        """Ask for the end. Any thread, signal handlers too."""
        self.inbox.post(on.Terminate(reason, at_once))


@contextlib.contextmanager
def _exported(figures: metrics.Metrics, port: int) -> Iterator[None]:
    endpoint = metrics.start(figures, port)
    try:
        yield
    finally:
        if endpoint is not None:
            endpoint.stop()


def serve(settings: WorkerSettings) -> NoReturn:
    """Run a worker in this process until it ends, and the process with it: no destructor runs, since after a failure
    the device may still read what it would free (L7), and nothing durable depends on one. Main thread. The first
    SIGTERM or Ctrl-C drains, the second leaves at once.
    """
    worker = Worker(settings)
    asked = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        worker.terminate(f"told to end by {signal.Signals(number).name}", at_once=asked > 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    code = worker.run()
    stuck = worker.still_running()
    if stuck:  # an engine in the middle of a load or a step that does not end: nothing durable depends on it
        log.get("worker").warning("threads_left_behind", threads=stuck)
    if worker.exit is not None and code not in (0, AT_ONCE):
        print(f"haulier: {' '.join(worker.exit.reason.split())}", file=sys.stderr, flush=True)
    leaving.leave(code)
