"""rules: what a model's attention looks like, read from its transformers config, and what of it we refuse by name.

A model whose attention needs something we do not do (soft-capping, sinks, a sliding window shorter than a context,
latent attention, positions that depend on the batch) is refused here, never approximated. Of a hybrid the dense layers
are counted, and what its linear-attention layers keep of a context. Knows no torch and no transformers: a config is any
object with the attributes of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import RefusedError

TESTED_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "qwen3_moe",
    "mixtral",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Model types whose text our tests compare with transformers; others run when nothing below refuses them."""

_REFUSED_ATTRIBUTES = {
    "attn_logit_softcapping": "soft-capped attention",
    "kv_lora_rank": "latent attention (MLA)",
    "alibi": "attention with linear biases (ALiBi)",
    "is_encoder_decoder": "an encoder beside its decoder",
    "attention_chunk_size": "chunked attention",
    "mamba_d_state": "state-space layers beside dense ones",
    "ssm_state_size": "state-space layers beside dense ones",
    "state_size": "state-space layers",
    "lru_width": "recurrent layers beside dense ones",
    "vision_config": "images beside text",
    "audio_config": "audio beside text",
}
_SINK_TYPES = ("gpt_oss",)
HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose linear-attention layers are gated delta rules with one convolution: their states are ours."""
STATE_BYTES = 4
"""Of a number of a recurrent state: float32, whatever the weights are."""
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Types of positions that change once any request of a batch is longer than the model's original length: up to that
they are fixed (``model`` keeps them so), beyond it an answer would depend on its neighbours."""


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """What the linear-attention layers of a hybrid keep of one context: a state of fixed size a layer."""

    layers: tuple[int, ...]
    """Which of the model's layers they are."""
    channels: int
    width: int
    """Of the convolution: so many newest inputs of each channel are its state, in the weights' type."""
    heads: int
    key_dim: int
    value_dim: int
    """The recurrent state is (heads, key dim, value dim), float32."""

    def context_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all states of one context."""
        recurrent = self.heads * self.key_dim * self.value_dim * STATE_BYTES
        return len(self.layers) * (recurrent + self.channels * self.width * dtype_bytes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's dense attention: what the pools need to know of it."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    vocabulary: int
    positions: int
    """Longest context the model was made for, in tokens."""
    dense: tuple[int, ...] = ()
    """Of a hybrid, which of the model's layers attend densely: ``layers`` of them. Empty: all, in order."""
    linear: LinearLayers | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one context in a hybrid's linear-attention layers; 0 elsewhere."""
        return 0 if self.linear is None else self.linear.context_bytes(self.dtype_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of history of one token: K and V of all dense layers."""
        return self.layers * self.layer_token_bytes


def _number(config: object, name: str, otherwise: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None:
        value = otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedError(
            f"model type {getattr(config, 'model_type', 'unknown')} has no usable {name} in its config ({value!r}), so "
            "haulier cannot size its history; it runs models that continue text"
        )
    return value


def refuse_quantised(config: object) -> None:
    """Raise ``RefusedError`` for weights that are stored quantised."""
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise RefusedError(
            f"the model's weights are quantised ({method or type(quantised).__name__}), which haulier does not do: it "
            "runs float32, bfloat16 and float16; give the model it was made from"
        )


def _refuse_unknown(config: object, model_type: str, context_tokens: int) -> None:
    for name, words in _REFUSED_ATTRIBUTES.items():
        if getattr(config, name, None):
            raise RefusedError(f"model type {model_type} uses {words} ({name}), which haulier does not do")
    if getattr(config, "linear_num_value_heads", None) and model_type not in HYBRID_TYPES:
        raise RefusedError(f"model type {model_type} uses linear attention of a kind which haulier does not do")
    if model_type in _SINK_TYPES:
        raise RefusedError(f"model type {model_type} uses attention sinks, which haulier does not do")
    refuse_quantised(config)
    window = getattr(config, "sliding_window", None)
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    windowed = kinds.count("sliding_attention")
    if windowed:
        raise RefusedError(
            f"model type {model_type} attends over a sliding window of {window} tokens in {windowed} of its "
            f"{len(kinds)} layers, which haulier does not do"
        )
    done = {"full_attention", "attention"} | ({"linear_attention"} if model_type in HYBRID_TYPES else set())
    other = sorted(set(kinds) - done)
    if other:
        raise RefusedError(f"model type {model_type} has layers of type {', '.join(other)}, which haulier does not do")
    if window and getattr(config, "use_sliding_window", True) and window < context_tokens:
        raise RefusedError(
            f"model type {model_type} attends over a sliding window of {window} tokens, which haulier does not do; "
            f"--context-tokens {window} or less needs none"
        )
    _refuse_positions(config, model_type, context_tokens)


def _refuse_positions(config: object, model_type: str, context_tokens: int) -> None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in BATCH_DEPENDENT_ROPE:
        return
    original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
    original = original or getattr(config, "original_max_position_embeddings", None)
    most = original if kind == "longrope" and original else _number(config, "max_position_embeddings", context_tokens)
    if context_tokens > most:
        raise RefusedError(
            f"model type {model_type} scales its positions by the longest request of a batch once that has more than "
            f"{most} tokens (rope type {kind}), so that an answer would depend on its neighbours; haulier does not do "
            f"that: --context-tokens {most} or less needs none"
        )


def _hybrid(config: object, model_type: str) -> tuple[tuple[int, ...], LinearLayers | None]:
    """The dense layers of a hybrid, and its others."""
    kinds = getattr(config, "layer_types", None) or ()
    if model_type not in HYBRID_TYPES or "linear_attention" not in kinds:
        return (), None
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind != "linear_attention")
    if not dense:
        raise RefusedError(f"model type {model_type} has no dense layer here: there is no history to stage")
    heads, key_heads = _number(config, "linear_num_value_heads"), _number(config, "linear_num_key_heads")
    key_dim, value_dim = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
    return dense, LinearLayers(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        channels=2 * key_heads * key_dim + heads * value_dim,
        width=_number(config, "linear_conv_kernel_dim"),
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def geometry_of(config: object, dtype_bytes: int, context_tokens: int) -> Geometry:
    """The geometry of a text model, or ``RefusedError`` naming what haulier does not do.

    ``dtype_bytes`` is the size of one K or V value (2 for bfloat16), ``context_tokens`` the longest context to serve.
    """
    model_type = str(getattr(config, "model_type", "unknown"))
    _refuse_unknown(config, model_type, context_tokens)
    query_heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", query_heads)
    head_dim = _number(config, "head_dim", _number(config, "hidden_size") // query_heads)
    positions = _number(config, "max_position_embeddings", context_tokens)
    if query_heads % kv_heads:
        raise RefusedError(f"{query_heads} query heads cannot share {kv_heads} key heads evenly")
    if context_tokens > positions:
        raise RefusedError(
            f"--context-tokens {context_tokens} is longer than the {positions} positions this model was made for"
        )
    dense, linear = _hybrid(config, model_type)
    return Geometry(
        model_type=model_type,
        layers=len(dense) or _number(config, "num_hidden_layers"),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        vocabulary=_number(config, "vocab_size"),
        positions=positions,
        dense=dense,
        linear=linear,
    )
