"""One device allocation of whole GiB (A1); slots and resident regions are disjoint views of it."""

from __future__ import annotations

import pytest
import torch

from common.config import GIB
from common.errors import InvariantError
from tests.unit.worker.engine import rigs
from worker.engine.device_pool import DevicePool, Rows
from worker.engine.fit import Fit, fit
from worker.engine.virtual_device import VirtualDevice


@pytest.mark.parametrize("residency", ["staged", "full"])
def test_pieces_are_disjoint_views_of_one_allocation(residency: str) -> None:
    """In life: two slots, or one region a layer; nothing overlaps, nothing is allocated beside it."""
    geometry = rigs.model().geometry
    found = fit(geometry, rigs.settings(residency=residency))
    pool = DevicePool(VirtualDevice(), geometry, found, torch.float32)
    assert pool.nbytes == GIB
    pieces: tuple[Rows, ...] = pool.slots or pool.layers
    assert len(pieces) == (2 if residency == "staged" else geometry.layers)
    for number, piece in enumerate(pieces):
        piece.key.fill_(number)
        piece.value.fill_(-number)
    for number, piece in enumerate(pieces):
        assert bool((piece.key == number).all())
        assert bool((piece.value == -number).all())
        assert piece.key.is_contiguous()
        assert piece.key.untyped_storage().data_ptr() == pool.arena.key.untyped_storage().data_ptr()


def test_more_than_the_arena_is_a_bug() -> None:
    """``fit`` refuses this before; the pool checks all the same."""
    geometry = rigs.model().geometry
    with pytest.raises(InvariantError):
        DevicePool(VirtualDevice(), geometry, Fit(1, 4, 4, 100, 150, 0, 0, ()), torch.float32)
