"""The same work through transformers: both sides run all of it, and say the same. No rate is judged."""

from __future__ import annotations

import pytest

from common.config import EngineSettings
from worker.engine import versus
from worker.engine.versus import Requests

SETTINGS = EngineSettings("tiny", concurrency=3, page_tokens=16)


def test_both_sides_answer_every_request_alike() -> None:
    """Mixed prompts and answers, more requests than run at once: greedy token ids are equal, all are counted."""
    found = versus.of_requests(SETTINGS, Requests(5, (3, 20), (2, 9)), beside=True, rounds=1)
    prompts, answers = Requests(5, (3, 20), (2, 9)).drawn(257)
    assert found["prompt_tokens"] == sum(map(len, prompts))
    assert found["output_tokens"] == sum(answers)
    assert found["same_answers_generate"] == found["requests"] == 5
    assert found["of_generate"] > 0


def test_control_another_answer_is_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of equal answers can fail: one token more on the other side, and none is the same."""

    def off(module: object, prompts: object, answers: list[int]) -> tuple[float, list[list[int]]]:
        return 1.0, [[0] * (count + 1) for count in answers]

    monkeypatch.setitem(versus.OTHERS, "generate", off)
    found = versus.of_requests(SETTINGS, Requests(4, (3, 20), (2, 9)), beside=True, rounds=1)
    assert found["same_answers_generate"] == 0


def test_decode_over_made_up_histories_counts_steps() -> None:
    """The resident cache on any device; offloading needs one to offload from."""
    found = versus.decode_rates(versus.load_shape(SETTINGS, 64), 2, 40, 3, ours=10.0)
    assert set(found) == {"transformers_resident_tokens_s", "of_transformers_resident"}
    assert found["of_transformers_resident"] == pytest.approx(10.0 / found["transformers_resident_tokens_s"], abs=0.001)
