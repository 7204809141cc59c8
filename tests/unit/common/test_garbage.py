"""Looking for cycles costs little, and finds them all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from common import garbage, limits


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_is_there_is_left_alone_and_cycles_still_go() -> None:
    """A broker runs for months: a library's cycle must not stay for ever."""
    garbage.calm()
    assert gc.get_freeze_count() > 0
    gone = weakref.ref(Node())
    pile = [[] for _ in range(2 * limits.GARBAGE_YOUNG_COUNT)]  # as many new containers as make it look
    assert pile
    assert gone() is None
