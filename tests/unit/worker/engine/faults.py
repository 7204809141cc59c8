"""values: faults of the staged route, each of which must turn a comparison of bits red."""

from __future__ import annotations

from dataclasses import replace

from worker.engine.addresses import LayerAddress
from worker.engine.device_pool import Rows
from worker.engine.routes import StagedRoute
from worker.engine.step import PackedStep
from worker.engine.tables import StepTensors


def stale_row(route: StagedRoute) -> None:
    """One row of layer 1 never reaches the host: from then on a stale row is staged."""
    original = route._write_back

    def write_back(live, layer, where):  # type: ignore[no-untyped-def]
        work = original(live, layer, where)
        if layer != 1 or live.packed.step != 3:
            return work
        target, index = route._host.device_rows[layer], live.tensors["host_rows"][:1]
        before = Rows(target.key[index].clone(), target.value[index].clone())

        def scatter() -> None:
            work.fn()
            target.key[index], target.value[index] = before.key, before.value

        return replace(work, fn=scatter)

    route._write_back = write_back  # type: ignore[method-assign]


def swapped_rows(route: StagedRoute) -> None:
    """Two contexts' histories change places in one layer of one step."""
    original = route._stage

    def stage(packed: PackedStep, layer: int) -> None:
        runs = list(packed.runs)
        if packed.step == 4 and layer == 0:
            runs[0], runs[1] = (
                replace(runs[0], host_first=runs[1].host_first),
                replace(runs[1], host_first=runs[0].host_first),
            )
        original(replace(packed, runs=tuple(runs)), layer)

    route._stage = stage  # type: ignore[method-assign]


def wrong_layer(route: StagedRoute) -> None:
    """Attention reads the other slot, which holds another layer."""
    original = route.locate

    def locate(packed: PackedStep, tensors: StepTensors) -> tuple[LayerAddress, ...]:
        layers = original(packed, tensors)
        if packed.step != 5:
            return layers
        others = (*layers[1:], *layers[:1])
        return tuple(replace(one, slot_first=own.slot_first) for one, own in zip(others, layers, strict=True))

    route.locate = locate  # type: ignore[method-assign]


def wrong_shared_rows(route: StagedRoute) -> None:
    """One row too far of each shared history is staged, in one layer."""
    _move_shared(route, 1)


def shared_rows_of_another(route: StagedRoute) -> None:
    """In one layer a shared history's rows are those of the segment before it."""
    _move_shared(route, -48)


def _move_shared(route: StagedRoute, rows: int) -> None:
    original = route._stage

    def stage(packed: PackedStep, layer: int) -> None:
        runs, own = list(packed.runs), len(packed.plan.shares)
        if layer == 1:
            for index in range(own, own + len(packed.plan.joined)):
                runs[index] = replace(runs[index], host_first=runs[index].host_first + rows)
        original(replace(packed, runs=tuple(runs)), layer)

    route._stage = stage  # type: ignore[method-assign]
