"""shell: the two ways a layer's history is on the device when its attention runs: staged, or resident (the reference).

Both append this step's rows and make the same attention call; they differ in the address of the rows alone (H4). The
staged route follows a step in design order: wait for the copy, append, attend, consumer event, write back the changed
rows, seal, and begin the copy of the next layer but one, across the end of the step. Order is the transport's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import InvariantError
from worker.engine.device import Device, QueueName, Work
from worker.engine.device_pool import DevicePool, Rows
from worker.engine.fit import SLOTS
from worker.engine.host_pool import HostPool
from worker.engine.kernels import attend
from worker.engine.leases import Lease
from worker.engine.step import HistoryRun, PackedStep
from worker.engine.tables import StepTensors
from worker.engine.transport import Transport


@dataclass(slots=True, eq=False)
class LiveStep:
    """A step on its way over the device: travels through the model as our keyword (``attention.StepAttention``)."""

    packed: PackedStep
    tensors: StepTensors
    route: Route
    context_tokens: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        return self.route.attend(self, layer, query, key, value, scale)


class Route:
    """What both ways share: the append and the attention call over ``rows``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._compute = device.queue(QueueName.COMPUTE)
        self._checked = device.kind == "virtual" and not getattr(device, "eager", False)
        """Whether the device looks at declared reads and writes: making views for nothing costs host time."""

    def prepare(self, packed: PackedStep) -> None:
        """A step that nobody prefetched begins."""

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of one step."""
        raise NotImplementedError

    def _call(
        self, live: LiveStep, rows: Rows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        index = live.tensors["rows"]

        def append() -> None:
            rows.key.index_copy_(0, index, key)
            rows.value.index_copy_(0, index, value)

        runs = live.packed.runs if self._checked else ()
        self.device.launch(self._compute, append, (), _pieces(rows, runs, _added), "append rows")
        out = self.device.launch(
            self._compute,
            lambda: attend(query, rows.key, rows.value, live.tensors.spans, scale),
            _pieces(rows, runs, _whole),
            (),
            "attention",
        )
        if out is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        return out


def _added(run: HistoryRun) -> slice:
    return slice(run.slot_start + run.rows, run.slot_start + run.rows + run.added)


def _whole(run: HistoryRun) -> slice:
    return slice(run.slot_start, run.slot_start + run.rows + run.added)


def _pieces(rows: Rows, runs: tuple[HistoryRun, ...], part: Callable[[HistoryRun], slice]) -> list[torch.Tensor]:
    return [tensor[part(run)] for run in runs for tensor in (rows.key, rows.value)]


class ResidentRoute(Route):
    """``--residency full``: every context's history stays in a region of its own in each layer."""

    def __init__(self, device: Device, pool: DevicePool) -> None:
        super().__init__(device)
        self._layers = pool.layers

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append and attend in place."""
        return self._call(live, self._layers[layer], query, key, value, scale)


class StagedRoute(Route):
    """``next_step`` gives the packed step after the one under way, None if there is none; asked when this step's last
    layers no longer need the slots."""

    def __init__(
        self,
        transport: Transport,
        host: HostPool,
        pool: DevicePool,
        next_step: Callable[[], PackedStep | None],
    ) -> None:
        super().__init__(transport.device)
        self._transport = transport
        self._host = host
        self._slots = pool.slots
        self._next_step = next_step
        self._layers = len(host.layers)
        self._ahead = min(SLOTS, self._layers)
        self._leases: dict[tuple[int, int], Lease] = {}
        self._row_bytes = 2 * pool.arena.key[:1].nbytes

    def prepare(self, packed: PackedStep) -> None:
        """Begin the copies of a step's first layers, as many as there are slots."""
        for layer in range(self._ahead):
            self._stage(packed, layer)

    def attend(
        self, live: LiveStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One staged layer, from the wait for its copy to the start of the copy two layers on."""
        packed, transport = live.packed, self._transport
        lease = self._leases.pop((packed.step, layer), None)
        if lease is None:
            raise InvariantError(f"layer {layer} of step {packed.step} is attended without a lease")
        slot = self._slots[lease.slot]
        transport.before_attention(lease)
        out = self._call(live, slot, query, key, value, scale)
        consumed = transport.attended(lease)
        transport.write_back(
            lease,
            packed.contexts,
            packed.tail,
            self._write_back(live, layer, slot),
            nbytes=packed.tokens * self._row_bytes,
        )
        transport.seal(lease, packed.tail, consumed)
        self._stage_ahead(packed, layer + self._ahead)
        return out

    def _stage_ahead(self, packed: PackedStep, layer: int) -> None:
        if layer < self._layers:
            self._stage(packed, layer)
            return
        following = self._next_step()
        if following is not None:
            self._stage(following, layer - self._layers)

    def _stage(self, packed: PackedStep, layer: int) -> None:
        slot = self._slots[self._transport.next_slot]
        key, value = self._host.layers[layer].key, self._host.layers[layer].value
        copies = []
        for run, owner in zip(packed.runs, packed.contexts.owners, strict=True):
            if run.rows:
                start, end = run.slot_start, run.slot_start + run.rows
                copies.append((slot.key[start:end], key[run.segment, : run.rows], owner))
                copies.append((slot.value[start:end], value[run.segment, : run.rows], owner))
        lease = self._transport.stage(packed.step, layer, packed.contexts, copies)
        self._leases[packed.step, layer] = lease

    def _write_back(self, live: LiveStep, layer: int, slot: Rows) -> Work:
        """One gather from the slot and one scatter into the mapped host rows, K and V each."""
        target = self._host.device_rows[layer]
        source_rows, target_rows = live.tensors["rows"], live.tensors["host_rows"]

        def scatter() -> None:
            target.key.index_copy_(0, target_rows, slot.key.index_select(0, source_rows))
            target.value.index_copy_(0, target_rows, slot.value.index_select(0, source_rows))

        if not self._checked:
            return Work(scatter)
        runs = live.packed.runs
        host = self._host.layers[layer]
        writes = [
            tensor[run.segment, run.rows : run.rows + run.added] for run in runs for tensor in (host.key, host.value)
        ]
        return Work(scatter, _pieces(slot, runs, _added), writes)
