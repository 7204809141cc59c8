"""shell: models from transformers: loaded from a folder or hub id, or built on the device with random weights.

Gives a ``LoadedModel``: the module, its geometry, and what decoding needs. Knows no pool and no step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from common.errors import RefusedError, UsageError
from worker import model_files
from worker.engine.attention import KEYWORD, StepAttention
from worker.engine.device import Device
from worker.engine.geometry import BATCH_DEPENDENT_ROPE, Geometry, geometry_of, refuse_quantised
from worker.engine.ranks import refuse_unspreadable, share_of
from worker.engine.stopping import Decode
from worker.model_store import quiet

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SHAPES: dict[str, dict[str, Any]] = {
    "d16": {
        "model_type": "qwen3",
        "num_hidden_layers": 16,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "vocab_size": 153_600,
    },
    "l8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
    },
    "w1": {
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 257,
    },
}
"""Shapes for measuring: D16 (Qwen3, since Llama's config refuses 24 heads of 256 over 5120) and W1
as the benchmarks name them, L8B is Llama-3-8B's; tiny runs anywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device, ready for the engine. ``decode`` is None when it has no tokenizer (random weights). Of a
    model that is spread over ranks, ``geometry`` is what this one attends."""

    name: str
    module: Any
    geometry: Geometry
    device: Device
    dtype: torch.dtype
    decode: Decode | None
    stop_ids: tuple[int, ...]
    """The model's own end-of-sequence ids, for whoever prepares requests."""
    ranks: int = 1

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor, step: StepAttention, **more: object
    ) -> torch.Tensor:
        """One pass over packed rows: ``ids`` and ``positions`` (rows,), ``sample_rows`` which of them sample; attention
        is ``step``'s, ``more`` travels along. Logits (sampled rows, vocabulary)."""
        out: torch.Tensor = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sample_rows,
            **{KEYWORD: step},
            **more,
        ).logits[0]
        return out


def chosen_dtype(name: str, config: Any, torch_device: torch.device) -> torch.dtype:
    """``auto``: what the weights are stored in; float32 on a CPU, where half precision is slow and inexact."""
    if name != "auto":
        return DTYPES[name]
    if torch_device.type == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None)
    if isinstance(stored, str):
        stored = DTYPES.get(stored)
    return stored if isinstance(stored, torch.dtype) and stored in DTYPES.values() else torch.bfloat16


def _end_ids(module: Any) -> tuple[int, ...]:
    found = getattr(module.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(module.config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def decoder(tokenizer: Any) -> Decode:
    """Token ids to text as an answer shows it: special tokens left out, spaces as they are."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode


def from_folder(place: str | Path, device: Device, dtype: str, context_tokens: int, ranks: int = 1) -> LoadedModel:
    """Load weights and tokenizer of a local folder or hub id; of ``ranks``, which have joined, this one's part alone.
    Raises ``RefusedError`` naming what is wrong with it; what haulier does not do is refused before any weight is
    read."""
    quiet()
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        wanted = chosen_dtype(dtype, config, device.torch_device)
        refuse_quantised(config)
        geometry = geometry_of(_text_part(config), wanted.itemsize, context_tokens)
        _refuse_fixed_attention(config)
        if ranks > 1:
            refuse_unspreadable(geometry, _spread_plan(config), _spread_sizes(config), ranks, _experts(config))
            geometry = share_of(geometry, ranks)
        if Path(place).is_dir():
            model_files.check(Path(place))
        with device.running():
            module = _weights(place, wanted, device, ranks).to(device.torch_device)
            fix_positions(module)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    except RefusedError as refusal:
        raise RefusedError(f"--model {place}: {refusal}") from refusal
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise RefusedError(f"--model {place} cannot be loaded: {_first_line(error)}") from error
    settle(device)
    return LoadedModel(str(place), module.eval(), geometry, device, wanted, decoder(tokenizer), _end_ids(module), ranks)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _causal_class(config: Any) -> Any:
    """The class that continues text, or None."""
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = mapping.get(type(config), None)
    return kind[0] if isinstance(kind, tuple) else kind


def _text_part(config: Any) -> Any:
    """What the loaded class runs: of a model of text and images whose class for text alone is another one, that one's
    config; else ``config`` itself."""
    text, kind = config.get_text_config(), _causal_class(config)
    return text if kind is not None and kind.config_class is type(text) else config


def _refuse_fixed_attention(config: Any) -> None:
    """A model whose attention transformers does not let anybody replace cannot be staged."""
    kind = _causal_class(config)
    if kind is None:
        raise RefusedError(f"model type {config.model_type} does not continue text (no causal language model)")
    if not kind._can_set_attn_implementation():
        raise RefusedError(
            f"model type {config.model_type} does not let its attention be replaced, so haulier cannot stage it"
        )


def _spread_plan(config: Any) -> dict[str, str]:
    """transformers' tensor-parallel plan: of the text model, and of the head behind it."""
    return {**(getattr(config, "base_model_tp_plan", None) or {}), **(_causal_class(config)._tp_plan or {})}


def _spread_sizes(config: Any) -> dict[str, int]:
    """Other widths that the plan splits."""
    names = {"intermediate_size": "rows of a gated MLP", "vocab_size": "token ids"}
    return {words: int(getattr(config, name, 0) or 0) for name, words in names.items()}


def _experts(config: Any) -> int:
    """Of each layer, by the names that configs have for them; 0: none. Releases of transformers differ in whether their
    plans tell."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(int(getattr(config, name, 0) or 0) for name in names)


@contextmanager
def _spread(device: Device, ranks: int) -> Iterator[dict[str, Any]]:
    """What loading is told for it. transformers takes a rank's device from the environment, as a launcher sets it."""
    if ranks == 1:
        yield {}
        return
    from transformers.distributed.configuration_utils import DistributedConfig

    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.torch_device.index or 0)
    try:
        yield {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def _weights(place: str | Path, dtype: torch.dtype, device: Device, ranks: int) -> Any:
    """The module. A weight that no file has, or has in another shape, would be made up at random: refused."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    with _spread(device, ranks) as spread:
        module, found = load(
            place,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **spread,
        )
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise RefusedError(f"its files have {name} in shape {tuple(stored)}, its config.json says {tuple(wanted)}")
    absent = sorted(found["missing_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise RefusedError(f"its files have no weights for {absent[0]}{more}: they are not all of this model's")
    return module


def from_config(
    config: Any, device: Device, dtype: torch.dtype, context_tokens: int, name: str = "random", seed: int = 0
) -> LoadedModel:
    """A model of random weights, made where it will run; nothing touches a disk."""
    geometry = geometry_of(config, dtype.itemsize, context_tokens)
    torch.manual_seed(seed)
    with device.running(), device.torch_device:
        build: Any = transformers.AutoModelForCausalLM.from_config
        module = build(config, dtype=dtype, attn_implementation="sdpa")
    fix_positions(module)
    settle(device)
    return LoadedModel(name, module.eval(), geometry, device, dtype, None, _end_ids(module))


def fix_positions(module: Any) -> None:
    """No frequency is computed again: within the contexts that ``geometry_of`` lets through they never change, and
    looking whether they should costs a wait for the device in every step."""
    for part in module.modules():
        if getattr(part, "rope_type", None) in BATCH_DEPENDENT_ROPE:
            part.rope_type = "default"


def shape_config(name: str, context_tokens: int) -> Any:
    """The transformers config of one of ``SHAPES``."""
    if name not in SHAPES:
        raise UsageError(f"--geometry {name!r} is none of {', '.join(SHAPES)}")
    fields = dict(SHAPES[name])
    kind = fields.pop("model_type")
    return transformers.AutoConfig.for_model(
        kind, max_position_embeddings=max(context_tokens, 2048), bos_token_id=0, eos_token_id=0, **fields
    )


def settle(device: Device) -> None:
    """Weights are in place before a managed queue reads them: loaders copy on streams of their own, which are not
    managed, so the host may wait for those once, at start."""
    if device.torch_device.type == "cuda":
        torch.cuda.default_stream(device.torch_device).synchronize()
