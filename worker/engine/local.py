"""shell: an engine with a ring of its own on the calling thread: for measuring and for tests, without a session.

Takes prompts as lists of token ids, steps until all is answered. Knows no broker and no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count

import torch

from common.config import EngineSettings
from common.errors import InvariantError
from common.messages import LineRef
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import HostRingMemory, RingMemory
from ring.producer import Producer
from worker.engine.callbacks import Watch
from worker.engine.engine import Engine
from worker.engine.model import LoadedModel
from worker.engine.transport import Quarantine
from worker.structures import Finished, Guide, Request, Sampling, SharedPrefix

RING_ENTRIES_COUNT = 64


class LocalEngine:
    """``ring_bytes`` is a power of two. One thread: the one that makes it steps it."""

    def __init__(
        self, loaded: LoadedModel, settings: EngineSettings, *, ring_bytes: int = 1 << 20, watch: Watch | None = None
    ) -> None:
        self.memory = ring_memory(loaded, ring_bytes, RING_ENTRIES_COUNT)
        self.producer = Producer(
            self.memory, Accounting(ring_bytes, RING_ENTRIES_COUNT), identity=lambda item: getattr(item, "ref", item)
        )
        self.finished: dict[int, Finished] = {}
        """By the number ``submit`` gave."""
        self.admitted: list[Request] = []
        self.engine = Engine(loaded, Consumer(self.producer), settings, self._finish, self.admitted.append, watch=watch)
        self._numbers = count()
        self._keeping = settings.draft_tokens > 0 or settings.tensor_parallel > 1

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        shared: Sequence[SharedPrefix | None] | None = None,
        guides: Sequence[Guide | None] | None = None,
        pieces: Sequence[tuple[int, ...]] | None = None,
    ) -> list[int]:
        """Publish one batch, each prompt with what it shares, what guides it, and the lengths of its inputs if they are
        to be embedded; the numbers of its requests."""
        numbers, batch, nothing = [], [], [None] * len(prompts)
        for prompt, sampling, prefix, guide, inputs in zip(
            prompts, samplings, shared or nothing, guides or nothing, pieces or [()] * len(prompts), strict=True
        ):
            number = next(self._numbers)
            request = Request(LineRef("local", number, 1), "/v1/completions", "local", len(prompt), sampling, prefix)
            numbers.append(number)
            ids = array("i", prompt)
            text = ids if self._keeping else None
            batch.append((request._replace(text=text, guide=guide, pieces=inputs), ids))
        if self.producer.publish(f"local-{numbers[0] if numbers else 0}", batch) is None:
            raise InvariantError("the local ring is full: make it larger")
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ask for requests to be stopped, as a session does."""
        self.producer.cancel([LineRef("local", number, 1) for number in numbers])

    def step(self) -> bool:
        """One step on the compute queue; False when there was nothing to do."""
        with self.engine.device.running(), torch.no_grad():
            worked = self.engine.step()
        self.producer.poll()
        return worked

    def run(self) -> dict[int, Finished]:
        """Step until nothing is left to do: what finished, by number."""
        while self.step():
            pass
        return self.finished

    def close(self) -> Quarantine:
        """End the engine, then its ring."""
        ended = self.engine.close()
        if ended.proved:
            self.memory.close()
        return ended

    def _finish(self, finished: Finished) -> None:
        number = finished.request.ref.index
        if number in self.finished:
            raise InvariantError(f"request {number} finished twice")
        self.finished[number] = finished
        self.producer.resolve()


def ring_memory(loaded: LoadedModel, ring_bytes: int, entries: int) -> RingMemory:
    """Pages of a ring for the model's device."""
    if loaded.device.kind != "cuda":
        return HostRingMemory(ring_bytes, entries)
    from ring.cuda_memory import CudaRingMemory  # needs cuda-bindings, which a machine without a GPU lacks

    return CudaRingMemory(ring_bytes, entries, device=loaded.device.torch_device.index or 0)
