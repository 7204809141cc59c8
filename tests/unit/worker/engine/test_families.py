"""Families of models, whole: staged bits are resident ones, and the text is what transformers writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_sharing import OPTIONS, SHARING
from worker.engine.geometry import TESTED_TYPES
from worker.engine.lanes import Temperament
from worker.engine.model import LoadedModel, fix_positions, from_folder
from worker.engine.virtual_device import VirtualDevice


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """A config's positions of one type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 4.0, 9.0, 16.0], "factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", rope("linear", factor=4.0)),
    "llama llama3": ("llama", rope("llama3", **LLAMA3)),
    "llama yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama dynamic": ("llama", rope("dynamic", factor=4.0)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": rigs.CONTEXT}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3 longrope": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 64, **rope("longrope", **LONG)},
    ),
    "olmo2": ("olmo2", {"pad_token_id": 0}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": ("qwen3_next", rigs.HYBRID | rigs.EXPERTS),
    "qwen3_5": ("qwen3_5_text", rigs.HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", rigs.HYBRID | rigs.EXPERTS),
}


def test_what_is_called_tested_is() -> None:
    """A worker warns of a type that is not among these."""
    assert {model_type for model_type, _ in FAMILIES.values()} == set(TESTED_TYPES)


def test_the_page_of_models_names_them() -> None:
    """docs/models.md is where a user looks."""
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = page.partition("## Tested")[2].partition("## Hybrids")[0]
    firsts = [line.split("|")[1] for line in rows.splitlines() if line.startswith("|")]
    named = {name for first in firsts for name in re.findall(r"`(\w+)`", first)}
    assert named == set(TESTED_TYPES)


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One family's model, saved."""
    model_type, changes = FAMILIES[request.param]
    return rigs.saved(tmp_path_factory.mktemp("family"), model_type, **changes)


def loaded(folder: Path, temperament: Temperament = Temperament.EAGER) -> LoadedModel:
    return from_folder(folder, VirtualDevice(temperament), "auto", rigs.CONTEXT)


@pytest.mark.parametrize(("scenario", "options"), [(rigs.CHURN, {}), (SHARING, OPTIONS)], ids=["churn", "shared"])
def test_a_family_is_exact(folder: Path, scenario: rigs.Scenario, options: dict[str, Any]) -> None:
    """H4 and the text, in life: eight requests of mixed length join, finish and are cancelled, alone or on shared
    histories; each answer is what generate of a module nobody else touched says."""
    reference = rigs.run(loaded(folder), scenario, residency="full", **options)
    staged = rigs.run(loaded(folder, Temperament.LATE), scenario, **options)
    assert rigs.same(staged, reference)
    assert (staged.local.engine.spared_bytes > 0) == bool(options)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    compared = 0
    for number, (_, sampling) in enumerate(scenario.prompts):
        finished = staged.finished[number]
        if finished.reason == "length" and sampling.temperature == 0:
            prompt = scenario.prompt(number, rigs.VOCABULARY)
            assert list(finished.token_ids) == rigs.generated(module, prompt, sampling.max_tokens)
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope"])
def test_positions_do_not_move_for_a_neighbour(name: str, fixed: bool) -> None:
    """In life: a longer request in the same step. The control, the model as transformers leaves it, gives position 3
    another angle beside position 300."""
    model_type, changes = FAMILIES[name]
    build: Any = transformers.AutoModelForCausalLM.from_config
    rotary = build(rigs.config(model_type, **changes)).model.rotary_emb
    if fixed:
        fix_positions(rotary)
    states = torch.zeros(1, 1, 32)
    alone, _ = rotary(states, torch.tensor([[3]]))
    beside, _ = rotary(states, torch.tensor([[3, 300]]))
    assert torch.equal(alone[0, 0], beside[0, 0]) == fixed
