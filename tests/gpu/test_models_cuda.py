"""Families of models on a GPU, in bfloat16: staged bits are resident bits, and no step waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_sharing import OPTIONS, SHARING
from worker.engine.cells import Outcome, Scenario, play, same
from worker.engine.local import LocalEngine
from worker.engine.model import from_config
from worker.engine.runner import open_device

pytestmark = pytest.mark.gpu
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "initializer_range": 0.05}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": rigs.HYBRID | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5_text": rigs.HYBRID | LINEAR,
}


def run(model_type: str, scenario: Scenario, *, strict: bool = False, **changes: Any) -> Outcome:
    config = rigs.config(model_type, **(SIZES | FAMILIES[model_type]))
    loaded = from_config(config, open_device("cuda:0"), torch.bfloat16, rigs.CONTEXT)

    def prepare(local: LocalEngine) -> None:
        if strict:
            torch.cuda.set_sync_debug_mode("error")

    def rested(local: LocalEngine) -> None:
        torch.cuda.set_sync_debug_mode("default")
        rigs.at_rest(local)

    return play(loaded, rigs.settings(device="cuda:0", **changes), scenario, prepare, rested)


@pytest.mark.parametrize(("scenario", "options"), [(rigs.CHURN, {}), (SHARING, OPTIONS)], ids=["churn", "shared"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_a_familys_staged_bits_are_resident_bits(model_type: str, scenario: Scenario, options: dict[str, Any]) -> None:
    """H4, in life: the first control is resident against resident."""
    reference = run(model_type, scenario, residency="full", **options)
    assert same(reference, run(model_type, scenario, residency="full", **options))
    assert same(reference, run(model_type, scenario, **options))


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_no_step_of_a_family_waits_for_the_device(model_type: str) -> None:
    """Q2: torch raises on an implicit synchronisation."""
    assert run(model_type, rigs.CHURN, strict=True).steps
