"""shell: the bytes a tensor touches, as address ranges, for the virtual device's checks. Knows no queue, no clock."""

from __future__ import annotations

from itertools import product

import torch

from common.errors import InvariantError
from worker.engine.shadow import Ranges

RANGES_MAX_COUNT = 1 << 16
"""More pieces than this in one tensor: list its rows apart instead."""


def ranges_of(tensor: torch.Tensor) -> Ranges:
    """The exact byte ranges of a strided CPU tensor: disjoint and ascending; () when it has no element."""
    if tensor.numel() == 0:
        return ()
    start, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return ((start, start + tensor.numel() * size),)
    axes = sorted(
        (stride, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True) if count > 1 and stride
    )
    run = 1
    while axes and axes[0][0] <= run:  # a dense (or overlapping) axis lengthens the run
        stride, count = axes.pop(0)
        run = (count - 1) * stride + run
    pieces = 1
    for _, count in axes:
        pieces *= count
    if pieces > RANGES_MAX_COUNT:
        raise InvariantError(f"a tensor of {pieces} separate pieces is too scattered to check")
    offsets = sorted({sum(steps) for steps in product(*(range(0, stride * count, stride) for stride, count in axes))})
    merged: list[tuple[int, int]] = []
    for offset in offsets:
        low, high = start + offset * size, start + (offset + run) * size
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's bytes, uint8, one axis: NaN equals itself here."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def returned_tensors(value: object) -> list[torch.Tensor]:
    """The tensors in what a launch returned: itself, or within lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in returned_tensors(item)]
    return []
