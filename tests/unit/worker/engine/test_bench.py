"""The bench on the CPU: its figures agree with each other and its gate compares something."""

from __future__ import annotations

import pytest

from common.errors import UsageError
from worker.engine.bench import TAIL_STEPS, WARM_STEPS, BenchSettings, bench


@pytest.mark.parametrize("fill", ["prefill", "random"])
def test_figures_follow_from_what_was_measured(fill: str) -> None:
    """In life: a small shape on a CPU; histories computed, or made up and said to be."""
    found = bench(BenchSettings("tiny", contexts=2, length=40, steps=3, fill=fill, page_tokens=16, chunk_tokens=32))
    assert found["bitwise"] is True
    assert found["resident_repeats"] is True
    assert found["bitwise_steps"] >= WARM_STEPS + 3 + TAIL_STEPS - 1
    assert found["fill"] == fill
    assert (found["prefill_tokens_s"] is None) == (fill == "random")
    assert found["of_floor"] == pytest.approx(found["tokens_s"] / found["floor_tokens_s"], abs=1e-4)
    assert found["tokens_s"] == pytest.approx(2000 / found["ms_step"], rel=0.01)
    assert found["peak_gb"] is None


@pytest.mark.parametrize("wrong", [{"contexts": 0}, {"length": 1}, {"fill": "zeros"}, {"geometry": "d17"}])
def test_a_wrong_question_is_refused(wrong: dict[str, object]) -> None:
    """In life: a flag that cannot work."""
    with pytest.raises(UsageError):
        bench(BenchSettings(**({"geometry": "tiny", "length": 8} | wrong)))  # type: ignore[arg-type]
