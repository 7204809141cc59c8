"""shell: records what is launched into a CUDA graph, on a stream of its own that is no managed queue (Q2).

Recording runs nothing and waits for nothing: the framework's own way to capture synchronises the device first, and so
is not used. All graphs share one pool of memory, as they never run at once: each leaves what it gives in memory that
its caller made before. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from worker.engine.device import CaptureError, Queue, QueueName, Replay

T = TypeVar("T")
CUDA: Any = torch.cuda


class Recorder:
    """Of one device; ``stream`` is for it alone. One thread, the engine's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool: Any = None
        self.recording = False

    def record(self, fn: Callable[[], None]) -> Replay:
        """The launches of ``fn`` as a graph. Whatever fails in it is raised once the capture has ended."""
        if self._pool is None:
            self._pool = CUDA.graph_pool_handle()
        graph = CUDA.CUDAGraph()
        self.recording = True
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    fn()
                finally:
                    graph.capture_end()
        finally:
            self.recording = False
        found: Replay = graph
        return found

    def launched(self, queue: Queue, fn: Callable[[], T], label: str) -> T:
        """A launch while recording: it goes where the capture is."""
        if queue.name is not QueueName.COMPUTE:
            raise CaptureError(f"launch '{label}' on {queue.name.value} in a step that is being recorded")
        return fn()
