"""shell: carries a step's index and row tables to the device through rotating pinned tables.

A table is written again only once its step has landed: raised otherwise, since a copy in flight would carry the next
step's numbers into this one. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from common.errors import InvariantError
from common.limits import STEP_TABLES_COUNT
from worker.engine.device import Device, Event, QueueName
from worker.engine.sampler import Chances
from worker.engine.step import PackedStep

_ROW_TABLES = 7
_CONTEXT_TABLES = 16
"""At most so many arrays of one 8-byte word a row, or a context, are in one step (``step.PackedStep``)."""
_PADDING_WORDS = 64


@dataclass(slots=True, eq=False)
class Upload:
    """A step's tables on their way: which of the rotating tables, and where each array lies in it."""

    index: int
    words: int
    event: Event
    """The copy is over; given back by ``fetch``."""
    places: dict[str, tuple[int, int, torch.dtype]]


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """A step's arrays on the device; names as in ``PackedStep``. Private to the step: nothing overwrites them."""

    arrays: dict[str, torch.Tensor]
    chances: Chances | None

    def get(self, name: str) -> torch.Tensor | None:
        """None when the step has no such array."""
        return self.arrays.get(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]


class Tables:
    """``rows_max`` new rows and ``contexts_max`` contexts a step at most, ``sampled_max`` rows that sample. One thread,
    the engine's."""

    def __init__(self, device: Device, rows_max: int, contexts_max: int, sampled_max: int) -> None:
        words = _ROW_TABLES * rows_max + _CONTEXT_TABLES * max(contexts_max, sampled_max) + _PADDING_WORDS
        self._gpu = device
        self._host = [device.allocate_host((words,), torch.int64) for _ in range(STEP_TABLES_COUNT)]
        self._views = [table.numpy() for table in self._host]
        self._device = [device.allocate_device((words,), torch.int64) for _ in range(STEP_TABLES_COUNT)]
        self._tokens = [device.allocate_host((sampled_max,), torch.int64) for _ in range(STEP_TABLES_COUNT)]
        self._sampled = [device.allocate_device((sampled_max,), torch.int64) for _ in range(STEP_TABLES_COUNT)]
        self._busy: list[int | None] = [None] * STEP_TABLES_COUNT
        self._turn = 0

    def upload(self, packed: PackedStep) -> Upload:
        """Write the next table and put its copy on the host-to-device queue."""
        index = self._turn % STEP_TABLES_COUNT
        self._turn += 1
        if self._busy[index] is not None:
            raise InvariantError(f"table {index} of step {self._busy[index]} is written again for step {packed.step}")
        self._busy[index] = packed.step
        self._gpu.host_write(self._host[index], f"tables of step {packed.step}")
        places: dict[str, tuple[int, int, torch.dtype]] = {}
        at = self._put(index, 0, packed.longs, torch.int64, places)
        at = self._put(index, at, packed.ints, torch.int32, places)
        at = self._put(index, at, packed.floats, torch.float32, places)
        queue = self._gpu.queue(QueueName.H2D)
        self._gpu.copy(queue, self._device[index][:at], self._host[index][:at], f"tables of step {packed.step}")
        return Upload(index, at, self._gpu.record(queue), places)

    def fetch(self, upload: Upload, packed: PackedStep) -> StepTensors:
        """On the compute queue, once they are there: a private copy of the tables, as views by name. The wait stands
        here and not in ``upload``: there it would hold the step before, which is still being put on the queue."""
        table = self._device[upload.index][: upload.words]
        compute = self._gpu.queue(QueueName.COMPUTE)
        self._gpu.wait(compute, upload.event)
        self._gpu.release(upload.event)
        copy = self._gpu.launch(compute, table.clone, (table,), (), "fetch tables")
        if copy is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        arrays = {}
        for name, (at, count, dtype) in upload.places.items():
            wide = dtype is torch.int64
            words = copy[at : at + (count if wide else (count + 1) // 2)]
            arrays[name] = words if wide else words.view(dtype)[:count]
        chances = None
        if packed.floats:
            chances = Chances(
                arrays["temperature"], arrays["top_p"], arrays["chance"], arrays["top_k"], arrays.get("min_p")
            )
        return StepTensors(arrays, chances)

    def tokens(self, upload: Upload, count: int) -> torch.Tensor:
        """Where the host will read the step's sampled tokens: (count,) int64, pinned."""
        return self._tokens[upload.index][:count]

    def sampled(self, upload: Upload, count: int) -> torch.Tensor:
        """Where the device keeps them until they are copied: (count,) int64."""
        return self._sampled[upload.index][:count]

    def release(self, upload: Upload) -> None:
        """The step has landed."""
        self._busy[upload.index] = None

    def close(self) -> None:
        """Give the memory back, after a proved end only."""
        self._views = []
        for table in (*self._host, *self._tokens):
            self._gpu.free_host(table)

    def _put(
        self,
        index: int,
        at: int,
        arrays: Mapping[str, npt.NDArray[Any]],
        dtype: torch.dtype,
        places: dict[str, tuple[int, int, torch.dtype]],
    ) -> int:
        view = self._views[index]
        for name, array in arrays.items():
            words = array.size if dtype is torch.int64 else (array.size + 1) // 2
            if at + words > view.size:
                raise InvariantError(f"the tables of one step need more than {view.size} words")
            target = view[at : at + words]
            (target if dtype is torch.int64 else target.view(array.dtype))[: array.size] = array
            places[name] = (at, array.size, dtype)
            at += words
        return at
