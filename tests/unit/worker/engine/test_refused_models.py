"""Models that haulier does not do are refused by name before any weight is read: their folders here have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.errors import RefusedError
from tests.unit.worker.engine import rigs
from worker.engine.attention import registered
from worker.engine.device_pool import Rows
from worker.engine.model import from_folder
from worker.engine.virtual_device import VirtualDevice
from worker.engine.warmup import warm_up

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": rigs.VOCABULARY}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder and decoder": ("t5", {}, "model type t5 uses an encoder beside its decoder"),
    "encoder beside a causal class": ("bart", {}, "model type bart uses an encoder beside its decoder"),
    "soft-capping": ("gemma2", {}, "model type gemma2 uses soft-capped attention"),
    "sinks": ("gpt_oss", {}, "model type gpt_oss uses attention sinks"),
    "window": ("mistral", {"sliding_window": 16}, "sliding window of 16 tokens.*--context-tokens 16 or less"),
    "window of some layers": (
        "gemma3_text",
        {"num_hidden_layers": 6, "sliding_window": 16},
        "model type gemma3_text attends over a sliding window of .* tokens in 5 of its 6 layers",
    ),
    "window of later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "num_hidden_layers": 3},
        "model type qwen2 attends over a sliding window of 16 tokens in 2 of its 3 layers",
    ),
    "latent": ("deepseek_v3", {}, r"model type deepseek_v3 uses latent attention \(MLA\)"),
    "state-space alone": ("mamba", {}, "model type mamba uses state-space layers"),
    "state-space, second kind": ("mamba2", {}, "model type mamba2 uses state-space layers"),
    "state-space beside dense": ("jamba", {}, "model type jamba uses state-space layers beside dense ones"),
    "state-space beside dense, by another name": ("nemotron_h", {}, "model type nemotron_h uses state-space layers"),
    "recurrent": ("recurrent_gemma", {}, "model type recurrent_gemma uses recurrent layers"),
    "chunks": ("llama4_text", {}, "model type llama4_text"),
    "other linear attention": ("minimax", {}, "model type minimax has layers of type linear_attention"),
    "linear attention beside dense": ("olmo_hybrid", {}, "model type olmo_hybrid uses linear attention of a kind"),
    "linear biases, not replaceable": ("bloom", {}, "model type bloom does not let its attention be replaced"),
    "not replaceable": ("gpt_neo", {}, "model type gpt_neo does not let its attention be replaced"),
    "no text to continue": ("vit", {}, "model type vit has no usable vocab_size"),
    "images": ("llava", {}, "images beside text"),
    "images in the same class": ("gemma3", {}, "model type gemma3 uses images beside text"),
    "quantised beside images": ("qwen3_5", {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
    "positions of the longest request": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
            "hidden_size": 32,
            "num_attention_heads": 4,
        },
        "rope type longrope.*--context-tokens 16 or less",
    ),
}


def folder_of(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """A config.json and nothing else."""
    made = transformers.AutoConfig.for_model(model_type)
    known = {name: value for name, value in SMALL.items() if hasattr(made, name) and model_type in ("llama", "mistral")}
    transformers.AutoConfig.for_model(model_type, **(known | changes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_model_that_haulier_does_not_do_is_refused_by_name_before_any_work(name: str, tmp_path: Path) -> None:
    """In life: --model names one of these; minutes of loading would pass, or wrong text would come, without a word."""
    model_type, changes, words = REFUSED[name]
    with pytest.raises(RefusedError, match=words) as refused:
        from_folder(folder_of(tmp_path, model_type, changes), VirtualDevice(), "auto", rigs.CONTEXT)
    assert str(refused.value).startswith(f"--model {tmp_path}: ")
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_that_haulier_does_gets_as_far_as_its_weights(tmp_path: Path) -> None:
    """The control: the same folder of a model that is done is refused for having no weights."""
    with pytest.raises(RefusedError, match=r"cannot be loaded.*model\.safetensors"):
        from_folder(folder_of(tmp_path, "llama", {}), VirtualDevice(), "auto", rigs.CONTEXT)


def test_code_of_a_folders_own_is_not_run(tmp_path: Path) -> None:
    """In life: a model that brings its own classes. Nobody is asked at a terminal, and nothing of it runs."""
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    written = '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(RefusedError, match="cannot be loaded"):
        from_folder(tmp_path, VirtualDevice(), "auto", rigs.CONTEXT)


def test_attention_that_looks_ahead_is_refused_at_the_first_pass() -> None:
    """In life: an encoder loaded as if it continued text. The control is the same model as a decoder."""
    rows = Rows(torch.zeros(8, 4, 8), torch.zeros(8, 4, 8))
    for decoder in (True, False):
        loaded = rigs.model(model_type="bert", is_decoder=decoder, pad_token_id=0, num_key_value_heads=4)
        with registered(loaded.module), torch.no_grad():
            if decoder:
                warm_up(loaded, (rows,))
                continue
            with pytest.raises(RefusedError, match="later tokens"):
                warm_up(loaded, (rows,))
