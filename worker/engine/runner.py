"""shell: how a worker gets its engine: the device of ``--device``, the model of ``--model``, then ``Engine``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from common import log
from common.config import EngineSettings
from common.errors import RefusedError
from worker.engine.device import Device
from worker.engine.engine import Engine
from worker.engine.fit import fit
from worker.engine.geometry import TESTED_TYPES
from worker.engine.model import LoadedModel, from_folder
from worker.engine.virtual_device import VirtualDevice
from worker.model_store import ensure

__all__ = ["Engine", "LoadedModel", "load", "open_device"]


def open_device(name: str, threads: int = 0) -> Device:
    """The device of ``--device``: ``cpu`` or ``cuda:N``. Raises ``RefusedError`` when there is none. With ``cpu`` torch
    computes on ``threads`` cores, or on half of them: the rest is for sessions and brokers beside it.
    """
    if name == "cpu":
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // 2))
        return VirtualDevice()
    if not torch.cuda.is_available():
        raise RefusedError(f"--device {name}: this machine has no CUDA device that torch can use; --device cpu works")
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise RefusedError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    from worker.engine.cuda_device import CudaDevice  # needs cuda-bindings, which a machine without a GPU lacks

    return CudaDevice(index)


def load(
    settings: EngineSettings, folder: Path | None = None, join: Callable[[Device], None] = lambda device: None
) -> LoadedModel:
    """The model of ``--model`` on the device of ``--device``; fetched first when it is one we know and is not there.
    ``folder`` overrides where its files are. With ``--tensor-parallel`` one rank's part; ``join`` finds the others.

    Blocks for as long as loading takes; on the engine's thread, since torch counts its processor threads by caller.
    Raises ``RefusedError`` naming the setting to change.
    """
    device = open_device(settings.device, settings.threads)
    join(device)
    place = folder or ensure(settings.model, log.get("engine").info)
    loaded = from_folder(place, device, settings.dtype, settings.context_tokens, settings.tensor_parallel)
    fit(loaded.geometry, settings)
    if loaded.geometry.model_type not in TESTED_TYPES:
        log.get("engine").warning("model type without tests of its own", model_type=loaded.geometry.model_type)
    return loaded
