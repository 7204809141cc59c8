"""A seeded fleet: the broker's real turn and rules, real worker sessions, dicts as disks, a bad link, clock jumps.

Everything random comes from one seed. Any process may end before and after each commit and between two sends; stores
are taken over, and recreated empty. After every input the books and these are checked: D1 (what was acked is durable,
what is finished is kept, nothing is told before it is synced), D3 (claimed work is not given away), D4 (one right end
a line), D5 (only who killed is blamed), S2 and S3 (a session is there or gone, and not gone while it works), S4 (what
is stale changes nothing).
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import broker.server
from broker.effects import AssignLine, Query, StoreResult
from broker.inputs import Came
from broker.server import Server, prepare
from broker.state import Job
from common import limits, messages
from common.errors import HaulierError, RefusedError
from common.messages import LineRef
from common.metrics import Metrics
from tests.simulation import memory_store, sqlite_store
from tests.simulation.fleet_link import FakeLink, Wire
from tests.simulation.fleet_worker import SimWorker
from tests.simulation.memory_store import MemoryDisk, MemoryStore, Row
from tests.simulation.sqlite_store import SqliteStore
from tests.simulation.world import Broken, Crash, MemorySpool, SimClock
from worker.structures import Outcome

FOLDER = Path("/")
METRICS = Metrics()
JOB = "11111111-1111-4111-8111-111111111111"
URL = "/v1/completions"
SMALL = {
    "PART_MAX_BYTES": 48, "RESULTS_UNCONFIRMED_MAX_BYTES": 96, "PAGE_MAX_COUNT": 3, "BATCH_MAX_LINES": 3,
    "PREFETCH_MIN_LINES": 2, "WAITING_LOADED_MIN_COUNT": 4, "WAITING_LOADED_MAX_COUNT": 4, "END_LINES_A_TURN": 3,
}  # fmt: skip
"""Bounds so small that a handful of lines meets them: pages, parts, windows."""


@contextlib.contextmanager
def small_world() -> Iterator[None]:
    """Small bounds, and a disk whose free space is not asked of this machine."""
    kept = {name: getattr(limits, name) for name in SMALL}
    real = broker.server.free_bytes
    try:
        for name, value in SMALL.items():
            setattr(limits, name, value)
        broker.server.free_bytes = lambda _: 1 << 40
        yield
    finally:
        for name, value in kept.items():
            setattr(limits, name, value)
        broker.server.free_bytes = real


@dataclass(frozen=True)
class Faults:
    """What may happen, as chances for each step of the world (``link``: for each message)."""

    link: float = 0.02
    cut: float = 0.03
    dark: float = 0.01
    stale: float = 0.3
    """That what was on its way on a closed connection comes out of the next one."""
    blocking: float = 0.005
    kill_worker: float = 0.01
    crash_worker: float = 0.02
    leave: float = 0.01
    freeze: float = 0.01
    disk_full: float = 0.02
    kill_broker: float = 0.01
    crash_broker: float = 0.03
    takeover: float = 0.005
    recreate: float = 0.0
    cancel: float = 0.0
    window_s: int = 0
    poison: int = -1
    """A line that kills its worker."""
    pause: float = 0.01
    wall_jump: float = 0.02
    once: bool = False
    """Nothing here costs a worker what it holds, so no line may run twice (D3)."""


ROUGH = Faults()
PROFILES: tuple[Faults, ...] = (
    ROUGH,
    Faults(link=0.05, cut=0.06, dark=0.02, kill_broker=0, crash_broker=0, kill_worker=0, crash_worker=0, takeover=0),
    Faults(link=0, cut=0, dark=0, blocking=0, kill_worker=0, crash_worker=0, leave=0, freeze=0, stale=0, pause=0,
           kill_broker=0.03, crash_broker=0.08, takeover=0.02, disk_full=0, once=True),
    Faults(cancel=0.03),
    Faults(window_s=6),
    Faults(recreate=0.05, crash_broker=0.01),
    Faults(link=0, dark=0, freeze=0, pause=0, kill_worker=0, crash_worker=0, blocking=0, poison=2),
    Faults(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, once=True, pause=0),
)  # fmt: skip
"""A schedule's kind is its seed's remainder: all at once; links; brokers; cancel; expiry; new stores; poison; calm."""


class SimServer(Server):
    """The real server; it says no answers to clients here, and each input is looked at before and after."""

    world: FleetWorld

    def _feed(self, input: Any) -> None:
        stale = self._stale(input)
        before = self._holds() if stale else None
        super()._feed(input)
        if stale and before != self._holds():
            self.world.broken(f"S4: the broker obeys a stale {type(input.message).__name__}")
        if not isinstance(input, Came) or not isinstance(input.message, messages.WorkerBeat):
            self.state.check()  # a beat moves no line

    def _stale(self, input: Any) -> bool:
        if not isinstance(input, Came) or isinstance(input.message, messages.Done):
            return False  # a result is judged by line and attempt alone
        session = self.state.sessions.get(input.peer)
        fence = getattr(input.message, "fence", None)
        return session is not None and fence is not None and fence != session.fence

    def _holds(self) -> Any:
        assigned = [(job.id, one.index, one.held, one.worker) for job in self.state.jobs.values()
                    for one in job.assigned.values()]  # fmt: skip
        return assigned, [
            (one.peer, one.draining, one.credit_lines, one.credit_bytes, one.running, one.phase, len(one.partial))
            for one in self.state.sessions.values()
        ]

    def _speak(self) -> None:
        self._sends = [one for one in self._sends if not isinstance(one, Query)]
        super()._speak()

    def _measure(self) -> None:
        """Figures are for people."""

    def _tell(self, note: Any) -> None:
        super()._tell(note)
        self.world.noted(note)


class _Watched:
    """Crash points around a store's commit, and what was written told to the world once it is committed."""

    world: FleetWorld
    _fresh: list[Any]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._fresh = []
        with super().turn():  # type: ignore[misc]
            yield
            self.world.point("broker.before_commit")
        self.world.committed(self._fresh)
        self.world.point("broker.after_commit")

    def take_over(self, chance: Any = None) -> None:
        super().take_over(self.world.new_store_id)  # type: ignore[misc]

    def apply(self, writes: Sequence[Any]) -> None:
        super().apply(writes)  # type: ignore[misc]
        self._fresh += [one for one in writes if isinstance(one, AssignLine | StoreResult)]


class WatchedMemory(_Watched, MemoryStore):
    """Dicts."""


class WatchedSqlite(_Watched, SqliteStore):
    """SQLite."""


class FleetWorld:
    """Broker, workers and their disks. The keyword arguments are for controls, which take something away."""

    def __init__(
        self, seed: int, faults: Faults | None = None, *, lines: int = 6, workers: int = 2, grace_s: float = 30.0,
        sqlite: bool = False, server: type[SimServer] = SimServer, unfenced: bool = False, unsynced: bool = False,
        one_store_id: bool = False,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.faults = PROFILES[seed % len(PROFILES)] if faults is None else faults
        self.lines, self.grace_s = lines, grace_s
        self.unfenced, self.unsynced, self.one_store_id = unfenced, unsynced, one_store_id
        self.chance = random.Random(seed)
        self.clock = SimClock()
        self.calm = False
        self.counts: Counter[str] = Counter()
        self.runs: Counter[tuple[int, int]] = Counter()
        self.deaths: Counter[tuple[int, int]] = Counter()
        self.asked: list[Any] = []
        self.crash_at = ""
        self.wires: dict[bytes, Wire] = {}
        self.generation = 0
        self.stores: dict[str, Any] = {}
        self.awaited: dict[int, str] = {}
        self._sqlite, self._server = sqlite, server
        self._wires_opened = 0
        self._left_over: dict[str, list[tuple[bool, Any]]] = {}
        self.broker: SimServer | None = None
        self.link: FakeLink | None = None
        self._new_store()
        self.start_broker()
        self.workers = [SimWorker(self, f"w{number}") for number in range(workers)]

    # -- the store ----------------------------------------------------------------------------------------------

    def _new_store(self) -> None:
        """An empty volume, and the same job submitted again: same id, other prompts."""
        self.generation += 1
        bodies = [b'{"g":%d,"p":%d,"x":"%s"}' % (self.generation, n, b"x" * (70 * (n % 3 == 1))) for n in
                  range(self.lines)]  # fmt: skip
        self.spool = MemorySpool({JOB: bytearray(b"".join(bodies))})
        wall = self.clock.wall()
        job = Job(JOB, 1, "", "sim", 1, "", False, 0, self.faults.window_s, "m", wall, "in_progress", wall)
        job.good = self.lines
        rows, at = [], 0
        for number, body in enumerate(bodies):
            rows.append(Row(number, URL, "m", at, len(body), prefix=number % 4))
            at += len(body)
        self.disk: Any = sqlite_store.new_connection() if self._sqlite else MemoryDisk()
        (sqlite_store if self._sqlite else memory_store).insert_job(self.disk, job, rows)
        self.ended: dict[int, StoreResult] = {}

    def new_store_id(self) -> str:
        return "store" if self.one_store_id else f"store-{self.generation}"

    def is_durable(self, store_id: str, ref: LineRef) -> bool:
        """Whether the line has its end in that store, committed."""
        found = self.stores.get(store_id)
        return found is not None and found.has_result(ref.job, ref.index)

    def start_broker(self) -> None:
        store: Any = WatchedSqlite(self.disk) if self._sqlite else WatchedMemory(self.disk)
        store.world = self
        clock: Any = self.clock
        state = prepare(store, self.spool, clock, self.grace_s, 0)
        self.stores[store.store_id] = store
        self.link = FakeLink(self)
        link: Any = self.link
        self.broker = self._server(state, store, self.spool, link, clock, FOLDER, METRICS)
        self.broker.world = self
        self.awaited = {line.index: line.worker for _, line in state.unclaimed()} if self.grace_s else {}
        for index in self.ended:
            if not store.has_result(JOB, index):
                self.broken(f"D1: line {index} was stored, and is not after a restart")

    # -- what is looked at --------------------------------------------------------------------------------------

    def broken(self, words: str) -> NoReturn:
        raise Broken(f"HAULIER_SEED={self.seed}: {words}")

    def committed(self, writes: Sequence[AssignLine | StoreResult]) -> None:
        """D3 and D4, at each commit."""
        for write in writes:
            if isinstance(write, StoreResult):
                self._ended(write)
            elif write.idx in self.awaited:
                awaited = self.awaited.pop(write.idx)
                state = self._state()
                if state.grace_until and write.worker != awaited and awaited in state.absent:
                    self.broken(f"D3: line {write.idx} is given to {write.worker} before {awaited} could claim it")

    def _ended(self, write: StoreResult) -> None:
        if write.idx in self.ended:
            self.broken(f"D4: line {write.idx} ends a second time")
        self.ended[write.idx] = write
        if not write.code:
            expected = self.answer(LineRef(JOB, write.idx, 0), self._body(write.idx))
            if (write.body, write.kind) != (expected.body, int(expected.status != "ok")):
                self.broken(f"D4: line {write.idx} has another line's answer: {write.body!r}")
        elif write.code == "worker_died":
            self.counts["set_aside"] += 1
            if self.deaths[self.generation, write.idx] < limits.DEATHS_ALONE_MAX_COUNT:
                self.broken(f"D5: line {write.idx} is set aside, and did not kill twice")
        elif write.code not in ("batch_cancelled", "batch_expired"):
            self.broken(f"D4: line {write.idx} ended with {write.code}")

    def check_said(self, message: messages.Ack | messages.Welcome) -> None:
        """D1: an ack speaks of what is committed."""
        store = self._broker().store
        for verdict in message.verdicts:
            if verdict.verdict == "stored" and not store.has_result(verdict.ref.job, verdict.ref.index):  # type: ignore[attr-defined]
                self.broken(f"D1: {verdict.ref} is acked and not stored")

    def noted(self, note: Any) -> None:
        if note.kind == "line_wasted":
            self.counts["wasted"] += 1
        if note.kind != "session_gone":
            return
        self.counts[f"gone_{note.fields['reason']}"] += 1
        if note.fields["reason"] == "silence":
            for wire in self.wires.values():
                heard = self.clock.mono - wire.carried_at
                if wire.worker == note.fields["worker"] and not wire.cut and heard < limits.LIVENESS_S:
                    self.broken(f"S3: {wire.worker} is called dead {heard:.1f} s after it spoke")

    def began(self, worker: str, ref: LineRef) -> None:
        """The engine runs a line: its witness."""
        self.runs[self.generation, ref.index] += 1

    def count_deaths(self, begun: set[LineRef]) -> None:
        for ref in begun:
            self.deaths[self.generation, ref.index] += 1

    def _body(self, index: int) -> bytes:
        return b'{"g":%d,"p":%d,"x":"%s"}' % (self.generation, index, b"x" * (70 * (index % 3 == 1)))

    def answer(self, ref: LineRef, body: bytes) -> Outcome:
        """What the engine says to a prompt; long for some."""
        ok = ref.index % 5 != 3
        return Outcome(
            ref, "ok" if ok else "failed", 200 if ok else 400, 1, 1, b'{"a":%s}' % body, f"{ref.attempt}.00 s: ended"
        )

    def _broker(self) -> SimServer:
        assert self.broker is not None
        return self.broker

    def _state(self) -> Any:
        return self._broker().state

    # -- faults -------------------------------------------------------------------------------------------------

    def point(self, name: str) -> None:
        """A place where a process may end; ``crash_at`` names the kind of process that is about to."""
        if self.crash_at and name.startswith(self.crash_at) and self.chance.random() < 0.25:
            self.crash_at = ""
            self.counts[f"crash_{name}"] += 1
            raise Crash(name)

    def open_wire(self, worker: str) -> Wire | None:
        """A fresh connection; with it, at times, what was on its way on the one before."""
        if self.broker is None or self.link is None:
            return None
        self._wires_opened += 1
        wire = Wire(b"wire%d" % self._wires_opened, self.link, worker)
        self.wires[wire.peer] = wire
        late = self._left_over.pop(worker, [])
        if late and not self.calm and self.chance.random() < self.faults.stale:
            self.counts["stale"] += len(late)
            due = self.clock.mono + self.chance.uniform(0, 3)
            wire.late = [(due, one) for up, one in late if up], [(due, one) for up, one in late if not up]
        return wire

    def close_wire(self, wire: Wire, linger: bool = False) -> None:
        """Cut: of what was on its way, some still arrives; the rest may come out of the next connection."""
        if not wire.cut:
            keep = len(wire.up) if linger else self.chance.randint(0, len(wire.up))
            while len(wire.up) > keep:
                wire.up.pop()
            self._left_over[wire.worker] = list(wire.sent)
        wire.cut = True
        if not wire.up:
            self.wires.pop(wire.peer, None)

    def end_broker(self) -> None:
        """The process is gone, and every connection with it."""
        self.broker = self.link = None
        self.crash_at = ""
        for wire in list(self.wires.values()):
            wire.up.clear()
            wire.cut = True
        self.wires.clear()

    def takeover(self) -> None:
        """The broker hangs; another starts on the same store; then the first wakes up and must stop unsaid."""
        frozen, self.broker = self._broker(), None
        former = list(self.wires.values())
        self.crash_at = ""
        said = sum(len(one.down) for one in former)
        self.start_broker()
        try:
            frozen.turn()
        except RefusedError:
            pass
        else:
            self.broken("S4: a broker whose store was taken over goes on")
        if said != sum(len(one.down) for one in former):
            self.broken("S4: a broker whose store was taken over spoke")
        for wire in former:
            wire.up.clear()
            wire.cut = True
            self.wires.pop(wire.peer, None)
        self.counts["takeover"] += 1

    def recreate(self) -> None:
        """The broker comes back over an empty volume."""
        self.end_broker()
        self._new_store()
        self.start_broker()
        self.counts["recreated"] += 1

    def _faults(self) -> None:
        chance, faults = self.chance, self.faults
        for wire in list(self.wires.values()):
            if chance.random() < faults.cut:
                self.close_wire(wire)
            elif chance.random() < faults.dark:
                wire.dark = wire.faulty = True
        for worker in self.workers:
            if chance.random() < faults.kill_worker:
                worker.kill()
                self.counts["kill_worker"] += 1
            elif chance.random() < faults.leave and worker.alive:
                worker.terminate()
            elif chance.random() < faults.freeze:
                worker.frozen_until = self.clock.mono + chance.uniform(0, 9)
        if self.broker is not None:
            roll = chance.random()
            if roll < faults.kill_broker:
                self.end_broker()
                self.counts["kill_broker"] += 1
            elif roll < faults.kill_broker + faults.takeover:
                self.takeover()
            elif roll < faults.kill_broker + faults.takeover + faults.recreate:
                self.recreate()
        if not self.crash_at:
            roll = chance.random()
            if roll < faults.crash_broker:
                self.crash_at = "broker."
            elif roll < faults.crash_broker + faults.crash_worker:
                self.crash_at = "worker."
        if chance.random() < faults.cancel:
            self.asked.append(messages.CancelJob(4, JOB))
        if chance.random() < faults.pause:
            self.clock.pass_(chance.uniform(0.0, 8.0))
        if chance.random() < faults.wall_jump:
            self.clock.wall_at += chance.uniform(-1e5, 1e5)

    # -- time goes on -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One round: faults by chance, then each process has its turn."""
        chance = self.chance
        self.clock.pass_(chance.random() * 0.8)
        if not self.calm:
            self._faults()
        if self.broker is None and (self.calm or chance.random() < 0.3):
            self.start_broker()
        for worker in self.workers:
            if not worker.alive and (self.calm or chance.random() < 0.3):
                worker.start()
            try:
                worker.turn()
            except Crash:
                worker.kill()
        self._deliver_late()
        try:
            if self.broker is not None:
                self.broker.turn()
        except Crash:
            self.end_broker()

    def _deliver_late(self) -> None:
        """What a closed connection still had comes out of its successor, once that one is in use."""
        for wire in self.wires.values():
            if wire.late is None:
                continue
            up, down = wire.late
            if not up + down or (up + down)[0][0] <= self.clock.mono:
                wire.up.extend(up)
                wire.down.extend(down)
                wire.late = None

    def play(self, rough: int = 28, most: int = 1000) -> FleetWorld:  # noqa: RET503 - ``broken`` raises
        """``rough`` steps with faults, then calm ones until all is handed over. Raises ``Broken``."""
        with small_world():
            try:
                for _ in range(rough):
                    self.step()
                self._calm_down()
                for _ in range(most):
                    if self._over():
                        return self._audited()
                    self.step()
            except HaulierError as error:
                raise Broken(f"HAULIER_SEED={self.seed}: {type(error).__name__}: {error}") from error
        self.broken(f"the job does not end: {len(self.ended)} of {self.lines} lines did")

    def _calm_down(self) -> None:
        """What lost a message is cut, as a real connection would be by then."""
        self.calm = True
        self.crash_at = ""
        for wire in [one for one in self.wires.values() if one.faulty]:
            self.close_wire(wire)
        for worker in self.workers:
            worker.frozen_until = 0.0

    def _over(self) -> bool:
        """The job has ended and no worker keeps anything of this store."""
        broker = self.broker
        if broker is None or JOB in broker.state.jobs:
            return False
        return not any(
            store == broker.state.store_id for worker in self.workers for _, store in worker.disk.rows.values()
        )

    def _audited(self) -> FleetWorld:
        """D4 at the end, from the store alone; and what must not have happened in this kind of schedule."""
        tables = self._broker().store.dump()  # type: ignore[attr-defined]
        status = tables["jobs"][0][11]
        found = sorted(row[1] for row in tables["results"])
        if found != list(range(self.lines)):
            self.broken(f"D4: {self.lines} lines, ended are {found}, the job is {status}")
        codes = {row[6] for row in tables["results"]} - {"", "worker_died"}
        allowed = {"cancelled": {"batch_cancelled"}, "expired": {"batch_expired"}}.get(status, set())
        if not codes <= allowed:
            self.broken(f"D4: a job that is {status} has lines that ended with {codes}")
        if self.faults.poison >= 0 and status == "completed" and not self.counts["set_aside"]:
            self.broken("D5: the line that kills its worker was not set aside")
        again = {line: count for line, count in self.runs.items() if count > 1}
        if self.faults.once and (again or self.counts["wasted"]):
            self.broken(f"D3: ran again though their worker lived: {again}")
        self.counts[f"job_{status}"] += 1
        return self
