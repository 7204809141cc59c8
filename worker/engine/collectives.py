"""shell: the ranks' process group: NCCL between CUDA devices, gloo on the CPU, found through a store on loopback.

Nothing listens beyond this machine, and no port is chosen before it is bound. Knows no model and no step.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from common.errors import RefusedError
from common.limits import RANKS_LOADED_S, RANKS_MAX_COUNT
from worker.engine.device import Device

_groups: Any = torch.distributed  # it exports these names, and its types do not say so
LOOPBACK = "127.0.0.1"
_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
_PATIENCE = timedelta(seconds=RANKS_LOADED_S)


class RankStore:
    """Rank 0's: where the others find it. Holds its port from now on."""

    def __init__(self, ranks: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind((LOOPBACK, 0))
            listening.listen(RANKS_MAX_COUNT)
            self.port: int = listening.getsockname()[1]
            self.store = _groups.TCPStore(
                LOOPBACK, self.port, ranks, is_master=True, timeout=_PATIENCE, wait_for_workers=False,
                master_listen_fd=os.dup(listening.fileno()),
            )  # fmt: skip


def store_at(port: int, ranks: int) -> Any:
    """A further rank's end of the store."""
    return _groups.TCPStore(LOOPBACK, port, ranks, is_master=False, timeout=_PATIENCE, wait_for_workers=False)


def join(store: Any, rank: int, ranks: int, device: Device) -> None:
    """Be ``rank`` of ``ranks`` from now on; waits for the others. ``device`` is this rank's, and current."""
    where = device.torch_device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if where.type == "cpu" and found is not None:
        raise RefusedError(
            f"--tensor-parallel {ranks} --device cpu: transformers would spread the model over this machine's "
            f"{found.type} devices; name one with --device, or hide them (CUDA_VISIBLE_DEVICES=)"
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _INTERFACE)
    _groups.init_process_group(
        "gloo" if where.type == "cpu" else "nccl", store=store, rank=rank, world_size=ranks, timeout=_PATIENCE,
        device_id=None if where.type == "cpu" else where,
    )  # fmt: skip


def refuse_missing(device: str, ranks: int) -> None:
    """Raise ``RefusedError`` unless there is a device for each rank from ``device`` on."""
    first = int(device.partition(":")[2] or 0)
    there = torch.cuda.device_count()
    if device != "cpu" and first + ranks > there:
        raise RefusedError(
            f"--tensor-parallel {ranks} --device {device} needs the CUDA devices {first} to {first + ranks - 1}, there "
            f"are {there}, counted from 0: lower --tensor-parallel"
        )
