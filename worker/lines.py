"""rules: what this worker holds, line by line, and what it could still take (credit). Knows no message and no time.

A line is received (in parts, if long), tokenized, put in the ring, run, ended, made durable, and forgotten when the
broker has it. Each has exactly one result, whoever asks for its end first (D4's part of a worker).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from common import limits
from common.errors import InvariantError
from common.messages import BatchLine, HeldLine, LineRef
from worker.inputs import Snapshot
from worker.structures import Prepared, Request, TokenizeJob

TOKEN_BYTES = 4


class Stage(IntEnum):
    """How far a line has come; it only moves on."""

    RECEIVING = 0
    TOKENIZING = 1
    READY = 2
    IN_RING = 3
    RUNNING = 4
    ENDED = 5
    DURABLE = 6


_RECEIVING, _TOKENIZING, _READY, _IN_RING, _RUNNING, _ENDED, _DURABLE = Stage
"""For the books, which are kept several times a line: an enumeration's members are slow to look up."""


class Wanted(IntEnum):
    """What is to become of a line's result."""

    DELIVER = 0
    HAND_BACK = 1
    """The worker leaves: a line that was only stopped for that is given back, not answered."""
    DROP = 2
    """The broker has a result of this line already."""


@dataclass(slots=True)
class Line:
    """One held line. ``size`` is the body's length as it came, then the ids' bytes, then the result's length."""

    ref: LineRef
    store_id: str
    stage: Stage
    size: int
    wanted: Wanted = Wanted.DELIVER
    stopping: bool = False
    request: Request | None = None
    url: str = ""
    parts: bytearray | None = None


class Lines:
    """The books of held lines: one entry a ref, counted by stage."""

    def __init__(self, rows: Iterable[tuple[LineRef, str, int]] = ()) -> None:
        """``rows`` are the outbox's: ref, store id, bytes of the body."""
        self._lines: dict[LineRef, Line] = {}
        self._counts = [0] * len(Stage)
        self._ready: deque[Prepared] = deque()
        self._running: dict[LineRef, None] = {}
        self._unpublished_bytes = 0
        self._durable_bytes = 0
        for ref, store_id, size in rows:
            self._add(Line(ref, store_id, Stage.DURABLE, size))

    # -- the way down -------------------------------------------------------------------------------------------

    def receive(self, line: BatchLine, store_id: str) -> TokenizeJob | None:
        """Take a line of an assignment: the tokenizer's job if its body is whole."""
        ref, url, total, body = line
        if total == len(body):
            self._add(Line(ref, store_id, _TOKENIZING, total, url=url))
            return TokenizeJob(ref, url, body)
        self._add(Line(ref, store_id, _RECEIVING, total, url=url, parts=bytearray(body)))
        return None

    def receive_part(self, ref: LineRef, offset: int, data: bytes) -> TokenizeJob | bool:
        """The next part of a long body: the tokenizer's job when it was the last; else whether the part fits."""
        line = self._lines.get(ref)
        if line is None or line.stage != Stage.RECEIVING or line.parts is None:
            return False
        if offset != len(line.parts) or not data or offset + len(data) > line.size:
            return False
        line.parts += data
        if len(line.parts) < line.size:
            return True
        job = TokenizeJob(ref, line.url, bytes(line.parts))
        line.parts = None
        self._move(line, Stage.TOKENIZING)
        return job

    def tokenized(self, prepared: Prepared) -> bool:
        """A line is ready for the ring; false if it ended meanwhile."""
        line = self._lines.get(prepared.request.ref)
        if line is None or line.stage is not _TOKENIZING:
            return False
        line.request = prepared.request
        self._move(line, _READY, len(prepared.token_ids) * TOKEN_BYTES)
        self._ready.append(prepared)
        return True

    def next_batches(self, most_bytes: int) -> list[list[Prepared]]:
        """Lines for ring entries, oldest first: in each as many as fit into ``most_bytes``, one at least; not more
        entries than one doorbell should wait for."""
        batches: list[list[Prepared]] = []
        total = 0
        for prepared in self._ready:
            size = len(prepared.token_ids) * TOKEN_BYTES
            if not batches or total + size > most_bytes or len(batches[-1]) >= limits.TOKENIZE_MAX_LINES:
                if len(batches) == limits.RING_BURST_MAX_COUNT:
                    break
                batches.append([])
                total = 0
            batches[-1].append(prepared)
            total += size
        return batches

    def published(self, refs: Iterable[LineRef]) -> None:
        """The ring took these: the oldest ready ones, in order."""
        for ref in refs:
            if not self._ready or self._ready[0].request.ref != ref:
                raise InvariantError(f"line {ref.line} was published out of turn")
            self._ready.popleft()
            self._move(self._lines[ref], _IN_RING)

    def admitted(self, refs: Iterable[LineRef]) -> tuple[LineRef, ...]:
        """The engine runs these; those that are news."""
        news = []
        for ref in refs:
            line = self._lines.get(ref)
            if line is not None and line.stage is _IN_RING:
                self._move(line, _RUNNING)
                news.append(ref)
        return tuple(news)

    # -- the way back -------------------------------------------------------------------------------------------

    def ended(self, ref: LineRef, size: int) -> Line | None:
        """A result of ``size`` bytes: the line as it was, or None if it has a result already or is not held.

        The caller looks at ``wanted`` and forgets or stores the line.
        """
        line = self._lines.get(ref)
        if line is None or line.stage >= _ENDED:
            return None
        self._leave_ready(line)
        self._move(line, _ENDED, size)
        return line

    def stored(self, ref: LineRef) -> Line:
        """The result is durable. Raises ``InvariantError`` if there was none to store."""
        line = self._lines.get(ref)
        if line is None or line.stage is not _ENDED:
            raise InvariantError(f"line {ref.line} was stored without having ended")
        self._move(line, _DURABLE)
        return line

    def owe(self, ref: LineRef, store_id: str) -> None:
        """A line this worker does not hold is to be answered all the same: its (empty) result is about to be stored."""
        self._add(Line(ref, store_id, Stage.ENDED, 0))

    def forget(self, ref: LineRef) -> Line:
        """Nothing is left to do for this line."""
        line = self._lines.pop(ref)
        self._leave_ready(line)
        self._leave(line)
        return line

    def get(self, ref: LineRef) -> Line | None:
        """The held line."""
        return self._lines.get(ref)

    # -- what is held -------------------------------------------------------------------------------------------

    def held(self, store_id: str) -> list[HeldLine]:
        """What a HELLO to this store lists: everything whole that would be answered."""
        return [
            HeldLine(line.ref, "finished" if line.stage == Stage.DURABLE else "running")
            for line in self._lines.values()
            if line.store_id == store_id and line.stage > Stage.RECEIVING and line.wanted == Wanted.DELIVER
        ]

    def durable(self, store_id: str) -> list[Line]:
        """This store's results in the outbox, oldest first."""
        return [line for line in self._lines.values() if line.stage == Stage.DURABLE and line.store_id == store_id]

    def before(self, stage: Stage) -> list[Line]:
        """Lines that have not come to ``stage``."""
        return [line for line in self._lines.values() if line.stage < stage]

    def running(self, most: int) -> tuple[LineRef, ...]:
        """At most ``most`` lines the engine has admitted."""
        return tuple(islice(self._running, most))

    def stores(self) -> dict[str, int]:
        """Store ids with the number of lines held of each."""
        found: dict[str, int] = {}
        for line in self._lines.values():
            found[line.store_id] = found.get(line.store_id, 0) + 1
        return found

    @property
    def unfinished(self) -> int:
        """Lines without a durable result."""
        return len(self._lines) - self._counts[_DURABLE]

    @property
    def kept(self) -> int:
        """Results in the outbox."""
        return self._counts[Stage.DURABLE]

    @property
    def in_engine(self) -> int:
        """Lines between the ring and their result."""
        return self._counts[Stage.IN_RING] + self._counts[Stage.RUNNING]

    @property
    def waiting_for_ring(self) -> int:
        """Lines tokenized and not in the ring."""
        return self._counts[Stage.READY]

    def credit(self, concurrency: int, snapshot: Snapshot) -> tuple[int, int]:
        """Lines and ring bytes this worker can still take: ``(0, 0)`` when the ring or the outbox is full."""
        full = self._counts[Stage.DURABLE] >= limits.OUTBOX_MAX_LINES or self._durable_bytes >= limits.OUTBOX_MAX_BYTES
        unpublished = self._counts[Stage.RECEIVING] + self._counts[Stage.TOKENIZING] + self._counts[Stage.READY]
        lines = min(target(concurrency) - self.unfinished, snapshot.free_entries - unpublished)
        size = snapshot.free_bytes - self._unpublished_bytes
        return (0, 0) if full or lines <= 0 or size <= 0 else (lines, size)

    def check(self) -> None:
        """Raise ``InvariantError`` unless the counts are those of the lines."""
        counts = [0] * len(Stage)
        unpublished = durable = 0
        for line in self._lines.values():
            counts[line.stage] += 1
            unpublished += line.size if line.stage <= Stage.READY else 0
            durable += line.size if line.stage == Stage.DURABLE else 0
        ready = {prepared.request.ref for prepared in self._ready}
        expected = {line.ref for line in self._lines.values() if line.stage == Stage.READY}
        running = [line.ref for line in self._lines.values() if line.stage == Stage.RUNNING]
        if set(running) != set(self._running):
            raise InvariantError(f"{len(running)} lines run, {len(self._running)} booked")
        if counts != self._counts or ready != expected or len(ready) != len(self._ready):
            raise InvariantError(f"lines held {counts}, booked {self._counts}, ready {len(ready)}")
        if (unpublished, durable) != (self._unpublished_bytes, self._durable_bytes):
            booked = (self._unpublished_bytes, self._durable_bytes)
            raise InvariantError(f"bytes unpublished and durable: {unpublished} and {durable} held, {booked} booked")

    # -- books --------------------------------------------------------------------------------------------------

    def _add(self, line: Line) -> None:
        if line.ref in self._lines:
            raise InvariantError(f"line {line.ref.line} is held already")
        self._lines[line.ref] = line
        self._enter(line)

    def _move(self, line: Line, stage: Stage, size: int | None = None) -> None:
        if stage <= line.stage:
            raise InvariantError(f"line {line.ref.line} cannot go from {line.stage.name} back to {stage.name}")
        self._leave(line)
        line.stage = stage
        if size is not None:
            line.size = size
        self._enter(line)

    def _enter(self, line: Line) -> None:
        stage = line.stage
        self._counts[stage] += 1
        if stage <= _READY:
            self._unpublished_bytes += line.size
        elif stage == _DURABLE:
            self._durable_bytes += line.size
        elif stage == _RUNNING:
            self._running[line.ref] = None

    def _leave(self, line: Line) -> None:
        stage = line.stage
        self._counts[stage] -= 1
        if stage <= _READY:
            self._unpublished_bytes -= line.size
        elif stage == _DURABLE:
            self._durable_bytes -= line.size
        elif stage == _RUNNING:
            del self._running[line.ref]

    def _leave_ready(self, line: Line) -> None:
        if line.stage is _READY:
            self._ready = deque(one for one in self._ready if one.request.ref != line.ref)


def target(concurrency: int) -> int:
    """Lines a worker wants to hold unfinished: what its engine runs, and a little more to hide the way here."""
    return concurrency + max(limits.PREFETCH_MIN_LINES, concurrency // 4)
