"""The pass before the first request: a model that does not call attention as promised is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import RefusedError
from tests.unit.worker.engine import rigs
from worker.engine.attention import registered
from worker.engine.device_pool import Rows
from worker.engine.warmup import warm_up


def test_a_model_is_held_to_its_geometry() -> None:
    """In life: a config that lies about its layers; haulier would stage the wrong history."""
    loaded = rigs.model()
    rows = Rows(torch.zeros(8, 2, 8), torch.zeros(8, 2, 8))
    with registered(loaded.module), torch.no_grad():
        warm_up(loaded, (rows,))
        with pytest.raises(RefusedError, match="haulier cannot stage it"):
            warm_up(replace(loaded, geometry=replace(loaded.geometry, layers=4)), (rows,))
