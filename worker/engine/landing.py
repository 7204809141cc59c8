"""shell: how the host sees that a step is over: an event that is polled until a deadline (L4), then its tokens.

Knows no request: what the tokens mean is the engine's to say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import InvariantError
from common.limits import ENGINE_POLL_MAX_S, ENGINE_POLL_MIN_S, STEP_DEADLINE_S
from worker.engine.device import Device, DeviceError, Event
from worker.engine.step import PackedStep
from worker.engine.tables import Tables, Upload


class StepLateError(DeviceError):
    """A step's work was not over by its deadline: an event that never completes (L4)."""


@dataclass(slots=True, eq=False)
class Enqueued:
    """A step whose work is on the queues: what must live until it has landed, and how that is seen."""

    packed: PackedStep
    upload: Upload
    keep: tuple[object, ...] = ()
    over: Event | None = None


def landed_tokens(device: Device, tables: Tables, behind: Enqueued, others: Sequence[torch.Tensor] = ()) -> list[int]:
    """The tokens that a step sampled, in the order of its sampled rows, once it is over on every queue; its event is
    given back, and the host may read ``others``, which the step brought back too. Raises ``StepLateError``."""
    event, step = behind.over, behind.packed.step
    if event is None:
        raise InvariantError(f"step {step} lands without having been sampled")
    pause, since = ENGINE_POLL_MIN_S, time.monotonic()
    while not device.done(event):
        if time.monotonic() - since > STEP_DEADLINE_S:
            raise StepLateError(f"step {step} is not over after {STEP_DEADLINE_S:g} s")
        time.sleep(pause)
        pause = min(2 * pause, ENGINE_POLL_MAX_S)
    tokens = tables.tokens(behind.upload, behind.packed.sampled_rows)
    for one in (tokens, *others):
        device.host_read(event, one)
    values: list[int] = tokens.tolist()
    device.release(event)
    return values
