"""shell: embeddings: the mean of a prompt's last hidden states, summed on the device chunk by chunk.

A hook on the model keeps each pass's last hidden states while somebody asks; it is put there for the first who does.
Sums are float32, a row a segment. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from common.errors import InvariantError
from common.limits import STEP_TABLES_COUNT
from worker.engine.contexts import Context
from worker.engine.device import Device, Queue, QueueName
from worker.engine.landing import Enqueued
from worker.structures import Pooled


class Pooling:
    """``module`` is the language model, ``segments`` the most contexts at once. One thread, the engine's."""

    def __init__(self, device: Device, module: Any, segments: int) -> None:
        self._gpu, self._module, self._segments = device, module, segments
        self._asking: set[int] = set()
        self._hidden: torch.Tensor | None = None
        self._hook: Any = None
        self._sums: torch.Tensor | None = None
        self._means: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        self._told: list[list[int]] = [[] for _ in range(STEP_TABLES_COUNT)]
        """Of each rotating table: sampled rows whose contexts are whole with it."""

    def begin(self, context: Context) -> None:
        """A prompt that will be pooled."""
        self._asking.add(context.number)
        if self._hook is None:
            self._hook = self._module.base_model.register_forward_hook(self._keep)

    def end(self, number: int) -> None:
        """It is over, told or not."""
        self._asking.discard(number)

    def _keep(self, module: Any, arguments: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state[0] if self._asking else None

    def pool(self, now: Enqueued) -> None:
        """After a step's pass: add the rows of prompts that are pooled; those that are whole are told with it."""
        if not self._asking:
            return
        index, hidden = now.upload.index, self._hidden
        row, first = 0, 0
        told: list[int] = []
        for share in now.packed.plan.shares:
            if share.context.number in self._asking:
                if hidden is None:
                    raise InvariantError("the model's pass left no hidden states")
                self._add(share.page.index, hidden[first : first + share.rows], begins=share.start == 0)
                if share.samples:
                    self._mean(index, len(told), share.page.index, share.context.prompt_tokens)
                    told.append(row)
            first += share.rows
            row += share.sampled_rows
        self._told[index] = told
        self._hidden = None

    def bring(self, now: Enqueued, back: Queue) -> None:
        """Send means to the host; ``back`` comes after them."""
        index = now.upload.index
        if count := len(self._told[index]):
            self._gpu.copy(back, self._host[index][:count], self._means[index][:count], "embeddings")

    def on_host(self, now: Enqueued) -> list[torch.Tensor]:
        """What the step brought back, to be read once it is over."""
        index = now.upload.index
        count = len(self._told[index])
        return [self._host[index][:count]] if count else []

    def told(self, now: Enqueued) -> dict[int, Pooled]:
        """By sampled row, once the step is over; then forgotten."""
        brought = self.on_host(now)
        rows, self._told[now.upload.index] = self._told[now.upload.index], []
        return (
            {row: Pooled(tuple(values)) for row, values in zip(rows, brought[0].tolist(), strict=True)} if rows else {}
        )

    def close(self) -> None:
        """Take the hook off; give host memory back, after a proved end only."""
        if self._hook is not None:
            self._hook.remove()
        for table in self._host:
            self._gpu.free_host(table)

    def _add(self, segment: int, rows: torch.Tensor, *, begins: bool) -> None:
        if self._sums is None:
            shape = (self._segments, rows.shape[-1])
            self._sums = self._gpu.allocate_device(shape, torch.float32)
            self._means = [self._gpu.allocate_device(shape, torch.float32) for _ in self._told]
            self._host = [self._gpu.allocate_host(shape, torch.float32) for _ in self._told]
        added = rows.float().sum(dim=0)
        self._sums[segment] = added if begins else self._sums[segment] + added

    def _mean(self, index: int, place: int, segment: int, count: int) -> None:
        if self._sums is None:
            raise InvariantError(f"segment {segment} has no sum")
        mean, kept = self._sums[segment] / count, self._means[index][place]

        def keep() -> None:
            kept.copy_(mean)

        self._gpu.launch(self._gpu.queue(QueueName.COMPUTE), keep, (), (kept,), "keep an embedding")
