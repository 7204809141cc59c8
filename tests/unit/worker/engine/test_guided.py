"""Answers held to a form inside the engine: every mask knows every token before it, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.worker.engine import rigs
from worker.engine.engine import Engine
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.sampler import masked
from worker.engine.shaping import Shaping
from worker.structures import Sampling, Shape

WORDS = -(-rigs.VOCABULARY // 32)


class Rising:
    """A form of its own: each token larger than the one before, by at most ``step``; ``breaks_at`` it cannot go on."""

    def __init__(self, step: int, last: int = 0, breaks_at: int = 10**6) -> None:
        self.step, self.last, self.breaks_at = step, last, breaks_at
        self.words, self.error = WORDS, ""
        self.taken: list[int] = []

    @property
    def ended(self) -> bool:
        return self.last == rigs.VOCABULARY - 1

    def copy(self) -> Rising:
        return Rising(self.step, self.last, self.breaks_at)

    def take(self, token: int) -> None:
        self.taken.append(token)
        self.last = token
        if len(self.taken) >= self.breaks_at:
            self.error = "lost the thread"

    def mask_into(self, row: Any) -> None:
        bits = [0] * WORDS
        for token in range(self.last + 1, min(self.last + self.step, rigs.VOCABULARY - 1) + 1):
            bits[token // 32] |= 1 << token % 32
        row[:] = torch.tensor([one - (1 << 32) if one >> 31 else one for one in bits], dtype=torch.int32).numpy()


def run(temperament: Temperament = Temperament.EAGER, **changes: Any) -> dict[int, Any]:
    """Guided and free requests beside each other, more than segments."""
    local = LocalEngine(rigs.model(temperament), rigs.settings(**changes))
    guides = [Rising(9), None, Rising(5), Rising(40), None, Rising(3)]
    samplings = [
        Sampling(14, 0.9, seed=1, choices=2),
        Sampling(9),
        Sampling(20, shape=Shape(bias=((7, 5.0),), logprobs=1)),
        Sampling(20, 1.5, seed=3, shape=Shape(presence=1.0)),
        Sampling(12, 1.0, seed=4),
        Sampling(1),
    ]
    prompts = [rigs.prompt(5 + one, one) for one in range(6)]
    first = local.submit(prompts[:3], samplings[:3], guides=guides[:3])
    for _ in range(4):
        local.step()
    local.submit(prompts[3:], samplings[3:], guides=guides[3:])
    finished = local.run()
    rigs.at_rest(local)
    assert local.close().proved
    assert first == [0, 1, 2]
    return finished


def rises(tokens: Any, step: int) -> bool:
    return all(0 < after - before <= step for before, after in zip((0, *tokens), tokens, strict=False))


@pytest.mark.parametrize("temperament", list(Temperament))
def test_guided_answers_keep_to_their_form(temperament: Temperament) -> None:
    """In life: some lines of a batch with a schema; the others' answers are what they are without."""
    finished = run(temperament)
    for number, step in ((0, 9), (2, 5), (3, 40), (5, 3)):
        for choice in finished[number].choices:
            assert choice.token_ids
            assert rises(choice.token_ids, step), number
    free = run()
    assert {number: one.token_ids for number, one in finished.items()} == {
        number: one.token_ids for number, one in free.items()
    }
    assert list(finished[1].token_ids) == rigs.expected(rigs.model(), rigs.prompt(6, 1), 9)
    assert finished[3].reason == "stop"  # the form was at its end
    assert finished[3].token_ids[-1] == rigs.VOCABULARY - 1


@pytest.mark.parametrize(
    "changes", [{"retain": "on"}, {"residency": "full"}, {"retain": "on", "graphs": "on"}], ids=str
)
def test_guided_answers_are_the_same_on_each_route(changes: dict[str, Any]) -> None:
    """Streamed, retained and resident."""
    assert {one: told.token_ids for one, told in run(**changes).items()} == {
        one: told.token_ids for one, told in run().items()
    }


def test_a_mask_that_misses_the_last_token_lets_another_form_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: tokens read one step late, as for everybody else, and the form is broken."""
    monkeypatch.setattr(Shaping, "needs_tokens", lambda *_: False)
    finished = run()
    assert not all(rises(finished[number].token_ids, step) for number, step in ((2, 5), (3, 40)))


def test_the_pass_is_on_the_queues_before_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: the device computes while the host makes the mask; only steps with a guided request read early."""
    order: list[str] = []
    for name in ("_forward", "_land", "_sample"):
        whole = getattr(Engine, name)

        def noted(self: Any, *values: Any, name: str = name, whole: Any = whole) -> Any:
            order.append(name)
            return whole(self, *values)

        monkeypatch.setattr(Engine, name, noted)
    local = LocalEngine(rigs.model(), rigs.settings())
    local.submit([rigs.prompt(5)], [Sampling(4)], guides=[Rising(30)])
    local.run()
    assert order[2:5] == ["_forward", "_land", "_sample"]
    order.clear()
    local.submit([rigs.prompt(5)], [Sampling(4)])
    local.run()
    assert order[2:5] == ["_forward", "_sample", "_land"]


def test_a_guide_that_cannot_go_on_fails_its_request_alone() -> None:
    """In life: a grammar meets the library's limits in the middle of an answer."""
    local = LocalEngine(rigs.model(), rigs.settings())
    numbers = local.submit(
        [rigs.prompt(5), rigs.prompt(6)], [Sampling(9), Sampling(9)], guides=[Rising(9, breaks_at=3), None]
    )
    finished = local.run()
    rigs.at_rest(local)
    assert (finished[numbers[0]].reason, finished[numbers[0]].error) == ("failed", "lost the thread")
    assert list(finished[numbers[1]].token_ids) == rigs.expected(rigs.model(), rigs.prompt(6), 9)


def test_masks_are_bits_from_the_lowest_on() -> None:
    """Ids beyond the mask may not come; the highest bit of a word is one like the others."""
    words = torch.tensor([[5, -(1 << 31)], [0, 1]], dtype=torch.int32)
    out = masked(torch.zeros(2, 70), words)
    assert [row.isfinite().nonzero().flatten().tolist() for row in out] == [[0, 2, 63], [32]]
    assert masked(torch.zeros(1, 40), words[:1]).isfinite().sum() == 2
