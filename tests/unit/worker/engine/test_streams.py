"""Dedicated means distinct handles (Q5), and no managed stream is captured (Q2): the rules, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import pytest

from worker.engine.device import CaptureError, QueueName, SharedQueueError
from worker.engine.streams import assert_distinct, dedicated, refuse_capture


@dataclass(frozen=True)
class Stream:
    cuda_stream: int


def round_robin(count: int) -> object:
    """The framework's pool: the same handles again and again."""
    handles = cycle(range(1, count + 1))
    return lambda: Stream(next(handles))


def test_queues_get_handles_of_their_own() -> None:
    """At start, whatever else has asked the framework for streams before."""
    streams = dedicated(list(QueueName), round_robin(32), reserved={0})  # type: ignore[arg-type]
    assert len({stream.cuda_stream for stream in streams.values()}) == len(QueueName)


def test_a_handle_seen_before_is_passed_over() -> None:
    """The pool returns one stream for two queues: the second asks again."""
    handles = iter([5, 5, 0, 5, 6, 5, 6, 7, 8])
    streams = dedicated(list(QueueName), lambda: Stream(next(handles)), reserved={0})
    assert [stream.cuda_stream for stream in streams.values()] == [5, 6, 7, 8]


def test_a_pool_with_too_few_streams_is_refused() -> None:
    """Two queues can never be dedicated there: said by name, not found as a race."""
    with pytest.raises(SharedQueueError, match="no stream of its own"):
        dedicated(list(QueueName), round_robin(3))  # type: ignore[arg-type]


def test_two_queues_on_one_stream_are_refused() -> None:
    """The control: shared handles pass for queues until the day order is missing."""
    with pytest.raises(SharedQueueError, match="are one stream"):
        assert_distinct({"h2d": 7, "d2h": 8, "compute": 7})


def test_the_default_stream_is_nobodys_queue() -> None:
    """It synchronises with others implicitly, and everybody uses it."""
    with pytest.raises(SharedQueueError, match="not ours"):
        assert_distinct({"h2d": 0}, reserved={0})


def test_capture_is_refused_by_name() -> None:
    """A graph captured over a managed stream would replay its waits without its copies."""
    refuse_capture(False, "launch")
    with pytest.raises(CaptureError, match="launch"):
        refuse_capture(True, "launch")
