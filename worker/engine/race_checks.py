"""shell: the race controls of the self-check: each ordering edge, on this very device, with it and without it.

A check passes only if the bytes are right with the edge and corrupt without it: a control that cannot corrupt proves
nothing. On a GPU a gate holds the queue whose work must come first; on the CPU a schedule does. Each check returns
words on success and raises ``CheckFailed`` otherwise. Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from common.errors import HaulierError, InvariantError
from common.limits import STEP_TABLES_COUNT
from worker.engine.device import Device, QueueName, RaceError, Work
from worker.engine.gate import Gate
from worker.engine.lanes import Temperament
from worker.engine.page_leases import ContextSet, PageHeldError, PageLeases
from worker.engine.runner import open_device
from worker.engine.staged_program import EDGES, EVENTS_COUNT, HELD, Program, Shape, omitted
from worker.engine.step import PackedStep
from worker.engine.tables import Tables, Upload
from worker.engine.transport import Edge, Transport
from worker.engine.virtual_device import VirtualDevice

AHEAD_S = 0.2
"""How long a gate stays shut after the last submission: time for what should have waited to run ahead."""
SOUND_SEEDS_COUNT, CONTROL_SEEDS_COUNT = 20, 2_000
"""Random schedules with the edge, and at most without it until one corrupts."""
OLD, NEW = 7, -1
"""What a host page holds for its owner, and for the next one."""

Make = Callable[..., Device]
"""Makes a fresh device, since each check ends its own: ``VirtualDevice`` itself, or what opens a GPU."""


class CheckFailed(HaulierError):
    """A check did not hold on this machine; the message says what was seen."""


def maker(name: str) -> Make:
    """Makes fresh devices of ``--device``; ``events`` and ``temperament`` as keywords. Raises ``RefusedError``."""
    if name == "cpu":
        return VirtualDevice
    open_device(name).begin_teardown("it was only asked whether it is there")
    from worker.engine.cuda_device import CudaDevice

    index = int(name.partition(":")[2] or 0)
    return lambda events=EVENTS_COUNT: CudaDevice(index, events=events)


def edge(make: Make, which: Edge) -> str:
    """One ordering edge: right bytes with it, corrupt bytes without it."""
    return _edge_by_schedule(which) if make is VirtualDevice else _edge_by_gate(make, which)


def _schedules(seeds: int, *, check_clocks: bool) -> Iterator[VirtualDevice]:
    for temperament in (Temperament.EARLY, Temperament.LATE):
        yield VirtualDevice(temperament, events=EVENTS_COUNT, check_clocks=check_clocks)
    for seed in range(seeds):
        yield VirtualDevice(Temperament.RANDOM, seed, events=EVENTS_COUNT, check_clocks=check_clocks)


def _edge_by_schedule(which: Edge) -> str:
    shape = EDGES[which]
    for device in _schedules(SOUND_SEEDS_COUNT, check_clocks=True):
        program = Program(device, shape)
        program.run()
        program.finish()
        if not program.equal():
            raise CheckFailed(f"with the edge, bytes differ ({device.temperament.value}, seed {device.seed})")
    for device in _schedules(SOUND_SEEDS_COUNT, check_clocks=True):
        try:
            Program(device, shape, omitted(which)).run()
        except RaceError:
            continue
        raise CheckFailed(f"without the edge no race is named ({device.temperament.value}, seed {device.seed})")
    for tried, device in enumerate(_schedules(CONTROL_SEEDS_COUNT, check_clocks=False), 1):
        if _corrupts(device, shape, which):
            return f"{SOUND_SEEDS_COUNT + 2} schedules right with it; named, and corrupt at schedule {tried}, without"
    raise CheckFailed(f"the control corrupts under none of {CONTROL_SEEDS_COUNT + 2} schedules")


def _corrupts(device: VirtualDevice, shape: Shape, which: Edge) -> bool:
    program = Program(device, shape, omitted(which))
    try:
        program.run()
        device.drain()
    except RaceError:  # a shadow: attention read other bytes than it answered with
        return True
    return not program.equal()


def _edge_by_gate(make: Make, which: Edge) -> str:
    held = HELD[which]
    if not _gated(make, which, with_edge=True):
        raise CheckFailed(f"with the edge and {held.value} held, bytes differ from resident arithmetic")
    if _gated(make, which, with_edge=False):
        raise CheckFailed(f"the control does not corrupt: without the edge and {held.value} held, bytes are right")
    return f"{held.value} held: right with it, corrupt without"


def _gated(make: Make, which: Edge, *, with_edge: bool) -> bool:
    """Whether a program came out right with one queue held while everything is submitted. One that nothing holds goes
    first on the same device: it loads every kernel and warms the allocator, either of which could wait for a gate."""
    device, shape = make(), EDGES[which]
    warm = Program(device, shape)
    _settled(device)
    with device.running():
        warm.run()
    _settled(device)
    warm.finish()
    if not warm.equal():
        raise CheckFailed("nothing held, every edge there: bytes differ from resident arithmetic")
    program = Program(device, shape, () if with_edge else omitted(which))
    _settled(device)
    with device.running():
        gate = Gate(device, HELD[which])
        try:
            program.run()
            time.sleep(AHEAD_S)
        finally:
            gate.open()
    _settled(device)
    program.finish()
    right = program.equal()
    _ended(device)
    return right


def _ended(device: Device) -> None:
    device.begin_teardown("the check is over")
    device.synchronise_everything()


def _settled(device: Device) -> None:
    """What was prepared is there, before a queue is held. Measurements and checks may wait; an engine may not."""
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch_device)


# -- host pages and step tables: the same program on both kinds of device ----------------------------------------------
def page_reuse(make: Make) -> str:
    """L5: a host page goes to its next owner while a copy still reads it: refused with the hold, corrupt without."""
    if not _page_read(_late(make), ()):
        raise CheckFailed("with the hold, the copy read the next owner's rows")
    if _page_read(_late(make), (Edge.TICKETS_BEFORE_PAGE_REUSE,)):
        raise CheckFailed("the control does not corrupt: without the hold, the copy still read its own rows")
    return "h2d held: the page waits for its copy with the hold, the next owner's rows arrive without"


def _late(make: Make) -> Device:
    if make is VirtualDevice:
        return VirtualDevice(Temperament.LATE, events=EVENTS_COUNT, check_clocks=False)
    return make()


def _page_read(device: Device, omit: tuple[Edge, ...]) -> bool:
    """Whether a held copy of a page that was to be recycled brought its first owner's rows."""
    pages = PageLeases(1)
    transport = Transport(device, 2, pages, omit=omit)
    host, slot = device.allocate_host((4, 8), torch.int64), device.allocate_device((2, 4, 8), torch.int64)
    host.fill_(OLD)
    page = pages.current(0)
    contexts = ContextSet((0,), (page,))
    _settled(device)
    with device.running():
        gate = Gate(device, QueueName.H2D)
        try:
            lease = transport.stage(0, 0, contexts, [(slot[0], host, page)])
            refused = False
            try:
                pages.recycle(page)
                host.fill_(NEW)
            except PageHeldError:
                refused = True
            time.sleep(AHEAD_S)
        finally:
            gate.open()
        transport.before_attention(lease)
        attention = transport.attended(lease)
        changed, rows = slot[0, 3:], device.host_rows(host[3:])
        transport.write_back(lease, contexts, 4, Work(lambda: rows.copy_(changed), (changed,), (rows,)))
        transport.seal(lease, 4, attention)
        for _ in range(1_000_000):
            if transport.retire(0.0):
                break
    right = bool((slot[0] == OLD).all())
    if refused:  # the host pool asks again, at a step boundary: now nothing touches the page any more
        pages.recycle(page)
    transport.check()
    _ended(device)
    return right


def table_reuse(make: Make) -> str:
    """A step's table is written again while its copy is under way: refused by the books, corrupt without them."""
    if not _table_read(_late(make), forget=False):
        raise CheckFailed("with the books, a step's table arrived with another step's numbers")
    if _table_read(_late(make), forget=True):
        raise CheckFailed("the control does not corrupt: a table written again arrived as it was")
    return "h2d held: a table in flight is refused to the next step, and carries its numbers without the books"


def _table_read(device: Device, *, forget: bool) -> bool:
    """Whether the first step's table arrives with its own numbers, the host running ahead of a held copy queue.
    ``forget`` gives tables back before their steps have landed."""
    tables = Tables(device, 8, 2, 2)
    uploads: list[tuple[Upload, PackedStep]] = []
    _settled(device)
    with device.running():
        gate = Gate(device, QueueName.H2D)
        try:
            for step in range(STEP_TABLES_COUNT + 1):
                packed = _one_row(step)
                try:
                    uploads.append((tables.upload(packed), packed))
                except InvariantError:
                    if forget:
                        raise
                if forget:
                    tables.release(uploads[-1][0])
            time.sleep(AHEAD_S)
        finally:
            gate.open()
        refused = len(uploads) == STEP_TABLES_COUNT
        rows = [tables.fetch(upload, packed)["rows"].tolist() for upload, packed in uploads[:STEP_TABLES_COUNT]]
    _ended(device)
    tables.close()
    return refused and rows == [[step] for step in range(STEP_TABLES_COUNT)]


def _one_row(step: int) -> PackedStep:
    """As much of a packed step as tables carry: its one row says which step it is of."""

    indices = {"query_starts": [0, 1], "history_starts": [0, 1], "lengths": [1]}
    one = SimpleNamespace(
        step=step,
        longs={"rows": np.array([step], dtype=np.int64)},
        ints={name: np.array(values, dtype=np.int32) for name, values in indices.items()},
        floats={},
        longest_query=1,
        longest_history=1,
    )
    return cast(PackedStep, one)
