"""shell: what a measurement was made on and with: the device, its memory in use and who says so, versions."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version
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


def device_name(device: Device) -> str:
    """What was measured on."""
    if device.torch_device.type == "cuda":
        return str(torch.cuda.get_device_name(device.torch_device))
    return f"{device.name} ({platform.machine()})"


def versions() -> dict[str, str | None]:
    """What was measured with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch_cuda": torch.version.cuda}
    for name in ("haulier", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
