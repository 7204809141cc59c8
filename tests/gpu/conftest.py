"""For every test on a card: it needs one, and leaves torch's debugging of synchronisation as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield
    torch.cuda.set_sync_debug_mode("default")
