"""shell: the scheduler of the virtual device: which queue's next operation runs now, by temperament and seed.

An operation runs when it heads its queue and, if it waits for a mark, that mark is done: every order it can produce is
one that the recorded events allow. Knows nothing of tensors: operations are closures. One thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from worker.engine.device import DeviceError, Queue, QueueName


class Temperament(Enum):
    """How the scheduler picks. All are legal: a correct program gives the same bytes under each."""

    EAGER = "eager"
    """Everything at once, in order; no queues, no shadows: the plain CPU."""
    EARLY = "early"
    """Copies as early as legal, compute as late as possible: what overwrites too soon is found."""
    LATE = "late"
    """Copies as late as legal, compute at once: what reads too soon is found."""
    RANDOM = "random"
    """Any legal order, by seed."""


class Mark:
    """What one recording stands for: done or not, on which lane, its clock, and whether the host saw it done."""

    __slots__ = ("clock", "done", "lane", "seen")

    def __init__(self, lane: Lane, done: bool) -> None:
        self.lane = lane
        self.done = done
        self.seen = False
        self.clock: tuple[int, ...] = ()


class RawEvent:
    """A pooled event: the mark of its newest recording."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark: Mark | None = None


@dataclass(slots=True, eq=False)
class Operation:
    """One entry of a queue: ``run`` does it; an entry that waits has ``until`` instead. A compute entry that lags has
    ``show``: it makes its writes visible ahead of time and returns what hides them again."""

    label: str
    run: Callable[[], None] | None
    until: Mark | None = None
    show: Callable[[], Callable[[], None]] | None = None


class Lane:
    """One queue: operations in order. ``held`` is a test's gate; ``broken`` a test's dead copy engine."""

    __slots__ = ("broken", "held", "index", "operations", "queue")

    def __init__(self, queue: Queue, index: int) -> None:
        self.queue = queue
        self.index = index
        self.operations: deque[Operation] = deque()
        self.held = False
        self.broken: str | None = None

    def ready(self) -> bool:
        """Whether the head may run now."""
        if not self.operations or self.held:
            return False
        until = self.operations[0].until
        return until is None or until.done

    def alive(self) -> None:
        """Raise ``DeviceError`` if the queue is broken."""
        if self.broken is not None:
            raise DeviceError(f"{self.queue.name.value}: {self.broken}")

    def run_head(self) -> None:
        """Do the head and remove it."""
        self.alive()
        operation = self.operations.popleft()
        if operation.run is not None:
            operation.run()


class Scheduler:
    """Lanes and the choice among them."""

    def __init__(self, queues: Sequence[Queue], temperament: Temperament, seed: int) -> None:
        self.lanes = {queue.handle: Lane(queue, index) for index, queue in enumerate(queues)}
        self.temperament = temperament
        self._chance = Random(seed)
        self._all = list(self.lanes.values())
        self._compute = [lane for lane in self._all if lane.queue.name is QueueName.COMPUTE]
        self._others = [lane for lane in self._all if lane.queue.name is not QueueName.COMPUTE]

    @property
    def pending(self) -> int:
        """Operations that have not run."""
        return sum(len(lane.operations) for lane in self._all)

    def put(self, lane: Lane, operation: Operation) -> None:
        """A new operation behind the others of its queue; then what the temperament lets run."""
        lane.operations.append(operation)
        self.progress()

    def progress(self) -> None:
        """Run what the temperament lets run without being asked."""
        if self.temperament is Temperament.RANDOM:
            for _ in range(self._chance.randrange(4)):
                if (lane := self._pick(self._all)) is not None:
                    lane.run_head()
            return
        eligible = self._others if self.temperament is Temperament.EARLY else self._compute
        while (lane := self._pick(eligible)) is not None:
            lane.run_head()

    def drain(self) -> None:
        """Run everything that can run, in this temperament's order."""
        while (lane := self._pick(self._all)) is not None:
            lane.run_head()

    def step(self, lane: Lane) -> bool:
        """Run one operation that brings ``lane`` forward, there or on a queue it waits for; False if none can run."""
        while True:
            if lane.held or not lane.operations:
                return False
            until = lane.operations[0].until
            if until is None or until.done:
                lane.run_head()
                return True
            lane = until.lane

    def force(self, lane: Lane) -> None:
        """Run everything on ``lane``, and of other queues what it waits for; ``DeviceError`` if a gate is shut."""
        while lane.operations:
            if not self.step(lane):
                raise DeviceError(f"{lane.queue.name.value} cannot proceed: a queue it needs is held")

    def settle(self, lane: Lane) -> None:
        """Make true all that ``lane`` waits for, and run no more of ``lane`` itself than that needs."""
        for operation in list(lane.operations):
            while operation.until is not None and not operation.until.done:
                if not self.step(operation.until.lane):
                    raise DeviceError(f"{lane.queue.name.value} cannot proceed: a queue it needs is held")

    def _pick(self, lanes: Sequence[Lane]) -> Lane | None:
        ready = [lane for lane in lanes if lane.ready()]
        if not ready:
            return None
        return self._chance.choice(ready) if self.temperament is Temperament.RANDOM else ready[0]
