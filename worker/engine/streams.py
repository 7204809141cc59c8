"""shell: dedicated streams have distinct handles (Q5), and none of them is being captured (Q2).

The framework hands streams out round robin from a pool of 32, so two streams asked for apart can be one. Knows neither
what a queue is for nor how streams are made: a factory is an argument, so that the rule is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

from worker.engine.device import CaptureError, SharedQueueError

TRIES_MAX_COUNT = 128
"""Streams asked for before giving up on a distinct one: four rounds of the framework's pool."""


class StreamLike(Protocol):
    """What a stream must show."""

    @property
    def cuda_stream(self) -> int: ...


Name = TypeVar("Name", bound=Hashable)
Stream = TypeVar("Stream", bound=StreamLike)


def dedicated(names: Sequence[Name], make: Callable[[], Stream], reserved: Collection[int] = ()) -> dict[Name, Stream]:
    """One stream for each name, no two with one handle and none of ``reserved`` (the default stream: 0)."""
    streams: dict[Name, Stream] = {}
    taken = set(reserved)
    for name in names:
        for _ in range(TRIES_MAX_COUNT):
            stream = make()
            if stream.cuda_stream not in taken:
                break
        else:
            raise SharedQueueError(f"no stream of its own for {name}: {len(taken)} handles are taken")
        taken.add(stream.cuda_stream)
        streams[name] = stream
    assert_distinct({name: stream.cuda_stream for name, stream in streams.items()}, reserved)
    return streams


def assert_distinct(handles: Mapping[Name, int], reserved: Collection[int] = ()) -> None:
    """Raise ``SharedQueueError`` unless every queue has a handle of its own."""
    owners: dict[int, Name] = {}
    for name, handle in handles.items():
        if handle in owners:
            raise SharedQueueError(f"{name} and {owners[handle]} are one stream, {handle:#x}")
        if handle in reserved:
            raise SharedQueueError(f"{name} is a stream that is not ours, {handle:#x}")
        owners[handle] = name


def refuse_capture(capturing: bool, what: str) -> None:
    """Raise ``CaptureError`` for an operation on a managed stream that is being captured."""
    if capturing:
        raise CaptureError(f"{what}: a managed stream is being captured into a graph; capture on a stream of its own")
