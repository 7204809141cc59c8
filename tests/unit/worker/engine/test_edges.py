"""Every ordering edge of a staged step: with it, each schedule gives the same bytes; without it, they corrupt.

The program here is a small staged model over whole numbers, so that any stale or foreign row changes the result: a step
stages each layer's history through the transport, appends a row in the slot, attends, writes the row back. What it
computes is compared with the same arithmetic over plain resident arrays. ``HAULIER_SEEDS`` raises the number of seeds.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from worker.engine.device import QueueName, RaceError, Work
from worker.engine.leases import Lease
from worker.engine.page_leases import ContextSet, PageHeldError, PageLeases
from worker.engine.transport import Edge, Transport
from worker.engine.virtual_device import Temperament, VirtualDevice

SEEDS = int(os.environ.get("HAULIER_SEEDS", "25"))
CONTEXTS, ROWS, WIDTH, STEPS = 2, 8, 3, 4
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
    weights = torch.arange(1, rows.shape[0] + 1, dtype=torch.int64).unsqueeze(1)
    return (rows * (weights * 31 + salt)).sum(0) % PRIME


class Program:
    """One run over ``STEPS`` steps; each context has a history of 2 rows at first."""

    def __init__(self, device: VirtualDevice, shape: Shape, omit: set[Edge]) -> None:
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
        self.order = [(step, layer) for step in range(STEPS) for layer in range(shape.layers)]

    def run(self) -> bool:
        """Whether every step's result equals the resident one."""
        equal = True
        for step in range(STEPS):
            hidden = torch.full((CONTEXTS, WIDTH), step + 1, dtype=torch.int64)
            wanted = hidden.clone()
            self.transport.retire(float(step))
            for layer in range(self.shape.layers):
                now = step * self.shape.layers + layer
                self.stage_ahead(now)
                hidden = self.layer(self.ahead.popleft(), step, layer, hidden)
                self.stage_ahead(now + 1)
                wanted = self.resident_layer(step, layer, wanted)
            equal = equal and torch.equal(hidden, wanted)
        return equal

    def finish(self) -> None:
        """Everything comes over, the host rows equal the resident ones, and the books are empty."""
        while self.transport.book.live:
            self.transport.retire(float(STEPS))
        self.transport.check()
        assert self.transport.pages is not None
        assert self.transport.pages.holds == 0
        assert self.device.events_held == 0
        assert torch.equal(self.host, self.resident)

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
        changed, rows = slot[:, length], self.host[layer, :, length]
        work = Work(lambda: rows.copy_(changed), reads=(changed,), writes=(rows,))
        transport.write_back(lease, self.contexts, length + 1, work)
        transport.seal(lease, length + 1, attention)
        return (out + hidden) % PRIME

    def resident_layer(self, step: int, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        length = 2 + step
        self.resident[layer, :, length] = hidden * (layer + 2) % PRIME
        out = torch.stack([mix(self.resident[layer, context, : length + 1], layer) for context in range(CONTEXTS)])
        return (out + hidden) % PRIME


def devices(check_clocks: bool = True, seeds: int = SEEDS) -> list[VirtualDevice]:
    """One of each temperament, and RANDOM with many seeds."""
    made = [VirtualDevice(one, check_clocks=check_clocks) for one in (Temperament.EARLY, Temperament.LATE)]
    return made + [VirtualDevice(Temperament.RANDOM, seed, check_clocks=check_clocks) for seed in range(seeds)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_with_every_edge_no_schedule_changes_a_byte(shape: Shape) -> None:
    """A correct step is correct whatever the device does first: plain CPU, copies early, copies late, any order."""
    for device in [VirtualDevice(), *devices(seeds=SEEDS * 2)]:
        program = Program(device, shape, set())
        assert program.run(), f"{device.temperament.value}, seed {device.seed}"
        program.finish()


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


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name.lower())
def test_without_an_edge_the_clocks_name_the_race(edge: Edge) -> None:
    """The control: remove one wait, and every schedule in which the host saw nothing over names both operations."""
    omit = {edge} | IMPLIED_BY.get(edge, set())
    found = 0
    for device in devices():
        try:
            Program(device, EDGES[edge], omit).run()
        except RaceError as race:
            found += f"seed {device.seed}" in str(race)
    assert found == 2 + SEEDS


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name.lower())
def test_without_an_edge_bytes_corrupt(edge: Edge) -> None:
    """The control of the control: with the clocks off, some schedule really yields a wrong result, a wrong host row, or
    a shadow that reads other bytes than attention did."""
    omit = {edge} | IMPLIED_BY.get(edge, set())
    corrupt = 0
    for device in devices(check_clocks=False):
        program = Program(device, EDGES[edge], omit)
        try:
            equal = program.run()
            device.drain()
            corrupt += not equal or not torch.equal(program.host, program.resident)
        except RaceError:
            corrupt += 1
    assert corrupt > 0


class TestHostPageReuse:
    """A finished context's host rows go to another while a copy engine may still read them (sglang 31427)."""

    def stage_then_reuse(self, device: VirtualDevice, omit: set[Edge]) -> torch.Tensor:
        pages = PageLeases(1)
        transport = Transport(device, 2, pages, omit=omit)
        host = device.allocate_host((4, WIDTH), torch.int64)
        host.fill_(7)
        slots = device.allocate_device((2, 4, WIDTH), torch.int64)
        page = pages.current(0)
        contexts = ContextSet((0,), (page,))
        lease = transport.stage(0, 0, contexts, [(slots[0], host, page)])
        for now in range(100):
            try:
                pages.recycle(page)
                break
            except PageHeldError:
                self.carry_on(device, transport, lease, contexts, host, now)
        device.host_write(host, "the next owner's rows")
        host.fill_(-1)
        device.drain()
        return slots[0]

    @staticmethod
    def carry_on(
        device: VirtualDevice, transport: Transport, lease: Lease, contexts: ContextSet, host: torch.Tensor, now: int
    ) -> None:
        if now == 0:
            transport.before_attention(lease)
            attention = transport.attended(lease)
            rows = host[3:]
            fresh = torch.full_like(rows, 7)
            work = Work(lambda: rows.copy_(fresh), reads=(fresh,), writes=(rows,))
            transport.write_back(lease, contexts, 4, work)
            transport.seal(lease, 4, attention)
        transport.retire(float(now))

    def test_a_held_page_waits(self) -> None:
        """The host pool asks again at each step boundary; every schedule keeps the history whole."""
        for device in devices():
            assert bool((self.stage_then_reuse(device, set()) == 7).all())

    def test_control_without_the_hold_is_a_race(self) -> None:
        """Recycled at once: the host writes what a copy still reads."""
        for device in devices():
            if device.temperament is not Temperament.EARLY:
                with pytest.raises(RaceError, match="the next owner's rows"):
                    self.stage_then_reuse(device, {Edge.TICKETS_BEFORE_PAGE_REUSE})

    def test_control_without_the_hold_corrupts(self) -> None:
        """And the copy takes the next owner's rows for this one's history."""
        wrong = [self.stage_then_reuse(device, {Edge.TICKETS_BEFORE_PAGE_REUSE}) for device in devices(False)]
        assert any(bool((slot == -1).any()) for slot in wrong)
