"""values: what an engine asks of those around it, and tells them: types alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from worker.engine.contexts import StepPlan

Watch = Callable[[StepPlan, torch.Tensor], None]
"""Sees each step's plan and its logits (sampled rows, vocabulary), on the device; for tests and measurements."""
Agree = Callable[[int, Sequence[int]], None]
"""Told of each landed step its number, tokens and how far its rows reach; raises if another rank has others."""


class Stop(Protocol):
    """``threading.Event``, or anything that says when to stop."""

    def is_set(self) -> bool: ...
