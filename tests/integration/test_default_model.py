"""The default model, whole: 24 prompts run together read as transformers writes each of them alone."""

from __future__ import annotations

import pytest
import torch

from common.config import EngineSettings
from worker.engine.local import LocalEngine
from worker.engine.runner import load
from worker.structures import Sampling

pytestmark = pytest.mark.model
LENGTHS = (1, 2, 3, 5, 7, 8, 13, 17, 21, 27, 34, 55, 63, 64, 65, 89, 100, 110, 127, 128, 129, 140, 150, 200)
TOKENS = 8


def test_twenty_four_prompts_together_equal_generate_token_for_token() -> None:
    """In life: one batch of mixed lengths on the CPU in fp32, chunked prefill beside decodes, all staged."""
    settings = EngineSettings(
        "smollm2-135m", host_pool_gib=1.0, concurrency=24, context_tokens=240, chunk_tokens=256, page_tokens=16
    )
    loaded = load(settings)
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(5, loaded.geometry.vocabulary, (size,), generator=chance).tolist() for size in LENGTHS]
    local = LocalEngine(loaded, settings)
    local.submit(prompts, [Sampling(TOKENS)] * len(prompts))
    finished = local.run()
    assert local.close().proved
    for number, prompt in enumerate(prompts):
        out = loaded.module.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(finished[number].token_ids) == out[0, len(prompt) :].tolist(), f"prompt of {len(prompt)} tokens"
