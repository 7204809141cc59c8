"""One model over two GPUs: NCCL between them, each rank's history staged over its own link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from tests.integration.ranked import ranked
from tests.unit.worker.engine import rigs
from worker.engine import cells
from worker.engine.geometry import geometry_of

pytestmark = pytest.mark.gpu
CONTEXT, PAGE = 1024, 64
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 98,
         "max_position_embeddings": 4096}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_two_gpus() -> None:
    there = torch.cuda.device_count()
    if there < 2:
        pytest.skip(f"--tensor-parallel 2 on CUDA needs two devices, there are {there}")


@pytest.mark.parametrize("company", cells.COMPANIES[2:])
def test_staged_bits_over_two_gpus_are_resident_bits(tmp_path: Path, company: str) -> None:
    """The same schedule, and each step's logits to the bit, with history staged, with a part of it in device pages, and
    with all of it resident; and both ranks sampled the same tokens in each step, or none of these would have ended
    well."""
    folder = rigs.saved(tmp_path / "model", "qwen3", torch.bfloat16, **SHAPE)
    base = EngineSettings(str(folder), "cuda:0", dtype="bfloat16", page_tokens=PAGE, tensor_parallel=2)
    geometry = geometry_of(rigs.config("qwen3", **SHAPE), 2, CONTEXT)
    pages = cells.PART_PAGES if company == cells.COMPANIES[2] else cells.SHARED_PART_PAGES
    found = []
    for route, kept in ((None, 0), ("streamed", 0), ("retained in part", pages)):
        asked = cells.cell_settings(geometry, base, route)
        ended, told = ranked(asked, tmp_path / f"{route}.pt", company, kept)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert told["codes"] == [0]
        assert told["ring"][0] == told["ring"][1]
        found.append(told)
    reference, streamed, part = found
    assert reference["staged_bytes"] == 0 == streamed["hit_bytes"] < streamed["staged_bytes"]
    assert part["hit_bytes"] > 0
    for told in (streamed, part):
        assert told["answers"] == reference["answers"]
        for (plan, logits), (wanted, resident) in zip(told["steps"], reference["steps"], strict=True):
            assert plan == wanted
            assert torch.equal(logits, resident)
