"""A seeded world for the broker: its real turn and store, fake workers, a link that loses, kills at any point.

Everything random comes from one seed. A crash is an exception at a chosen point of the turn: before the commit (the
transaction rolls back), after it with nothing said, or between two sends. The store is SQLite in memory: what is
committed is what a restart finds. After every turn the broker's books are checked, after every restart what it acked.
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections import Counter, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlite_utils

from broker.effects import SendBatch
from broker.inputs import Came
from broker.schema import MIGRATIONS
from broker.server import Server, prepare
from broker.spool import Spool
from broker.store import Store
from common import limits, messages
from common.errors import HaulierError, RefusedError
from common.ids import new_id
from common.messages import HeldLine, LineRef, ModelInfo, Result
from common.metrics import Metrics

MODEL = ModelInfo("m", "f", 1000)
FOLDER = Path("/")
METRICS = Metrics()
HELD_A_PAGE = 3
CLIENT = b"client"


class Crash(Exception):
    """The broker's process ends here."""


class Broken(AssertionError):
    """A rule did not hold; the message has the seed."""


class MemorySpool(Spool):
    """Input files in a dict: it outlives the broker, as a disk does."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        self.files = files

    def append(self, job: str, offset: int, data: bytes) -> None:
        self.files.setdefault(job, bytearray())[offset : offset + len(data)] = data

    def seal(self, job: str) -> None:
        pass

    def drop(self, job: str) -> None:
        self.files.pop(job, None)

    def sweep(self, keep: Container[str]) -> None:
        for job in [job for job in self.files if job not in keep]:
            del self.files[job]

    def size(self, job: str) -> int:
        return len(self.files.get(job, b""))

    def read(self, job: str, offset: int, size: int) -> bytes:
        return bytes(self.files[job][offset : offset + size])


class SimClock:
    """Time that moves when it is told to; ``wall`` may jump."""

    def __init__(self) -> None:
        self.mono = 1000.0
        self.wall_at = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.mono

    def wall(self) -> float:
        return self.wall_at

    def pass_(self, seconds: float) -> None:
        self.mono += seconds
        self.wall_at += seconds


@dataclass(eq=False)
class Wire:
    """One connection: two queues in order, until it is cut."""

    peer: bytes
    link: FakeLink | None = None
    """The broker's end; another broker on the same store has other connections."""
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    cut: bool = False


class FakeLink:
    """What the broker's ``Link`` is to its server, over the world's wires."""

    busy = False

    def __init__(self, world: World) -> None:
        self.world = world

    def wait(self, seconds: float) -> None:
        pass

    def receive(self) -> Iterator[Any]:
        for one in [one for one in self.world.wires.values() if one.link is self]:
            for _ in range(self.world.chance.randint(0, len(one.up))):
                yield Came(one.peer, "", True, one.up.popleft())
        self.world.maybe_crash("before_commit")

    def send(self, peer: bytes, message: Any) -> bool:
        self.world.maybe_crash("between_sends")
        one = self.world.wires.get(peer)
        if one is None or one.cut or one.link is not self:
            return False
        if self.world.blocking and self.world.chance.random() < 0.01:
            return False
        one.down.append(message)
        if isinstance(message, messages.Ack):
            for verdict in message.verdicts:
                if verdict.verdict == "stored":
                    self.world.acked.add((verdict.ref.job, verdict.ref.index))
        return True

    def send_batch(self, batch: SendBatch) -> bool:
        lines = tuple(
            messages.BatchLine(one.ref, one.url, one.size, self.world.spool.read(one.ref.job, one.offset, one.size))
            for one in batch.lines
        )
        return self.send(batch.peer, messages.Batch(batch.fence, batch.assignment, lines))

    def forget(self, job: str) -> None:
        pass

    def send_parts(self, mono: float) -> list[bytes]:
        return []


class Worker:
    """A worker as the broker sees one: an outbox that lasts, running lines that do not."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.incarnation = 1
        self.login = 0
        self.outbox: dict[LineRef, tuple[str, Result]] = {}
        self.running: dict[LineRef, bytes] = {}
        self.store_id = ""
        self.wire: Wire | None = None
        self.fence: messages.Fence | None = None
        self.assignment = 0
        self.beat_at = 0.0
        self.heard_at = 0.0
        self.verdicts: list[messages.Verdict] = []
        self.gone = False

    def connect(self) -> None:
        self.cut()
        self.login += 1
        self.fence = None
        self.verdicts = []
        self.wire = self.world.open_wire()
        self.heard_at = self.world.clock.mono
        held = [HeldLine(ref, "running") for ref in self.running]
        held += [HeldLine(ref, "finished") for ref, (store, _) in self.outbox.items() if store == self.store_id]
        pages = [held[at : at + HELD_A_PAGE] for at in range(0, len(held), HELD_A_PAGE)] or [[]]
        for number, page in enumerate(pages):
            self.say(
                messages.Hello(
                    limits.SCHEMA_VERSION, self.name, self.incarnation, self.login, self.store_id if held else "",
                    (MODEL,), 4, 1000, tuple(page), number, number + 1 < len(pages),
                )
            )  # fmt: skip

    def cut(self) -> None:
        if self.wire is not None:
            self.world.drop_wire(self.wire)
        self.wire = self.fence = None

    def kill(self) -> None:
        """SIGKILL and a new process: what ran is lost, the outbox is not."""
        self.cut()
        self.running.clear()
        self.incarnation += 1
        self.login = 0

    def say(self, message: Any) -> None:
        if self.wire is not None and not self.wire.cut:
            self.wire.up.append(message)

    def step(self) -> None:
        """Hear one message, or log in again, or beat."""
        now = self.world.clock.mono
        if self.wire is None or self.wire.cut or now - self.heard_at > limits.LIVENESS_S:
            if self.world.broker is not None:
                self.connect()
            return
        if self.wire.down:
            self.heard_at = now
            self.hear(self.wire.down.popleft())
        if self.fence is not None and now - self.beat_at >= limits.BEAT_S:
            self.beat()

    def hear(self, message: Any) -> None:
        if isinstance(message, messages.Unknown | messages.Refused):
            self.cut()
            return
        if isinstance(message, messages.Welcome):
            self.verdicts += message.verdicts
            if not message.more:
                self.welcomed(message.fence)
            return
        if message.fence != self.fence:
            return
        match message:
            case messages.Batch():
                self.assignment = message.assignment
                for line in message.lines:
                    self.world.runs[line.ref.line] += 1
                    self.running[line.ref] = line.body
            case messages.Ack():
                for verdict in message.verdicts:
                    self.outbox.pop(verdict.ref, None)
            case messages.CancelLines():
                for ref in message.lines:
                    if self.running.pop(ref, None) is not None:
                        self.finish(ref, Result(ref, "cancelled", 0, 0, 0, 0, b""))

    def welcomed(self, fence: messages.Fence) -> None:
        self.store_id, self.fence, self.assignment = fence.store_id, fence, 0
        for verdict in self.verdicts:
            if verdict.verdict == "stored":
                self.outbox.pop(verdict.ref, None)
            elif verdict.verdict == "cancel":
                self.running.pop(verdict.ref, None)
        for store, result in self.outbox.values():
            if store == self.store_id:
                self.say(messages.Done(fence, (result,)))
        self.beat()

    def beat(self) -> None:
        assert self.fence is not None
        self.beat_at = self.world.clock.mono
        room = max(0, 4 - len(self.running))
        self.say(
            messages.WorkerBeat(
                self.fence, "ready", 1, 1, 4, room, 1000 * room, tuple(self.running), messages.RingReport(), (MODEL,),
                self.assignment,
            )
        )  # fmt: skip

    def work(self) -> None:
        """Finish one running line: into the outbox first, then said (D1)."""
        if any(ref.index == self.world.faults.poison for ref in self.running) and self.world.chance.random() < 0.3:
            self.kill()
            self.world.counts["poisoned"] += 1
        if self.running:
            ref = self.world.chance.choice(list(self.running))
            if ref.index == self.world.faults.poison:
                return
            prompt = json.loads(self.running.pop(ref))["prompt"]
            ok = not prompt.endswith("bad")
            body = json.dumps({"text" if ok else "error": prompt}).encode()
            self.finish(ref, Result(ref, "ok" if ok else "failed", 200 if ok else 400, 1, 1, len(body), body))

    def finish(self, ref: LineRef, result: Result) -> None:
        self.outbox[ref] = (self.store_id, result)
        if self.fence is not None:
            self.say(messages.Done(self.fence, (result,)))

    def leave(self) -> None:
        """SIGTERM: hand back what runs, say goodbye, come back later as a new run."""
        if self.fence is not None:
            self.say(messages.Bye(self.fence, "drain", tuple(self.running)))
            if self.wire is not None:  # said before the socket closes: it arrives
                self.world.lingering.append(self.wire)
                self.wire = None
        self.running.clear()
        self.fence = None
        self.incarnation += 1
        self.login = 0


@dataclass(frozen=True)
class Faults:
    """What may happen, as chances for each step of the world."""

    cut: float = 0.03
    kill_worker: float = 0.02
    leave: float = 0.01
    kill_broker: float = 0.03
    takeover: float = 0.005
    cancel: float = 0.0
    poison: int = -1
    """A line that kills its worker."""
    pause: float = 0.02
    wall_jump: float = 0.01


class World:
    """Broker, workers, one client and their disks."""

    def __init__(
        self, seed: int, faults: Faults, lines: int = 24, workers: int = 2, grace_s: float = 30.0,
        server: type[Server] = Server, blocking: bool = True,
    ) -> None:  # fmt: skip
        self.seed, self.faults, self.grace_s = seed, faults, grace_s
        self.chance = random.Random(seed)
        self.clock = SimClock()
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        for migration in MIGRATIONS:
            migration(self.connection)
        self.files: dict[str, bytearray] = {}
        self.spool = MemorySpool(self.files)
        self.wires: dict[bytes, Wire] = {}
        self.lingering: list[Wire] = []
        self.acked: set[tuple[str, int]] = set()
        self.runs: Counter[Any] = Counter()
        self.crash_at = ""
        self.blocking = blocking
        self.counts: Counter[str] = Counter()
        self._server = server
        self._wires_opened = 0
        self.broker: Server | None = None
        self.link: FakeLink | None = None
        self.workers = [Worker(self, f"w{number}") for number in range(workers)]
        self.start_broker()
        self.job = self._submit(lines)

    # -- pieces -------------------------------------------------------------------------------------------------

    def open_wire(self) -> Wire:
        self._wires_opened += 1
        one = Wire(b"wire%d" % self._wires_opened, self.link)
        self.wires[one.peer] = one
        return one

    def drop_wire(self, one: Wire) -> None:
        """Cut: what was on its way is lost, as far as chance has it."""
        one.cut = True
        for _ in range(self.chance.randint(0, len(one.up))):
            one.up.pop()
        if not one.up:
            self.wires.pop(one.peer, None)

    def start_broker(self) -> None:
        store = Store(sqlite_utils.Database(self.connection))
        clock: Any = self.clock
        state = prepare(store, self.spool, clock, self.grace_s, 0)
        link: Any = FakeLink(self)
        self.link = link
        if CLIENT in self.wires:
            self.wires[CLIENT].link = link
        self.broker = self._server(state, store, self.spool, link, clock, FOLDER, METRICS)
        self.check_store()

    def _submit(self, lines: int) -> str:
        job = new_id(self.chance)
        data = b"".join(
            json.dumps(
                {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions",
                 "body": {"model": "m", "prompt": f"p{number}{'bad' if number % 7 == 3 else ''}"}}
            ).encode() + b"\n"
            for number in range(lines)
        )  # fmt: skip
        digest = hashlib.sha256(data).hexdigest()
        self.wires[CLIENT] = Wire(CLIENT, self.link)
        for message in (
            messages.Submit(1, job, "sim", len(data), digest, False, 0, 0, "m"), messages.Chunk(2, job, 0, data),
            messages.Seal(3, job),
        ):  # fmt: skip
            self.wires[CLIENT].up.append(message)
        while self.wires[CLIENT].up:
            self.turn()
        return job

    def maybe_crash(self, point: str) -> None:
        if self.crash_at == point and self.chance.random() < 0.5:
            self.crash_at = ""
            self.counts[f"crash_{point}"] += 1
            raise Crash(point)

    # -- steps --------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One turn of the broker, which may be its last."""
        if self.broker is None:
            return
        try:
            self.broker.turn()
            self.broker.state.check()
        except Crash:
            self.end_broker()
        except HaulierError as error:
            raise Broken(f"seed {self.seed}: {error}") from error

    def end_broker(self) -> None:
        """The process is gone, and every connection with it."""
        self.broker = None
        self.crash_at = ""
        for one in list(self.wires.values()):
            if one.peer != CLIENT:
                one.cut = True
                self.wires.pop(one.peer)

    def takeover(self) -> None:
        """The broker hangs; another one starts on the same store; then the first wakes up and must stop unsaid."""
        frozen, self.broker = self.broker, None
        assert frozen is not None
        self.crash_at = ""
        former = [one for one in self.wires.values() if one.peer != CLIENT]
        self.start_broker()
        self.counts["takeover"] += 1
        before = {peer: len(one.down) for peer, one in self.wires.items()}
        try:
            frozen.turn()
        except RefusedError:
            pass
        else:
            raise Broken(f"seed {self.seed}: a broker whose store was taken over goes on")
        if before != {peer: len(one.down) for peer, one in self.wires.items()}:
            raise Broken(f"seed {self.seed}: a broker whose store was taken over spoke")
        for one in former:
            one.cut = True
            self.wires.pop(one.peer, None)

    def check_store(self) -> None:
        """Whatever was acked is there (D1)."""
        assert self.broker is not None
        one = self.broker.store.connection.execute
        found = set(one("SELECT j.id, r.idx FROM results r JOIN jobs j ON j.number = r.job").fetchall())
        if lost := self.acked - found:
            raise Broken(f"seed {self.seed}: acked and not in the store: {sorted(lost)[:5]}")

    def step(self, calm: bool) -> None:
        """One round: faults by chance, then each moves a little."""
        chance, faults = self.chance, self.faults
        self.clock.pass_(chance.uniform(0.0, 0.5))
        if not calm:
            self._faults(chance, faults)
        if self.broker is None and (calm or chance.random() < 0.3):
            self.start_broker()
        for worker in self.workers:
            for _ in range(chance.randint(0, 3)):
                worker.step()
            if chance.random() < 0.7:
                worker.work()
        self.turn()

    def _faults(self, chance: random.Random, faults: Faults) -> None:
        for worker in self.workers:
            if chance.random() < faults.cut:
                worker.cut()
            if chance.random() < faults.kill_worker:
                worker.kill()
                self.counts["kill_worker"] += 1
            if chance.random() < faults.leave:
                worker.leave()
        if self.broker is not None and chance.random() < faults.kill_broker:
            self.crash_at = chance.choice(("before_commit", "between_sends", "now"))
            if self.crash_at == "now":
                self.end_broker()
        if self.broker is not None and chance.random() < faults.takeover:
            self.takeover()
        if chance.random() < faults.cancel:
            self.wires[CLIENT].up.append(messages.CancelJob(4, self.job))
        if chance.random() < faults.pause:
            self.clock.pass_(chance.uniform(0.0, 8.0))
        if chance.random() < faults.wall_jump:
            self.clock.wall_at += chance.uniform(-1e5, 1e5)

    # -- a whole schedule ---------------------------------------------------------------------------------------

    def play(self, rough: int = 60, most: int = 3000) -> World:
        """``rough`` steps with faults, then calm ones until the job has ended. Raises ``Broken``."""
        for _ in range(rough):
            self.step(calm=False)
        for _ in range(most):
            if self.broker is not None and self.job not in self.broker.state.jobs:
                return self.audited()
            self.step(calm=True)
        raise Broken(f"seed {self.seed}: the job does not end")

    def audited(self) -> World:
        """D4 at the end, from the store alone."""
        self.check_store()
        one = self.connection.execute
        status, good = one("SELECT status, good FROM jobs WHERE id=?", (self.job,)).fetchone()
        rows = one(
            "SELECT r.idx, r.kind, r.body, r.code FROM results r JOIN jobs j ON j.number=r.job WHERE j.id=?",
            (self.job,),
        ).fetchall()
        if sorted(row[0] for row in rows) != list(range(good)):
            raise Broken(f"seed {self.seed}: {good} lines, ended are {sorted(row[0] for row in rows)}")
        for idx, kind, body, code in rows:
            bad = idx % 7 == 3
            if code == "worker_died" and idx == self.faults.poison:
                self.counts["set_aside"] += 1
            elif code:
                if status != "cancelled" or code != "batch_cancelled":
                    raise Broken(f"seed {self.seed}: line {idx} ended with {code} in a job that is {status}")
            elif json.loads(body) != {"error" if bad else "text": f"p{idx}{'bad' if bad else ''}"} or kind != int(bad):
                raise Broken(f"seed {self.seed}: line {idx} has another line's answer: {body!r}")
        return self
