"""shell: what the staging lifecycle costs the host: time spent in the transport's doors, less the device calls in them.

Leases, tickets, holds, generations and receipts are what is left: the part that exists for safety alone. The host works
while the device does, so that its share of a step is an upper bound of what the step pays. Used by the bench only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from worker.engine.transport import Transport

DOORS = ("stage", "before_attention", "attended", "write_back", "seal", "retire")
DEVICE_CALLS = ("record", "wait", "done", "release", "copy", "launch")


class LifecycleClock:
    """Times one transport from its making until ``stop``. One thread, the engine's."""

    def __init__(self, transport: Transport) -> None:
        self.doors_s = 0.0
        """Seconds in the transport's doors."""
        self.device_s = 0.0
        """Seconds of these in calls of the device: copies, launches, events."""
        self._inside = False
        self._wrapped: list[tuple[Any, str]] = []
        for name in DOORS:
            self._wrap(transport, name, self._door)
        for name in DEVICE_CALLS:
            self._wrap(transport.device, name, self._call)

    @property
    def lifecycle_s(self) -> float:
        """Seconds of the lifecycle itself."""
        return self.doors_s - self.device_s

    def stop(self) -> None:
        """Time nothing any more."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped.clear()

    def _wrap(self, owner: Any, name: str, how: Callable[[Any], Any]) -> None:
        setattr(owner, name, how(getattr(owner, name)))
        self._wrapped.append((owner, name))

    def _door(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside, began = True, time.perf_counter()
            try:
                return real(*arguments, **named)
            finally:
                self.doors_s += time.perf_counter() - began
                self._inside = False

        return timed

    def _call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if not self._inside:
                return real(*arguments, **named)
            began = time.perf_counter()
            try:
                return real(*arguments, **named)
            finally:
                self.device_s += time.perf_counter() - began

        return timed
