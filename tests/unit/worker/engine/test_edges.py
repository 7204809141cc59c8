"""Every ordering edge of a staged step: with it, each schedule gives the same bytes; without it, they corrupt.

2,000 seeds for each edge; ``HAULIER_SEEDS`` lowers that while one works on something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from worker.engine.device import RaceError, Work
from worker.engine.leases import Lease
from worker.engine.page_leases import ContextSet, PageHeldError, PageLeases
from worker.engine.staged_program import EDGES, EVENTS_COUNT, SHAPES, WIDTH, Program, Shape, omitted
from worker.engine.transport import Edge, Transport
from worker.engine.virtual_device import Temperament, VirtualDevice

SEEDS = int(os.environ.get("HAULIER_SEEDS", "2000"))


def devices(check_clocks: bool = True, seeds: int = SEEDS) -> Iterator[VirtualDevice]:
    """One of each temperament, and RANDOM with many seeds."""
    for one in (Temperament.EARLY, Temperament.LATE):
        yield VirtualDevice(one, events=EVENTS_COUNT, check_clocks=check_clocks)
    for seed in range(seeds):
        yield VirtualDevice(Temperament.RANDOM, seed, events=EVENTS_COUNT, check_clocks=check_clocks)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_with_every_edge_no_schedule_changes_a_byte(shape: Shape) -> None:
    """A correct step is correct whatever the device does first: plain CPU, copies early, copies late, any order."""
    for device in [VirtualDevice(), *devices()]:
        program = Program(device, shape)
        program.run()
        program.finish()
        assert program.equal(), f"{device.temperament.value}, seed {device.seed}"


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name.lower())
def test_without_an_edge_the_clocks_name_the_race(edge: Edge) -> None:
    """The control: remove one wait, and every schedule in which the host saw nothing over names both operations."""
    found = 0
    for device in devices():
        try:
            Program(device, EDGES[edge], omitted(edge)).run()
        except RaceError as race:
            found += f"seed {device.seed}" in str(race)
    assert found == 2 + SEEDS


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name.lower())
def test_without_an_edge_bytes_corrupt(edge: Edge) -> None:
    """The control of the control: with the clocks off, some schedule really yields a wrong result, a wrong host row, or
    a shadow that reads other bytes than attention did."""
    corrupt = 0
    for device in devices(check_clocks=False):
        program = Program(device, EDGES[edge], omitted(edge))
        try:
            program.run()
            device.drain()
            corrupt += not program.equal()
        except RaceError:
            corrupt += 1
        if corrupt >= 3:
            break
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
        wrong = (self.stage_then_reuse(device, {Edge.TICKETS_BEFORE_PAGE_REUSE}) for device in devices(False))
        assert any(bool((slot == -1).any()) for slot in wrong)
