"""shell: how much memory of a device is in use, all of it, and who says so. For measurements; decides nothing."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from worker.engine.device import Device


def device_bytes(device: Device) -> tuple[int, str | None]:
    """Device memory in use as the driver sees it (weights, pools, workspaces, the context itself), and who said so."""
    if device.torch_device.type != "cuda":
        return 0, None
    index = device.torch_device.index or 0
    try:
        nvml: Any = importlib.import_module("pynvml")  # not required: the driver's own figure stands in for it
    except ImportError:
        return _driver_bytes(index)
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used), "nvml"
    except nvml.NVMLError:
        return _driver_bytes(index)


def _driver_bytes(index: int) -> tuple[int, str]:
    free, total = torch.cuda.mem_get_info(index)
    return total - free, "cudaMemGetInfo"
