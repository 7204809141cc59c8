"""shell: the two ways a layer's history is on the device when its attention runs: staged, or resident (the reference).

Both append this step's rows and make the same attention call over the arena; they differ in the address of the rows
alone (H4). The staged route follows a step in design order: wait for the copies, append, attend, keep whole pages,
consumer event, write back the changed rows, seal, and begin the copies of the next layer but one, across the step's
end. A context that is retained in place has nothing to copy; of one retained in part, pages are materialised beside the
copy of the rest (H1), and so are those that lie in headroom (H2). Order is the transport's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from common.errors import InvariantError
from common.limits import ARENA_VIEWS_MAX_COUNT
from worker.engine.addresses import Addresses, LayerAddress
from worker.engine.calls import attend_layer
from worker.engine.device import Device, QueueName, Work
from worker.engine.device_pool import DevicePool, Rows
from worker.engine.fit import SLOTS, Fit
from worker.engine.headroom_memory import HeadroomMemory
from worker.engine.host_pool import HostPool
from worker.engine.leases import Lease
from worker.engine.step import HistoryRun, PackedStep
from worker.engine.tables import StepTensors
from worker.engine.transport import Copy, Transport


@dataclass(slots=True, eq=False)
class LiveStep:
    """A step on its way over the device: travels through the model as our keyword (``attention.StepAttention``)."""

    packed: PackedStep
    tensors: StepTensors
    route: Route
    context_tokens: int
    layers: tuple[LayerAddress, ...]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        self.route.attended += 1
        return self.route.attend(self, layer, query, key, value, scale)


class Route:
    """What both ways share: addresses, the append and the attention call over the arena."""

    def __init__(self, device: Device, pool: DevicePool, addresses: Addresses) -> None:
        self.device = device
        self.attended = 0
        """Layers, over all steps."""
        self._arena = pool.arena
        self._addresses = addresses
        self._compute = device.queue(QueueName.COMPUTE)
        self._checked = device.kind == "virtual" and not getattr(device, "eager", False)
        """Whether the device looks at declared reads and writes: making views for nothing costs host time."""

    def prepare(self, packed: PackedStep) -> None:
        """A step that nobody prefetched begins."""

    def follow(self, packed: PackedStep, following: PackedStep | None) -> None:
        """``packed`` is on the queues, ``following`` is planned: begin of it what has not begun."""

    def locate(self, packed: PackedStep, tensors: StepTensors) -> tuple[LayerAddress, ...]:
        """Where the rows of the step lie, layer by layer."""
        return self._addresses.of(packed, tensors, 0)

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of one step."""
        raise NotImplementedError

    def whole(self, live: LiveStep) -> AbstractContextManager[None]:
        """Around the launches of a step whose histories are all in place."""
        return nullcontext()

    def call(
        self,
        packed: PackedStep,
        where: LayerAddress,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Append the new rows of one layer and attend, on the compute queue."""
        arena = self._arena

        def append() -> None:
            arena.key.index_copy_(0, where.rows, key)
            arena.value.index_copy_(0, where.rows, value)

        def answer() -> torch.Tensor:
            return attend_layer(query, arena.key, arena.value, where, scale)

        runs = packed.runs if self._checked else ()
        self.device.launch(self._compute, append, (), self._pieces(where, runs, _added), "append rows")
        out = self.device.launch(self._compute, answer, self._pieces(where, runs, _whole), (), "attention")
        if out is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        return out

    def _pieces(
        self, where: LayerAddress, runs: Sequence[HistoryRun], part: Callable[[HistoryRun], slice]
    ) -> list[torch.Tensor]:
        """Views of the arena, for a device that checks them."""
        pieces: list[torch.Tensor] = []
        for run in runs:
            rows, base = part(run), where.page_first if run.in_place else where.slot_first
            pieces += self._arena.views(base + rows.start, rows.stop - rows.start)
        return pieces


def _added(run: HistoryRun) -> slice:
    return slice(run.first + run.rows, run.first + run.rows + run.added)


def _whole(run: HistoryRun) -> slice:
    return slice(run.first, run.first + run.rows + run.added)


Copied = tuple[Rows, int, Rows, int, int]
"""Rows and the first of them to copy, rows and the first place there, how many."""


class ResidentRoute(Route):
    """``--residency full``: every context's history stays in a region of its own in each layer."""

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append and attend in place."""
        return self.call(live.packed, live.layers[layer], query, key, value, scale)


class StagedRoute(Route):
    """``next_step`` gives the packed step after the one under way, None if there is none; asked when this step's last
    layers no longer need the slots."""

    def __init__(
        self,
        transport: Transport,
        host: HostPool,
        pool: DevicePool,
        addresses: Addresses,
        fit: Fit,
        next_step: Callable[[], PackedStep | None],
    ) -> None:
        super().__init__(transport.device, pool, addresses)
        self._transport = transport
        self._host = host
        self._fit = fit
        self._next_step = next_step
        self._layers = len(host.layers)
        self._ahead = min(SLOTS, self._layers)
        self._leases: dict[tuple[int, int], Lease] = {}
        self.headroom: HeadroomMemory | None = None
        self._arena_views = lru_cache(ARENA_VIEWS_MAX_COUNT)(pool.arena.views)
        self.row_bytes = 2 * pool.arena.key[:1].nbytes

    def prepare(self, packed: PackedStep) -> None:
        """Begin the copies of a step's first layers, as many as there are slots."""
        if packed.whole:
            return
        for layer in range(self._ahead):
            self._stage(packed, layer)

    def follow(self, packed: PackedStep, following: PackedStep | None) -> None:
        """A step that ran as a whole began no copies of the one after it."""
        if packed.whole and following is not None:
            self.prepare(following)

    def locate(self, packed: PackedStep, tensors: StepTensors) -> tuple[LayerAddress, ...]:
        """As the leases of the step's first layers have it: slots are taken in turn."""
        return self._addresses.of(packed, tensors, self._lease(packed, 0).slot)

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One staged layer, from the wait for its copies to the start of the copies two layers on."""
        packed, transport, where = live.packed, self._transport, live.layers[layer]
        lease = self._lease(packed, layer)
        del self._leases[packed.step, layer]
        if self._fit.slot_first(lease.slot) != where.slot_first:
            raise InvariantError(f"layer {layer} of step {packed.step} is staged in slot {lease.slot}, out of turn")
        transport.before_attention(lease)
        out = self.call(packed, where, query, key, value, scale)
        if packed.captures:
            kept = self._copies([*self._keep(packed, where), *self._lend(packed, layer, where)])
            self.device.launch(self._compute, kept.fn, kept.reads, kept.writes, "keep whole pages")
        consumed = transport.attended(lease)
        work, copies = self._write_back(live, layer, where), self._copied_back(packed, layer, where)
        nbytes = packed.new_rows * self.row_bytes
        transport.write_back(lease, packed.contexts, packed.tail, work, copies, nbytes)
        transport.seal(lease, packed.tail, consumed)
        self._stage_ahead(packed, layer + self._ahead)
        return out

    @contextmanager
    def whole(self, live: LiveStep) -> Iterator[None]:
        """One lease for all layers, and one write-back of what they appended."""
        packed, transport = live.packed, self._transport
        lease = transport.begin_whole(packed.step, range(self._layers), packed.contexts)
        sources, targets = self._rows_of_all(live)
        yield
        consumed = transport.attended(lease)
        work = self._write_back_all(packed, sources, targets)
        nbytes = packed.new_rows * self.row_bytes * self._layers
        transport.write_back(lease, packed.contexts, packed.tail, work, nbytes=nbytes)
        transport.seal(lease, packed.tail, consumed)

    def _lease(self, packed: PackedStep, layer: int) -> Lease:
        lease = self._leases.get((packed.step, layer))
        if lease is None:
            raise InvariantError(f"layer {layer} of step {packed.step} is attended without a lease")
        return lease

    def _stage_ahead(self, packed: PackedStep, layer: int) -> None:
        if layer < self._layers:
            self._stage(packed, layer)
            return
        following = self._next_step()
        if following is not None and not following.whole:
            self._stage(following, layer - self._layers)

    def _stage(self, packed: PackedStep, layer: int) -> None:
        slot, pages = self._fit.slot_first(self._transport.next_slot), self._fit.layer_first(layer)
        host = self._host.layers[layer]
        copies = []
        for run, owner in packed.staged:
            base = run.first + (pages if run.in_place else slot)
            for start, end in run.placement.copies:
                there = self._arena.views(base + start, end - start)
                here = host.views(run.host_first + start, end - start)
                copies += [(target, source, owner) for target, source in zip(there, here, strict=True)]
        retained = None
        if packed.retained:
            retained = self._copies(
                [*self._materialise(packed, slot, pages), *self._borrow(packed, layer, slot, pages)]
            )
        lease = self._transport.stage(packed.step, layer, packed.contexts, copies, retained)
        self._leases[packed.step, layer] = lease

    def _materialise(self, packed: PackedStep, slot: int, pages: int) -> list[Copied]:
        """Retained pages to their places in the slot."""
        return [
            (self._arena, pages + place, self._arena, slot + run.first + first, rows)
            for run in packed.runs
            for first, place, rows in run.placement.retained
        ]

    def _keep(self, packed: PackedStep, where: LayerAddress) -> list[Copied]:
        """Pages that this step made whole, from the slot to where they are kept."""
        return [
            (self._arena, where.slot_first + run.first + first, self._arena, where.page_first + place, rows)
            for run in packed.runs
            for first, place, rows in run.placement.captures
        ]

    def _borrow(self, packed: PackedStep, layer: int, slot: int, pages: int) -> list[Copied]:
        """Pages in headroom to their places in the slot, or in a run that is being filled."""
        arena, memory = self._arena, self.headroom
        if memory is None:
            return []
        return [
            (memory.rows(chunk, layer), place, arena, run.first + first + (pages if run.in_place else slot), rows)
            for run in packed.runs
            for first, chunk, place, rows in run.placement.borrowed
        ]

    def _lend(self, packed: PackedStep, layer: int, where: LayerAddress) -> list[Copied]:
        """Pages from the slot to headroom, and those that leave a chunk which is given back."""
        arena, memory = self._arena, self.headroom
        if memory is None:
            return []
        lent = [
            (arena, where.slot_first + run.first + first, memory.rows(chunk, layer), place, rows)
            for run in packed.runs
            for first, chunk, place, rows in run.placement.lent
        ]
        return lent + [
            (memory.rows(chunk, layer), row, memory.rows(target, layer), place, rows)
            for chunk, row, target, place, rows in packed.plan.shifts
        ]

    def _copies(self, moves: Sequence[Copied]) -> Work:
        """Device to device, all in one call and in no order: no move reads what another one writes."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for old, source, new, target, rows in moves:
            sources += self._views(old, source, rows)
            targets += self._views(new, target, rows)

        def move() -> None:
            if targets:
                torch._foreach_copy_(targets, sources)

        return Work(move, sources, targets) if self._checked else Work(move)

    def _views(self, rows: Rows, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some rows; of the arena made once, since a step moves many pages and most of them moved before."""
        if rows is self._arena:
            return self._arena_views(first, count)
        return rows.views(first, count)

    def _copied_back(self, packed: PackedStep, layer: int, where: LayerAddress) -> list[Copy]:
        """The new rows of long chunks, to their host rows."""
        found: list[Copy] = []
        for run, owner in packed.copied_back:
            first = (where.page_first if run.in_place else where.slot_first) + run.first + run.rows
            there = self._host.layers[layer].views(run.host_first + run.rows, run.added)
            here = self._arena.views(first, run.added)
            found += [(target, source, owner) for target, source in zip(there, here, strict=True)]
        return found

    def _write_back(self, live: LiveStep, layer: int, where: LayerAddress) -> Work | None:
        """One gather from the arena and one scatter into the mapped host rows, K and V each; None if all are copied."""
        arena, target = self._arena, self._host.device_rows[layer]
        target_rows, scattered = live.tensors["host_rows"], live.tensors.get("scattered")
        rows = where.rows[: live.packed.new_rows]
        if not target_rows.numel():
            return None

        def scatter() -> None:
            source_rows = rows if scattered is None else rows.index_select(0, scattered)
            target.key.index_copy_(0, target_rows, arena.key.index_select(0, source_rows))
            target.value.index_copy_(0, target_rows, arena.value.index_select(0, source_rows))

        if not self._checked:
            return Work(scatter)
        runs = [run for run in live.packed.runs if not run.copied_back]
        host = self._host.layers[layer]
        writes = [side for run in runs for side in host.views(run.host_first + run.rows, run.added)]
        return Work(scatter, self._pieces(where, runs, _added), writes)

    def _rows_of_all(self, live: LiveStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a whole step's new rows in all layers, (layers x new rows,) each: their arena rows and their host rows.
        Private to the step: its inputs will be the next one's before they are used."""
        rows, count = live.tensors["rows"][: live.packed.new_rows], live.tensors["host_rows"]
        pages = self._addresses.pages
        return (rows + pages).flatten(), (count + self._host.firsts).flatten()

    def _write_back_all(self, packed: PackedStep, sources: torch.Tensor, targets: torch.Tensor) -> Work:
        """One gather from the arena and one scatter into the mapped host rows of all layers, K and V each."""
        arena, host = self._arena, self._host.device_flat

        def scatter() -> None:
            host.key.index_copy_(0, targets, arena.key.index_select(0, sources))
            host.value.index_copy_(0, targets, arena.value.index_select(0, sources))

        if not self._checked:
            return Work(scatter)
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for layer, rows in enumerate(self._host.layers):
            for run in packed.runs:
                reads += arena.views(self._fit.layer_first(layer) + run.first + run.rows, run.added)
                writes += rows.views(run.host_first + run.rows, run.added)
        return Work(scatter, reads, writes)


def route_of(
    transport: Transport,
    host: HostPool | None,
    pool: DevicePool,
    addresses: Addresses,
    fit: Fit,
    next_step: Callable[[], PackedStep | None],
) -> Route:
    """The reference where there is no host pool."""
    if host is None:
        return ResidentRoute(transport.device, pool, addresses)
    return StagedRoute(transport, host, pool, addresses, fit, next_step)
