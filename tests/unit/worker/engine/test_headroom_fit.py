"""How much headroom there is: the arithmetic at start, refusals with the setting, and no flapping afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import GIB, EngineSettings
from common.errors import RefusedError
from worker.engine.headroom_fit import change, chunks_at_start


def start(free_gib: float, pages_of_all: int = 10_000, chunk_pages: int = 64, **changes: Any) -> tuple[int, str]:
    """As with so much free after warm-up."""
    settings = EngineSettings("m", **changes)
    return chunks_at_start(settings, int(free_gib * GIB), GIB, chunk_pages, pages_of_all)


def test_the_arithmetic_is_printed_with_its_numbers() -> None:
    """In life: what an operator reads at start."""
    assert start(100.5, headroom_gib="auto") == (
        98,
        "headroom = min(auto asked, free 100.500 GiB after warm-up - reserve 2 GiB, 157 chunks hold all histories) "
        "= 98 chunks of 1 GiB = 6272 pages",
    )
    assert start(100.5, headroom_gib="8")[0] == 8
    assert start(100.5) == (0, "headroom = 0: --headroom-gib is 0")


def test_more_than_all_histories_is_not_taken() -> None:
    """In life: a card with much free memory and small requests."""
    assert start(100, 65, headroom_gib="auto")[0] == 2
    assert start(100, 65, headroom_gib="8")[0] == 2


def test_what_is_not_free_is_refused_by_name_or_shrunk() -> None:
    """A6: the numbers and the settings to change."""
    with pytest.raises(RefusedError, match=r"--headroom-gib 8: 9\.500 GiB .* --headroom-reserve-gib 2 that is 7 GiB"):
        start(9.5, headroom_gib="8")
    assert start(9.5, headroom_gib="8", fit="shrink")[0] == 7
    assert start(9.5, headroom_gib="8", headroom_reserve_gib=1.0)[0] == 8
    assert start(1.0, headroom_gib="auto")[0] == 0
    with pytest.raises(RefusedError, match="--page-tokens"):
        start(9.5, headroom_gib="1", chunk_pages=0)


def test_large_numbers_are_written_out() -> None:
    """A reserve beyond what any card has: its digits, no power of ten."""
    with pytest.raises(RefusedError, match=r"--headroom-reserve-gib 1048576 that is 0 GiB"):
        start(9.5, headroom_gib="8", headroom_reserve_gib=float(1 << 20))


def test_pressure_takes_chunks_and_quiet_gives_them_back_one_at_a_time() -> None:
    """In life: another process takes memory and ends."""
    assert change(1 * GIB, 2 * GIB, GIB, 4, 0, 4, 0) == -1
    assert change(0, int(2.5 * GIB), GIB, 4, 0, 4, 0) == -3
    assert change(0, 9 * GIB, GIB, 4, 0, 4, 0) == -4
    assert change(0, 2 * GIB, GIB, 4, 2, 4, 0) == 0, "two are on their way back"
    assert change(4 * GIB, 2 * GIB, GIB, 2, 0, 4, 0) == 1
    assert change(4 * GIB, 2 * GIB, GIB, 2, 0, 4, 3) == 0, "one was given back just now"
    assert change(4 * GIB - 1, 2 * GIB, GIB, 2, 0, 4, 0) == 0, "it would be near the reserve at once"
    assert change(9 * GIB, 2 * GIB, GIB, 4, 0, 4, 0) == 0


@given(st.integers(0, 64), st.integers(0, 16), st.integers(0, 8), st.integers(0, 8))
def test_it_comes_to_rest_whatever_is_free(free: int, reserve: int, held: int, most: int) -> None:
    """With nobody else taking memory, at most ``held`` are given back or ``most`` taken, and then nothing changes:
    taking one never leads to giving it back."""
    held = min(held, most)
    turns = []
    for _ in range(40):
        turns.append(change(free, reserve, 1, held, 0, most, 0))
        held, free = held + turns[-1], free - turns[-1]
        assert 0 <= held <= most
    assert turns[-1] == 0
    assert not (any(turn > 0 for turn in turns) and any(turn < 0 for turn in turns))
