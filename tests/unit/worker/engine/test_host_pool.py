"""The authoritative rows: a context's history of a layer is one run of bytes, written a row at a time."""

from __future__ import annotations

import torch

from tests.unit.worker.engine import rigs
from worker.engine.fit import fit
from worker.engine.host_pool import HostPool
from worker.engine.virtual_device import VirtualDevice


def test_histories_are_contiguous_and_rows_reach_them() -> None:
    """In life: write-back scatters rows by index; staging copies them as one piece."""
    geometry = rigs.model().geometry
    found = fit(geometry, rigs.settings(shared_histories=1))
    pool = HostPool(VirtualDevice(), geometry, found, torch.float32)
    assert pool.nbytes == found.host_bytes
    assert pool.key.shape == (3, 4 * 48, 2, 8)
    row = torch.arange(16.0).view(1, 2, 8)
    pool.device_rows[1].value.index_copy_(0, torch.tensor([2 * 48 + 5]), row)
    first = found.segment_first(2)
    history = pool.layers[1].value[first : first + 6]
    assert history.is_contiguous()
    assert torch.equal(history[5], row[0])
    assert int((pool.value != 0).sum()) == 15
    pool.close()
    assert pool.layers == ()
