"""shell: histories of made-up rows, for measuring decode without a prefill. Knows no request."""

from __future__ import annotations

from typing import Any

import torch

from worker.engine.device import Device, QueueName
from worker.engine.link_rate import flat


def fill_histories(engine: Any) -> None:
    """The same random rows in every layer's history, wherever it is kept."""
    device: Device = engine.device
    back = device.queue(QueueName.D2H)
    layers = engine.host.layers if engine.host is not None else engine.pool.layers
    chance = torch.Generator(device.torch_device)
    with device.running():
        for index, layer in enumerate(layers):
            for side, target in enumerate(flat(layer)):
                chance.manual_seed(2 * index + side)
                rows = torch.randn(target.shape, generator=chance, device=device.torch_device, dtype=target.dtype)
                if engine.host is None:
                    target.copy_(rows)
                    continue
                made = device.record(device.queue(QueueName.COMPUTE))
                device.wait(back, made)
                device.release(made)
                device.copy(back, target, rows, "fill a history")
                device.synchronise(back)
