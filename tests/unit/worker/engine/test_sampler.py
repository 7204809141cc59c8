"""Choosing tokens: greedy, the distribution of warm rows, top_k, top_p, and chance that knows no neighbours."""

from __future__ import annotations

import torch

from worker.engine.sampler import Chances, choose
from worker.engine.sampling import uniform

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0, -4.0]])


def draw(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """``count`` draws from ``LOGITS``, one row each."""
    chances = Chances(
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.tensor([uniform(7, number) for number in range(count)]),
        torch.full((count,), top_k),
    )
    return choose(LOGITS.expand(count, -1), chances)


def test_greedy_is_the_largest_logit() -> None:
    """Temperature 0, alone or beside warm rows."""
    assert choose(LOGITS, None).tolist() == [1]
    assert set(draw(20, temperature=0.0).tolist()) == {1}


def test_warm_rows_follow_the_softmax() -> None:
    """20,000 draws are within four standard deviations of their probability."""
    count = 20_000
    drawn = torch.bincount(draw(count), minlength=5).double() / count
    wanted = LOGITS[0].double().softmax(0)
    assert bool(((drawn - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt() + 1e-4).all())


def test_top_k_and_top_p_leave_what_they_say() -> None:
    """top_k 2 leaves two; top_p 0.7 leaves those whose mass before them is below 0.7; at least one always stays."""
    assert set(draw(500, top_k=2).tolist()) == {1, 2}
    assert set(draw(500, top_p=0.7).tolist()) == {1, 2}
    assert set(draw(500, top_p=1e-9).tolist()) == {1}
    assert set(draw(500, top_k=3, top_p=0.99).tolist()) <= {1, 2, 3}


def test_chance_is_the_seed_s_and_the_token_s_own() -> None:
    """The same seed and number give the same chance; others do not; all lie in [0, 1)."""
    seen = {uniform(seed, number) for seed in range(-3, 50) for number in range(50)}
    assert len(seen) > 53 * 50 - 8  # of 2^24 numbers a pair may meet
    assert all(0 <= one < 1 for one in seen)
    assert uniform(5, 6) == uniform(5, 6)
    assert abs(sum(seen) / len(seen) - 0.5) < 0.02


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    """Whatever the batch: row for row the same token."""
    together = draw(64, top_k=4, top_p=0.95)
    for number in range(0, 64, 7):
        one = torch.tensor([uniform(7, number)])
        chances = Chances(torch.ones(1), torch.full((1,), 0.95), one, torch.full((1,), 4))
        assert choose(LOGITS, chances).tolist() == [int(together[number])]
