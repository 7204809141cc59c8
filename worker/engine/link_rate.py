"""shell: what the link carries, measured at start on the engine's own memory, and the decode rate that it makes likely.

The plan of a quantum (H6) begins with this rate instead of a belief; steps correct it from then on. Knows no context.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from common import log
from common.config import GIB
from common.limits import LINK_MEASURED_BYTES
from worker.engine.device import Device, QueueName
from worker.engine.device_pool import DevicePool, Rows
from worker.engine.fit import Fit
from worker.engine.geometry import Geometry
from worker.engine.host_pool import HostPool
from worker.engine.quantum import Rates, believed


def flat(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as (rows, kv heads, head dim)."""
    return rows.key.flatten(0, -3), rows.value.flatten(0, -3)


def link_rate(device: Device, host: HostPool, pool: DevicePool, most_bytes: int | None = None) -> float:
    """Bytes a second from the host pool to a slot, the best of three times over every layer's K and V, or over about
    ``most_bytes`` of them, in pieces as large as a slot takes. Waits for the copy queue: at start, or to measure."""
    queue = device.queue(QueueName.H2D)
    target = pool.slots[0].key
    best = 0.0
    for _ in range(3):
        moved, start = 0, time.perf_counter()
        for source in (side for layer in host.layers for side in flat(layer)):
            if most_bytes is not None and moved >= most_bytes:
                break
            rows = min(len(source), len(target))
            device.copy(queue, target[:rows], source[:rows], "measure the link")
            moved += source[:rows].nbytes
        device.synchronise(queue)
        best = max(best, moved / (time.perf_counter() - start))
    return best


def rates_at_start(device: Device, geometry: Geometry, fit: Fit, host: HostPool | None, pool: DevicePool) -> Rates:
    """What the plan begins with: believed, but on a CUDA device the link's rate is measured. Logged with the decode
    rate that it predicts when every context is as long as it may be, and with what would raise that."""
    rates = believed(device.kind)
    if host is None or device.kind != "cuda":
        return rates
    rates = replace(rates, link_bytes_s=link_rate(device, host, pool, LINK_MEASURED_BYTES))
    held = fit.useful_rows * geometry.token_bytes
    kept = min(held, fit.page_bytes(geometry))
    advice = ""
    if kept < held:
        slots = 2 * fit.slot_rows * geometry.layer_token_bytes
        advice = f"--device-pages-gib {math.ceil((slots + held) / GIB)} would keep all history on the device"
    log.get("engine").info(
        "rates",
        link_gb_s=round(rates.link_bytes_s / 1e9, 2),
        history_gb=round(held / 1e9, 3),
        kept_gb=round(kept / 1e9, 3),
        predicted_tokens_s=round(fit.concurrency / rates.seconds(held - kept, kept), 1),
        faster=advice,
    )
    return rates
