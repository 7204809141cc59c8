"""What requests ask of their logits, on a GPU: nothing synchronises, tokens are those of the stated formulas."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from common.config import EngineSettings
from tests.gpu.test_engine_cuda import CONTEXT, PAGE, model
from worker.engine.local import LocalEngine
from worker.engine.sampler import penalised
from worker.structures import Finished, Sampling, Shape

pytestmark = pytest.mark.gpu
VOCABULARY, TOKENS = 4096, 24
SHAPES = (
    None,
    Shape(1.4, 0.5, 0.7, ((7, 4.0), (4000, 3.0)), 5),
    Shape(presence=1.5),
    Shape(bias=tuple((token, 0.5) for token in range(0, VOCABULARY, 4))[:1024], logprobs=20),
)


class Alternating:
    """A form that needs the token before: even and odd ids take turns, an even one first."""

    words, error, ended = VOCABULARY // 32, "", False

    def __init__(self) -> None:
        self.odd = False

    def copy(self) -> Alternating:
        return Alternating()

    def take(self, token: int) -> None:
        self.odd = token % 2 == 0

    def mask_into(self, row: Any) -> None:
        row.fill(-0x55555556 if self.odd else 0x55555555)


def run(residency: str, *, strict: bool) -> tuple[dict[int, Finished], dict[int, list[torch.Tensor]], list[list[int]]]:
    """Shaped, guided and embedded requests over four segments: what finished, each context's logits, the prompts."""
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def watch(plan: Any, logits: torch.Tensor) -> None:
        for row, share in enumerate(one for one in plan.shares if one.samples):
            seen[share.context.number].append(logits[row].clone())

    settings = EngineSettings(
        "random", device="cuda:0", host_pool_gib=1.0, concurrency=4, context_tokens=CONTEXT, page_tokens=PAGE,
        chunk_tokens=256, residency=residency, retain="off",
    )  # fmt: skip
    local = LocalEngine(model(128), settings, watch=watch)
    chance = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(1, VOCABULARY, (length,), generator=chance).tolist() for length in (65, 300, 64, 129, 9, 600)
    ]
    samplings = [
        *(Sampling(TOKENS, shape=shape) for shape in SHAPES),
        Sampling(TOKENS, 1.0, seed=5, min_p=0.01, choices=2),
        Sampling(1, shape=Shape(pool="float")),
    ]
    guides = [None] * 4 + [Alternating(), None]
    pieces = [()] * 5 + [(400, 200)]
    if strict:
        torch.cuda.set_sync_debug_mode("error")
    local.submit(prompts, samplings, guides=guides, pieces=pieces)
    finished = local.run()
    torch.cuda.set_sync_debug_mode("default")
    assert local.close().proved
    return finished, seen, prompts


def keeps_to(answer: list[int], prompt: list[int], rows: list[torch.Tensor], shape: Shape) -> bool:
    """Whether each token is the likeliest by the model's own logits and the formulas, worked out on the host. In bf16
    several may be alike: any of them will do."""
    in_prompt = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    in_prompt[0, prompt] = True
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32)
    factors = torch.tensor([[shape.repetition, shape.presence, shape.frequency]])
    for token, logits in zip(answer, rows, strict=False):
        scores = logits.float().cpu()[None]
        for biased, value in shape.bias:
            scores[0, biased] += value
        scores = penalised(scores, in_prompt, counts, factors)[0]
        if float(scores[token]) < float(scores.max()) - 1e-4:
            return False
        counts[0, token] += 1
    return len(answer) == TOKENS


@pytest.mark.parametrize("residency", ["staged", "full"])
def test_shaped_requests_never_synchronise_and_keep_to_their_formulas(residency: str) -> None:
    """In life: all of them in one batch, the first pass to allocate what they need, the second with every implicit
    synchronisation an error."""
    run(residency, strict=False)
    finished, seen, prompts = run(residency, strict=True)
    for number, shape in enumerate(SHAPES):
        answer = list(finished[number].token_ids)
        assert keeps_to(answer, prompts[number], seen[number], shape or Shape())
        others = [one for one in SHAPES if one != shape]
        assert not any(keeps_to(answer, prompts[number], seen[number], one or Shape()) for one in others)
        if shape is not None and shape.logprobs >= 0:
            for token, told, logits in zip(answer, finished[number].logprobs, seen[number], strict=False):
                right = logits.float().log_softmax(-1)
                assert abs(told.logprob - float(right[token])) < 1e-3
                assert len(told.top) == shape.logprobs
    for choice in finished[4].choices:
        assert [token % 2 for token in choice.token_ids] == [place % 2 for place in range(TOKENS)]
    assert finished[4].choices[0].token_ids != finished[4].choices[1].token_ids
    vectors = [torch.tensor(choice.vector) for choice in finished[5].choices]
    module = model(128).module
    for vector, ids in zip(vectors, (prompts[5][:400], prompts[5][400:]), strict=True):
        right = module.base_model(torch.tensor([ids], device="cuda")).last_hidden_state[0].float().mean(0)
        torch.testing.assert_close(vector, right.cpu(), atol=0.05, rtol=0.05)
