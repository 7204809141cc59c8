"""shell: a small staged program for race checks: the same on the virtual device and on a GPU, in tests and selfcheck.

Its model is arithmetic over whole numbers in which every row counts, so that a stale or foreign row changes the result:
a step stages each layer's history through the transport, appends a row in the slot, attends, writes the row back. The
same arithmetic over plain resident arrays says what must come out. ``omit`` leaves ordering edges out: the control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import torch

from common.errors import InvariantError
from worker.engine.device import Device, QueueName, Work
from worker.engine.leases import Lease
from worker.engine.page_leases import ContextSet, PageLeases
from worker.engine.transport import Edge, Transport

CONTEXTS, ROWS, WIDTH, FIRST_ROWS = 2, 6, 3, 2
PRIME = 1_000_003
EVENTS_COUNT = 64
"""Device events that a program needs at most; a pool of its own size makes thousands of runs cheap."""


@dataclass(frozen=True)
class Shape:
    """How the program stages; ``retained``: the second half of each history is materialised from device pages."""

    layers: int
    slots: int
    steps: int
    retained: bool = False


DEEP = Shape(layers=3, slots=2, steps=2)
"""More layers than slots: each stage waits for the readers of its slot."""
WIDE = Shape(layers=1, slots=2, steps=3)
"""More slots than layers: only the layer's own edges order one step after the other."""
RETAINED = Shape(layers=3, slots=2, steps=2, retained=True)
WIDE_RETAINED = Shape(layers=1, slots=2, steps=3, retained=True)
SHAPES = {"deep": DEEP, "wide": WIDE, "retained": RETAINED, "wide retained": WIDE_RETAINED}

EDGES = {
    Edge.COPY_BEFORE_ATTENTION: DEEP,
    Edge.MATERIALISE_BEFORE_ATTENTION: RETAINED,
    Edge.ATTENTION_BEFORE_REUSE: DEEP,
    Edge.WRITE_BACK_BEFORE_REUSE: DEEP,
    Edge.ATTENTION_BEFORE_WRITE_BACK: DEEP,
    Edge.WRITE_BACK_BEFORE_NEXT_COPY: WIDE,
    Edge.ATTENTION_BEFORE_MATERIALISE: WIDE_RETAINED,
}
"""Each edge with the shape in which no other edge implies it."""
IMPLIED_BY = {Edge.ATTENTION_BEFORE_REUSE: {Edge.WRITE_BACK_BEFORE_REUSE}}
"""A write-back comes after its attention, so waiting for it waits for both: apart, the attention edge shows only with
the other left out too (it stays, since a stage need not write back on the queue that waits)."""
HELD = {
    Edge.COPY_BEFORE_ATTENTION: QueueName.H2D,
    Edge.MATERIALISE_BEFORE_ATTENTION: QueueName.MATERIALISE,
    Edge.ATTENTION_BEFORE_REUSE: QueueName.COMPUTE,
    Edge.WRITE_BACK_BEFORE_REUSE: QueueName.D2H,
    Edge.ATTENTION_BEFORE_WRITE_BACK: QueueName.COMPUTE,
    Edge.WRITE_BACK_BEFORE_NEXT_COPY: QueueName.D2H,
    Edge.ATTENTION_BEFORE_MATERIALISE: QueueName.COMPUTE,
}
"""The queue to hold on a real device, so that what must come after its work runs ahead of it."""


def omitted(edge: Edge) -> set[Edge]:
    """What to leave out to see ``edge`` missing."""
    return {edge} | IMPLIED_BY.get(edge, set())


def mix(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A number for each column that changes with every row and with the order of rows: (contexts, rows, width) and
    (rows, 1) to (contexts, width)."""
    return (rows * weights).sum(1) % PRIME


def _first_rows(shape: Shape) -> torch.Tensor:
    """Histories of ``FIRST_ROWS`` rows in pools of ``ROWS``, no two rows alike."""
    pool = torch.zeros((shape.layers, CONTEXTS, ROWS, WIDTH), dtype=torch.int64)
    count = shape.layers * CONTEXTS * FIRST_ROWS * WIDTH
    pool[:, :, :FIRST_ROWS] = torch.arange(count).reshape(shape.layers, CONTEXTS, FIRST_ROWS, WIDTH)
    return pool


def _weights(length: int, layer: int) -> torch.Tensor:
    return torch.arange(1, length + 1, dtype=torch.int64).unsqueeze(1) * 31 + layer


@cache
def resident(shape: Shape) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """What must come out: each step's result, and every host row at the end. Plain arithmetic on the CPU."""
    pool, results = _first_rows(shape), []
    for step in range(shape.steps):
        hidden = torch.full((CONTEXTS, WIDTH), step + 1, dtype=torch.int64)
        length = FIRST_ROWS + step
        for layer in range(shape.layers):
            pool[layer, :, length] = hidden * (layer + 2) % PRIME
            hidden = (mix(pool[layer, :, : length + 1], _weights(length + 1, layer)) + hidden) % PRIME
        results.append(hidden)
    return tuple(results), pool


class Program:
    """One run of ``shape.steps`` steps over ``CONTEXTS`` contexts. One thread, which owns the device."""

    def __init__(self, device: Device, shape: Shape, omit: Collection[Edge] = ()) -> None:
        self.device, self.shape = device, shape
        self.pages = PageLeases(CONTEXTS)
        self.transport = Transport(device, shape.slots, self.pages, omit=omit)
        first = _first_rows(shape)
        self.host = device.allocate_host(first.shape, torch.int64)
        self.host.copy_(first)
        self.kept = device.allocate_device(first.shape, torch.int64)
        self.kept.copy_(first)
        self.slots = device.allocate_device((shape.slots, CONTEXTS, ROWS, WIDTH), torch.int64)
        self.weights = {
            (step, layer): _weights(FIRST_ROWS + step + 1, layer).to(device.torch_device)
            for step in range(shape.steps)
            for layer in range(shape.layers)
        }
        self.contexts = ContextSet(tuple(range(CONTEXTS)), tuple(self.pages.current(one) for one in range(CONTEXTS)))
        self.ahead: deque[Lease] = deque()
        self.results: list[torch.Tensor] = []
        self.order = [(step, layer) for step in range(shape.steps) for layer in range(shape.layers)]

    def run(self) -> None:
        """Submit every step; what came out of each is kept for ``equal``."""
        for step in range(self.shape.steps):
            hidden = torch.full((CONTEXTS, WIDTH), step + 1, dtype=torch.int64, device=self.device.torch_device)
            self.transport.retire(float(step))
            for layer in range(self.shape.layers):
                now = step * self.shape.layers + layer
                self._stage_ahead(now)
                hidden = self._layer(self.ahead.popleft(), step, layer, hidden)
                self._stage_ahead(now + 1)
            self.results.append(hidden)

    def equal(self) -> bool:
        """Whether each step's result, and the host rows written back, are what the resident arithmetic gives. Ask once
        everything is over."""
        wanted, pool = resident(self.shape)
        same = all(torch.equal(hidden.cpu(), one) for hidden, one in zip(self.results, wanted, strict=True))
        return same and torch.equal(self.host, pool)

    def finish(self, polls_max_count: int = 1_000_000) -> None:
        """Everything comes over and the books are empty, or ``InvariantError``."""
        for _ in range(polls_max_count):
            if not self.transport.book.live:
                break
            self.transport.retire(float(self.shape.steps))
        self.transport.check()
        held = len(self.transport.book.live), self.pages.holds, self.device.events_held
        if any(held):
            raise InvariantError(f"the program ends with {held[0]} leases, {held[1]} page holds, {held[2]} events held")

    def _stage_ahead(self, now: int) -> None:
        """Stage as far ahead of position ``now`` in the order of layers as the transport allows."""
        while now + len(self.ahead) < len(self.order):
            step, layer = self.order[now + len(self.ahead)]
            if not self.transport.may_stage(layer):
                return
            self.ahead.append(self._stage(step, layer))

    def _stage(self, step: int, layer: int) -> Lease:
        slot, length = self.slots[self.transport.next_slot], FIRST_ROWS + step
        split = length // 2 if self.shape.retained else length
        copies = [
            (slot[context, :split], self.host[layer, context, :split], self.contexts.owners[context])
            for context in range(CONTEXTS)
        ]
        if not self.shape.retained:
            return self.transport.stage(step, layer, self.contexts, copies)
        into, source = slot[:, split:length], self.kept[layer, :, split:length]
        work = Work(lambda: into.copy_(source), reads=(source,), writes=(into,), label="materialise")
        return self.transport.stage(step, layer, self.contexts, copies, work)

    def _layer(self, lease: Lease, step: int, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        device, transport, length = self.device, self.transport, FIRST_ROWS + step
        compute = device.queue(QueueName.COMPUTE)
        slot, fresh, kept = self.slots[lease.slot], hidden * (layer + 2) % PRIME, self.kept[layer, :, length]
        changed, whole, weights = slot[:, length], slot[:, : length + 1], self.weights[step, layer]
        transport.before_attention(lease)

        def append() -> None:
            changed.copy_(fresh)
            kept.copy_(fresh)

        device.launch(compute, append, writes=(changed, kept), label=f"append {step} {layer}")
        out = device.launch(compute, lambda: mix(whole, weights), reads=(whole,), label=f"attend {step} {layer}")
        if out is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        attention = transport.attended(lease)
        rows = device.host_rows(self.host[layer, :, length])
        work = Work(lambda: rows.copy_(changed), reads=(changed,), writes=(rows,))
        transport.write_back(lease, self.contexts, length + 1, work)
        transport.seal(lease, length + 1, attention)
        return (out + hidden) % PRIME
