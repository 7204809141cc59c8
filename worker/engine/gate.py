"""shell: a gate that holds one queue of a device, so that what should wait for it is seen to wait: for race controls.

On CUDA a stream memory operation waits for a word of mapped host memory; on the virtual device the scheduler leaves the
queue alone. Only self-checks and tests hold queues. Knows no program.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from worker.engine.device import Device, QueueName
from worker.engine.pinned import check


class Gate:
    """Shut when made. Whoever makes one opens it, or the device never ends."""

    def __init__(self, device: Device, name: QueueName) -> None:
        self._device = cast(Any, device)
        self._name = name
        self._word: torch.Tensor | None = None
        if device.kind != "cuda":
            self._device.hold(name)
            return
        from cuda.bindings import driver  # a machine without a GPU lacks it

        self._word = device.allocate_host((1,), torch.int32)
        at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        pointer = device.host_rows(self._word).data_ptr()
        check(driver, driver.cuStreamWaitValue32(device.queue(name).handle, pointer, 1, at_least), "hold a queue")

    def open(self) -> None:
        """Let the queue go on."""
        if self._word is None:
            self._device.let_go(self._name)
        else:
            self._word.fill_(1)
