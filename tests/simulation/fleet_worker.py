"""A worker of the simulated fleet: the real session rules, a dict as its disk, an engine that answers when chance says.

Does with effects what the process does, in its order: writes, commit, and only then sends. It may end before and after
each commit and between two sends; what its disk holds then is what the next process finds.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from common import messages as wire
from common.messages import LineRef, ModelInfo, RingReport
from tests.simulation.fleet_link import Wire, put, take
from worker import effects as do
from worker import inputs as on
from worker.session import Session
from worker.states import LINKED, Identity
from worker.structures import Outcome, Prepared, Request, Sampling

if TYPE_CHECKING:
    from tests.simulation.fleet_world import FleetWorld

MODEL = ModelInfo("m", "f", 1000)
CONCURRENCY = 2
RING = (8, 10_000)
IDS = array("i", [0])
SAMPLING = Sampling(1)


@dataclass
class WorkerDisk:
    """The outbox: what a commit put there."""

    name: str
    incarnation: int = 0
    rows: dict[LineRef, tuple[Outcome, str]] = field(default_factory=dict)
    aside: dict[LineRef, str] = field(default_factory=dict)
    running: dict[LineRef, None] = field(default_factory=dict)


class SimWorker:
    """One worker through all its processes."""

    def __init__(self, world: FleetWorld, name: str) -> None:
        self.world = world
        self.disk = WorkerDisk(name)
        self.finished: set[LineRef] = set()
        """Told to the session as stored and not discarded since: whatever happens, these are on disk."""
        self.unsynced: list[dict[LineRef, tuple[Outcome, str]]] = []
        self.alive = False
        self.frozen_until = 0.0
        self.start()

    # -- a process's life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        disk = self.disk
        disk.incarnation += 1
        lost = self.finished - disk.rows.keys() - disk.aside.keys()
        if lost:
            self.world.broken(f"D1: finished on {disk.name}, and not in its outbox any more: {sorted(map(str, lost))}")
        rows = [(ref, store, out.size) for ref, (out, store) in disk.rows.items()]
        last = rows[-1][1] if rows else ""
        identity = Identity(disk.name, disk.incarnation, ("broker",), last, tuple(disk.running))
        disk.running = {}
        self.session = Session(identity, rows, self.world.chance.random, self.world.clock.mono)
        self.alive = True
        self.exiting = False
        self.loaded = False
        self.wire: Wire | None = None
        self.connecting = False
        self.writes: list[Any] = []
        self.sends: list[Any] = []
        self.gone: set[LineRef] = set()
        self.begun: set[LineRef] = set()
        """What this process ran and has no durable result of."""
        self.texts: deque[Any] = deque()
        self.in_ring: deque[Request] = deque()
        self.engine: dict[LineRef, bytes] = {}
        self.bodies: dict[LineRef, bytes] = {}
        self.stopping: set[LineRef] = set()
        self.steps = 0

    def kill(self) -> None:
        """SIGKILL: what is in memory is gone; the kernel closes the connection."""
        if not self.alive:
            return
        self.world.count_deaths(self.begun)
        self.alive = False
        self._close()
        if self.unsynced:  # the control: what was committed and never synced is gone with the machine
            self.disk.rows = self.unsynced[0]
            self.unsynced = []

    def terminate(self) -> None:
        """SIGTERM; told while it waits."""
        if self.session.state.name != "LEFT":
            self._tell(on.Terminate("told to end"))

    def turn(self) -> None:
        """One round, as ``worker.process`` makes it."""
        if not self.alive or self.world.clock.mono < self.frozen_until:
            return
        self._receive()
        self._work()
        self._tell(on.Tick(on.Snapshot(RingReport(), RING[0], RING[1], self.steps, 0, self.steps)))
        self._feed_ring()
        self._commit()
        self._speak()
        if self.exiting:
            self.world.counts["left"] += 1
            self.alive = False
            self.disk.running = {}  # it ended in order
            self._close(linger=True)
        elif self.alive:
            self.session.check()

    # -- in -------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        wire_ = self.wire
        if self.connecting:
            self.connecting = False
            if wire_ is None:
                self._tell(on.LinkLost("nobody answers"))
                return
            self._tell(on.LinkReady())
        if wire_ is None:
            return
        for _ in range(int(self.world.chance.random() * 5)):
            message = take(self.world, wire_.down)
            if message is None:
                break
            self._hear(message)
            if self.session.state not in LINKED:
                return
        if wire_.cut and not wire_.down:
            self._tell(on.LinkLost("closed"))

    def _hear(self, message: Any) -> None:
        session = self.session
        if self.world.unfenced and session.fence is not None and hasattr(message, "fence"):
            stale = message.fence != session.fence
            message = replace(message, fence=session.fence)  # the control: as if it were never looked at
        else:
            fence = getattr(message, "fence", None)
            stale = fence is not None and session.fence is not None and fence != session.fence
        before = self._holds() if stale else None
        self._tell(on.Received(message))
        if stale and session.fence is not None and before != self._holds():
            self.world.broken(f"S4: {self.disk.name} obeys a stale {type(message).__name__}")

    def _holds(self) -> Any:
        lines = self.session.work.lines
        return [(one.ref, one.stage, one.stopping, one.wanted) for one in lines._lines.values()], len(self.texts)

    def _work(self) -> None:
        """Tokenizer and engine, by chance."""
        chance, world = self.world.chance, self.world
        if not self.loaded and chance.random() < 0.5:
            self.loaded = True
            self._tell(on.Loaded((MODEL,), CONCURRENCY, RING[1]))
        while self.texts and chance.random() < 0.8:
            job = self.texts.popleft()
            self.bodies[job.ref] = job.body
            self._tell(on.Tokenized(Prepared(Request(job.ref, job.url, "m", 1, SAMPLING), IDS)))
        while self.in_ring and len(self.engine) < CONCURRENCY:
            ref = self.in_ring.popleft().ref
            if ref in self.stopping:
                self._end(Outcome(ref, "cancelled", 0, 0, 0, b""))
                continue
            self.engine[ref] = self.bodies[ref]
            self.begun.add(ref)
            world.began(self.disk.name, ref)
            self._tell(on.Admitted((ref,)))
        if not self.engine:
            return
        self.steps += 1
        if chance.random() < 0.5:
            ref = chance.choice(list(self.engine))
            body = self.engine[ref]
            if ref.index == world.faults.poison:
                if chance.random() < 0.2:
                    world.counts["poisoned"] += 1
                    self.kill()
                return
            del self.engine[ref]
            cancelled = ref in self.stopping
            self._end(Outcome(ref, "cancelled", 0, 0, 0, b"") if cancelled else world.answer(ref, body))

    def _end(self, outcome: Outcome) -> None:
        self.stopping.discard(outcome.ref)
        self.bodies.pop(outcome.ref, None)
        self._tell(on.Ended(outcome))

    def _feed_ring(self) -> None:
        while self.alive and not self.exiting and (batches := self.session.work.lines.next_batches(RING[1])):
            taken = [prepared.request for batch in batches for prepared in batch]
            self.in_ring.extend(taken)
            self._tell(on.Published(tuple(request.ref for request in taken)))

    # -- out ------------------------------------------------------------------------------------------------------

    def _tell(self, item: Any) -> None:
        if not self.alive or self.exiting:
            return
        for effect in self.session.handle(item, self.world.clock.mono):
            if isinstance(effect, do.WRITES):
                self.writes.append(effect)
                if isinstance(effect, do.Discard):
                    self.gone.update(effect.refs)
            elif isinstance(effect, do.SENDS):
                self.sends.append(effect)
            elif isinstance(effect, do.Tokenize):
                self.texts.append(effect.job)
            elif isinstance(effect, do.StopRequests):
                self.stopping.update(one.ref for one in effect.requests)
            elif isinstance(effect, do.Exit):
                self.exiting = True

    def _commit(self) -> None:
        if not self.writes or not self.alive:
            return
        world, disk = self.world, self.disk
        if world.faults.disk_full and not world.calm and world.chance.random() < world.faults.disk_full:
            self._tell(on.StoreBlocked("disk full"))
            return
        world.point("worker.before_commit")
        if world.unsynced:
            self.unsynced = [*self.unsynced, dict(disk.rows)][-3:]
        saved = []
        for effect in self.writes:
            if isinstance(effect, do.Save):
                disk.rows[effect.outcome.ref] = (effect.outcome, effect.store_id)
                disk.running.pop(effect.outcome.ref, None)
                saved.append(effect.outcome.ref)
                self.begun.discard(effect.outcome.ref)
            elif isinstance(effect, do.Discard):
                for ref in effect.refs:
                    self._discard(ref)
            elif isinstance(effect, do.SetAside):
                disk.aside[effect.ref] = effect.reason
                del disk.rows[effect.ref]
            elif isinstance(effect, do.NoteRunning):
                disk.running.update(dict.fromkeys(effect.refs))
            elif isinstance(effect, do.NoteStopped):
                for ref in effect.refs:
                    disk.running.pop(ref, None)
                    self.begun.discard(ref)
            else:
                self.world.broken(f"this outbox knows no {type(effect).__name__}")
        self.writes = []
        world.point("worker.after_commit")
        if saved:
            self.finished.update(saved)
        if saved or self.session.blocked:
            self._tell(on.Stored(tuple(saved)))

    def _discard(self, ref: LineRef) -> None:
        outcome, store = self.disk.rows.pop(ref)
        self.finished.discard(ref)
        if outcome.status != "cancelled" and not self.world.is_durable(store, ref):
            self.world.broken(f"D1: {self.disk.name} drops {ref}, which its broker does not have durably")

    def _speak(self) -> None:
        sends, self.sends = self.sends, []
        for effect in sends:
            self._say(effect)
            self.world.point("worker.between_sends")
        self.gone.clear()

    def _say(self, effect: Any) -> None:
        if isinstance(effect, do.Connect):
            self.connecting = True
            self.wire = self.world.open_wire(self.disk.name)
        elif isinstance(effect, do.Disconnect):
            self._close(effect.linger)
        elif self.wire is not None and not self.wire.cut:
            if isinstance(effect, do.SendResults):
                effect = do.SendResults(effect.fence, tuple(ref for ref in effect.refs if ref not in self.gone))
                if not effect.refs:
                    return
            elif isinstance(effect, do.SendPart) and effect.ref in self.gone:
                return
            put(self.world, self.wire, self.wire.up, self._message(effect))

    def _close(self, linger: bool = False) -> None:
        wire_, self.wire = self.wire, None
        self.connecting = False
        if wire_ is not None:
            self.world.close_wire(wire_, linger)

    def _message(self, effect: Any) -> Any:
        if isinstance(effect, do.Send):
            return effect.message
        fence = effect.fence
        if isinstance(effect, do.SendResults):
            return wire.Done(fence, tuple(self._result(ref, fence) for ref in effect.refs))
        outcome = self._durable(effect.ref, fence)
        data = outcome.body[effect.offset : effect.offset + effect.length]
        if effect.offset == 0:
            return wire.Done(fence, (self._result(effect.ref, fence, data),))
        return wire.ResultPart(fence, effect.ref, effect.offset, data)

    def _durable(self, ref: LineRef, fence: wire.Fence) -> Outcome:
        found = self.disk.rows.get(ref)
        if found is None:
            self.world.broken(f"D1: {self.disk.name} tells {ref}, which is not durable")
        if found[1] != fence.store_id:
            self.world.broken(f"S4: {self.disk.name} sends a row of another store")
        return found[0]

    def _result(self, ref: LineRef, fence: wire.Fence, body: bytes | None = None) -> wire.Result:
        out = self._durable(ref, fence)
        data = out.body if body is None else body
        return wire.Result(
            ref,
            out.status,
            out.status_code,
            out.prompt_tokens,
            out.completion_tokens,
            len(out.body),
            data,
            out.notes,
        )
