"""Embeddings through the whole engine, beside the mean of the model's last hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.worker.engine import rigs
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.pooling import Pooling
from worker.structures import Finished, Sampling, Shape

EMBED = Sampling(1, shape=Shape(pool="float"))
PIECES = (5, 21, 1, 8)
"""Shorter and longer than a chunk of eight rows."""


def expected(ids: list[int]) -> torch.Tensor:
    return rigs.model().module.model(torch.tensor([ids])).last_hidden_state[0].mean(0)


def run(temperament: Temperament = Temperament.EAGER, **changes: Any) -> tuple[dict[int, Finished], LocalEngine]:
    """One request of four inputs, two of one, a generating one among them; more than segments."""
    local = LocalEngine(rigs.model(temperament), rigs.settings(**changes))
    several = [token for piece, length in enumerate(PIECES) for token in rigs.prompt(length, piece)]
    local.submit(
        [several, rigs.prompt(9, 7), rigs.prompt(30, 8), rigs.prompt(3, 9)],
        [EMBED, Sampling(6), EMBED, EMBED],
        pieces=[PIECES, (), (30,), (3,)],
    )
    finished = local.run()
    rigs.at_rest(local)
    return finished, local


@pytest.mark.parametrize(
    "changes", [{}, {"retain": "on"}, {"residency": "full", "graphs": "on"}, {"draft_tokens": 2}], ids=str
)
@pytest.mark.parametrize("temperament", [Temperament.EAGER, Temperament.LATE, Temperament.RANDOM])
def test_an_embedding_is_the_mean_of_the_last_hidden_states(temperament: Temperament, changes: dict[str, Any]) -> None:
    """Prompts in chunks, beside decodes, on each route; who generates beside them is not touched."""
    finished, local = run(temperament, **changes)
    assert local.close().proved
    prompts = [rigs.prompt(length, piece) for piece, length in enumerate(PIECES)]
    for choice, prompt in zip(finished[0].choices, prompts, strict=True):
        torch.testing.assert_close(torch.tensor(choice.vector), expected(prompt), atol=2e-5, rtol=1e-4)
        assert choice.token_ids == ()
    for number, (length, salt) in ((2, (30, 8)), (3, (3, 9))):
        found = torch.tensor(finished[number].vector)
        torch.testing.assert_close(found, expected(rigs.prompt(length, salt)), atol=2e-5, rtol=1e-4)
    assert list(finished[1].token_ids) == rigs.expected(rigs.model(), rigs.prompt(9, 7), 6)


def test_a_sum_that_is_not_begun_anew_is_another_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a segment's next owner would find the sum of the last."""
    whole = Pooling._add

    def never(self: Any, segment: int, rows: torch.Tensor, *, begins: bool) -> None:
        whole(self, segment, rows, begins=False)

    monkeypatch.setattr(Pooling, "_add", never)
    finished, _ = run(concurrency=1)
    assert not torch.allclose(torch.tensor(finished[3].vector), expected(rigs.prompt(3, 9)), atol=1e-3)


def test_a_model_that_embeds_for_nobody_has_no_hook() -> None:
    """In life: nearly all workers. The first who asks puts it there, the end takes it off."""
    loaded = rigs.model()
    local = LocalEngine(loaded, rigs.settings())
    local.submit([rigs.prompt(5)], [Sampling(3)])
    local.run()
    assert not loaded.module.base_model._forward_hooks
    local.submit([rigs.prompt(5)], [EMBED], pieces=[(5,)])
    local.run()
    assert loaded.module.base_model._forward_hooks
    assert local.close().proved
    assert not loaded.module.base_model._forward_hooks


def test_a_piece_too_long_for_a_context_fails_the_request() -> None:
    """The engine's own check, whatever prepared it: the longest piece counts, not all together."""
    local = LocalEngine(rigs.model(), rigs.settings())
    local.submit([rigs.prompt(60), rigs.prompt(60)], [EMBED, EMBED], pieces=[(30, 30), (10, 50)])
    finished = local.run()
    assert finished[0].reason == "length"
    assert (finished[1].reason, len(finished[1].vector)) == ("failed", 0)
