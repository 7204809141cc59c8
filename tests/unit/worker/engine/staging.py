"""values: a small staged program for race tests, the same for the virtual device and for a GPU.

Its model is arithmetic over whole numbers in which every row counts, so that a stale or foreign row changes the result:
a step stages each layer's history through the transport, appends a row in the slot, attends, writes the row back. The
same arithmetic over plain resident arrays says what must come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from worker.engine.device import Device, QueueName, Work
from worker.engine.leases import Lease
from worker.engine.page_leases import ContextSet, PageLeases
from worker.engine.transport import Edge, Transport

CONTEXTS, ROWS, WIDTH, STEPS = 2, 6, 3, 3
PRIME = 1_000_003


@dataclass(frozen=True)
class Shape:
    """How the program stages; ``retained``: the second half of each history is materialised from device pages."""

    layers: int
    slots: int
    retained: bool = False


DEEP = Shape(layers=3, slots=2)
"""More layers than slots: each stage waits for the readers of its slot."""
WIDE = Shape(layers=1, slots=2)
"""More slots than layers: only the layer's own edges order one step after the other."""
RETAINED = Shape(layers=3, slots=2, retained=True)
WIDE_RETAINED = Shape(layers=1, slots=2, retained=True)
SHAPES = {"deep": DEEP, "wide": WIDE, "retained": RETAINED, "wide retained": WIDE_RETAINED}


def mix(rows: torch.Tensor, salt: int) -> torch.Tensor:
    """A number for each column that changes with every row and with the order of rows; (rows, width) to (width,)."""
    weights = torch.arange(1, rows.shape[0] + 1, dtype=torch.int64, device=rows.device).unsqueeze(1)
    return (rows * (weights * 31 + salt)).sum(0) % PRIME


class Program:
    """One run over ``STEPS`` steps; each context has a history of 2 rows at first."""

    def __init__(self, device: Device, shape: Shape, omit: Collection[Edge] = ()) -> None:
        self.device, self.shape = device, shape
        self.transport = Transport(device, shape.slots, PageLeases(CONTEXTS), omit=omit)
        size = (shape.layers, CONTEXTS, ROWS, WIDTH)
        self.host = device.allocate_host(size, torch.int64)
        self.host[:, :, :2] = torch.arange(shape.layers * CONTEXTS * 2 * WIDTH).reshape(
            shape.layers, CONTEXTS, 2, WIDTH
        )
        self.resident = self.host.clone()
        self.kept = device.allocate_device(size, torch.int64)
        self.kept.copy_(self.host)
        self.slots = device.allocate_device((shape.slots, CONTEXTS, ROWS, WIDTH), torch.int64)
        pages = self.transport.pages
        assert pages is not None
        self.contexts = ContextSet(tuple(range(CONTEXTS)), tuple(pages.current(index) for index in range(CONTEXTS)))
        self.ahead: deque[Lease] = deque()
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.order = [(step, layer) for step in range(STEPS) for layer in range(shape.layers)]

    def run(self) -> None:
        """Submit every step; what came out of each is kept for ``equal``."""
        for step in range(STEPS):
            hidden = torch.full((CONTEXTS, WIDTH), step + 1, dtype=torch.int64, device=self.device.torch_device)
            wanted = torch.full((CONTEXTS, WIDTH), step + 1, dtype=torch.int64)
            self.transport.retire(float(step))
            for layer in range(self.shape.layers):
                now = step * self.shape.layers + layer
                self.stage_ahead(now)
                hidden = self.layer(self.ahead.popleft(), step, layer, hidden)
                self.stage_ahead(now + 1)
                wanted = self.resident_layer(step, layer, wanted)
            self.results.append((hidden, wanted))

    def equal(self) -> bool:
        """Whether each step's result, and the host rows written back, are what the resident arithmetic gives. Ask once
        everything is over."""
        same = all(torch.equal(hidden.cpu(), wanted) for hidden, wanted in self.results)
        return same and torch.equal(self.host, self.resident)

    def finish(self) -> None:
        """Everything comes over and the books are empty."""
        while self.transport.book.live:
            self.transport.retire(float(STEPS))
        self.transport.check()
        assert self.transport.pages is not None
        assert self.transport.pages.holds == 0
        assert self.device.events_held == 0

    def stage_ahead(self, now: int) -> None:
        """Stage as far ahead of position ``now`` in the order of layers as the transport allows."""
        while now + len(self.ahead) < len(self.order):
            step, layer = self.order[now + len(self.ahead)]
            if not self.transport.may_stage(layer):
                return
            self.ahead.append(self.stage(step, layer))

    def stage(self, step: int, layer: int) -> Lease:
        slot, length = self.slots[self.transport.next_slot], 2 + step
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

    def layer(self, lease: Lease, step: int, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        device, transport, length = self.device, self.transport, 2 + step
        compute = device.queue(QueueName.COMPUTE)
        slot, fresh, kept = self.slots[lease.slot], hidden * (layer + 2) % PRIME, self.kept[layer, :, length]
        transport.before_attention(lease)

        def append() -> None:
            slot[:, length] = fresh
            kept.copy_(fresh)

        device.launch(compute, append, writes=(slot[:, length], kept), label=f"append {step} {layer}")

        def attend() -> torch.Tensor:
            return torch.stack([mix(slot[context, : length + 1], layer) for context in range(CONTEXTS)])

        out = device.launch(compute, attend, reads=(slot[:, : length + 1],), label=f"attend {step} {layer}")
        assert out is not None
        attention = transport.attended(lease)
        changed, rows = slot[:, length], device.host_rows(self.host[layer, :, length])
        work = Work(lambda: rows.copy_(changed), reads=(changed,), writes=(rows,))
        transport.write_back(lease, self.contexts, length + 1, work)
        transport.seal(lease, length + 1, attention)
        return (out + hidden) % PRIME

    def resident_layer(self, step: int, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        length = 2 + step
        self.resident[layer, :, length] = hidden * (layer + 2) % PRIME
        out = torch.stack([mix(self.resident[layer, context, : length + 1], layer) for context in range(CONTEXTS)])
        return (out + hidden) % PRIME


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


def omitted(edge: Edge) -> set[Edge]:
    """What to leave out to see ``edge`` missing."""
    return {edge} | IMPLIED_BY.get(edge, set())
