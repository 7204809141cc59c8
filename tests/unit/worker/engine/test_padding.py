"""Which shapes decode steps take: few, never smaller than what they hold, and the same whatever route a step takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.limits import GRAPH_HISTORY_MIN_TOKENS
from worker.engine.padding import padded_history, padded_rows


@given(st.integers(1, 5000))
def test_rows_are_padded_by_a_quarter_at_most(rows: int) -> None:
    """In life: every row of padding is computed and thrown away."""
    padded = padded_rows(rows)
    assert rows <= padded <= rows * 5 // 4
    assert padded_rows(padded) == padded
    assert padded == rows or rows > 8


@given(st.integers(1, 2_000_000))
def test_a_history_is_rounded_by_an_eighth_at_most(rows: int) -> None:
    """In life: a kernel splits a longest history that is not there; it must not cost."""
    padded = padded_history(rows)
    assert max(rows, GRAPH_HISTORY_MIN_TOKENS) <= padded
    assert padded <= max(GRAPH_HISTORY_MIN_TOKENS, rows * 9 // 8)


def test_few_shapes_serve_a_whole_service() -> None:
    """In life: each shape is captured once, and each capture costs tens of milliseconds."""
    assert len({padded_rows(rows) for rows in range(1, 257)}) == 28
    assert len({padded_history(rows) for rows in range(1, 131_073)}) == 49
