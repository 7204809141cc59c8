"""Rotating tables: arrays arrive as they were, and a table in flight is never written again (TensorRT-LLM #15546)."""

from __future__ import annotations

import pytest
import torch

from common.errors import InvariantError
from common.limits import STEP_TABLES_COUNT
from tests.unit.worker.engine.test_step import packed
from worker.engine.device import RaceError
from worker.engine.lanes import Temperament
from worker.engine.tables import Tables
from worker.engine.virtual_device import VirtualDevice


@pytest.mark.parametrize("temperament", list(Temperament))
def test_arrays_arrive_as_they_were(temperament: Temperament) -> None:
    """Longs, ints of odd count and floats share one copy; names and values survive it."""
    device = VirtualDevice(temperament)
    tables = Tables(device, 16, 4, 4)
    step = packed(48, temperature=0.5, top_p=0.25)
    found = tables.fetch(tables.upload(step), step)
    for group, dtype in ((step.longs, torch.int64), (step.ints, torch.int32), (step.floats, torch.float32)):
        for name, array in group.items():
            assert found[name].dtype == dtype
            assert found[name].tolist() == array.tolist()
    assert found.chances is not None
    assert found.chances.top_p[0] == 0.25
    assert device.events_held == 0


def test_a_table_is_not_written_while_its_step_is_under_way() -> None:
    """In life: the host runs further ahead than its tables allow; raised, since a copy would carry other numbers."""
    tables = Tables(VirtualDevice(), 16, 4, 4)
    uploads = [tables.upload(packed(48)) for _ in range(STEP_TABLES_COUNT)]
    with pytest.raises(InvariantError, match="written again"):
        tables.upload(packed(48))
    tables._turn = 0
    tables.release(uploads[0])
    tables.upload(packed(48))


def test_released_too_early_it_is_a_race() -> None:
    """The control: a step declared over before it is; the device finds the host writing under its copy."""
    device = VirtualDevice(Temperament.LATE)
    tables = Tables(device, 16, 4, 4)
    for _ in range(STEP_TABLES_COUNT):
        tables.release(tables.upload(packed(48)))
    with pytest.raises(RaceError):
        tables.upload(packed(48))


def test_a_step_beyond_the_tables_is_refused() -> None:
    """The books of sizes: more rows than were promised at start."""
    tables = Tables(VirtualDevice(), 1, 1, 1)
    tables._views = [view[:8] for view in tables._views]
    with pytest.raises(InvariantError, match="words"):
        tables.upload(packed(48))
