"""What the link carries is measured with bounded bytes at start, and the plan begins with it; an ended engine's memory
can be collected."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.rigs import at_rest
from worker.engine import link_rate as module
from worker.engine.cells import play_cell
from worker.engine.fit import Fit
from worker.engine.geometry import Geometry
from worker.engine.link_rate import link_rate, rates_at_start
from worker.engine.quantum import believed

LAYERS, ROWS, SLOT = 3, 12, 8


class Recorder:
    """A device that takes notes; each copy of a row takes as long as ``row_s`` says, on the clock of the test."""

    def __init__(self, kind: str, row_s: float = 1e-3) -> None:
        self.kind, self.copied, self.now, self._row_s = kind, [], 0.0, row_s

    def queue(self, name: Any) -> Any:
        return name

    def copy(self, queue: Any, target: torch.Tensor, source: torch.Tensor, label: str) -> None:
        assert target.shape == source.shape
        self.copied.append(source.nbytes)
        self.now += self._row_s * len(source)

    def synchronise(self, queue: Any) -> None:
        pass


def _rows(rows: int) -> Any:
    return SimpleNamespace(key=torch.zeros(rows, 2, 4), value=torch.zeros(rows, 2, 4))


HOST: Any = SimpleNamespace(layers=[_rows(ROWS)] * LAYERS)
POOL: Any = SimpleNamespace(slots=[_rows(SLOT)] * 2)
ROW_BYTES = 2 * 4 * 4


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    one: Any = Recorder("cuda")
    monkeypatch.setattr(module.time, "perf_counter", lambda: one.now)
    return one


def test_every_layer_is_copied_in_pieces_that_a_slot_takes(device: Any) -> None:
    """K and V of three layers, three times: 8 rows of 32 bytes in 8 ms each."""
    assert link_rate(device, HOST, POOL) == pytest.approx(ROW_BYTES / 1e-3)
    assert device.copied == [SLOT * ROW_BYTES] * (2 * LAYERS * 3)


def test_at_start_a_bounded_part_is_enough(device: Any) -> None:
    """100 GiB of host memory are not copied three times before the first request."""
    link_rate(device, HOST, POOL, most_bytes=SLOT * ROW_BYTES + 1)
    assert len(device.copied) == 2 * 3


def _fit(pages: int) -> Fit:
    return Fit(2, ROWS, 4, SLOT, 100, 0, 0, (), pages)


GEOMETRY = Geometry("llama", LAYERS, 2, 2, 4, 4, 257, 64)


@pytest.mark.parametrize(("pages", "faster"), [(0, True), (6, False)])
def test_the_plan_begins_with_what_was_measured(device: Any, pages: int, faster: bool) -> None:
    """Told with the decode rate that follows, and with the setting that would raise it, if any would."""
    with structlog.testing.capture_logs() as logs:
        rates = rates_at_start(device, GEOMETRY, _fit(pages), HOST, POOL)
    assert rates.link_bytes_s == pytest.approx(ROW_BYTES / 1e-3)
    (told,) = [one for one in logs if one["event"] == "rates"]
    assert bool(told["faster"]) == faster
    held = 2 * ROWS * GEOMETRY.token_bytes
    kept = min(held, pages * 4 * GEOMETRY.token_bytes)
    assert told["predicted_tokens_s"] == pytest.approx(2 / rates.seconds(held - kept, kept), abs=0.06)


def test_where_nothing_crosses_a_link_it_is_not_measured(device: Any) -> None:
    """The control: a CPU copies within its memory, and ``--residency full`` has no host pool."""
    assert rates_at_start(device, GEOMETRY, _fit(0), None, POOL) == believed("cuda")
    cpu: Any = Recorder("virtual")
    assert rates_at_start(cpu, GEOMETRY, _fit(0), HOST, POOL) == believed("virtual")
    assert not device.copied
    assert not cpu.copied


def test_an_ended_engine_lets_its_memory_go() -> None:
    """In life: a table of bits makes 112 engines in one process; views that are kept must not keep the pool."""
    seen: list[Any] = []
    play_cell(
        rigs.model(num_hidden_layers=3), rigs.settings(), "retained in part", "4 equal", "long",
        lambda local: seen.extend(weakref.ref(one) for one in (local.engine.pool, local.engine.route)), at_rest,
    )  # fmt: skip
    gc.collect()
    assert [one() for one in seen] == [None, None]
