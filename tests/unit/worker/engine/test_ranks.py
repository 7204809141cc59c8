"""What of a model is spread, what each rank has of it, and what is refused by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import transformers

from common.config import EngineSettings
from common.errors import RefusedError
from tests.unit.worker.engine import rigs
from worker.engine.fit import fit
from worker.engine.geometry import geometry_of
from worker.engine.model import _experts, _spread_plan, _spread_sizes
from worker.engine.ranks import RankPlan, as_fields, device_of, refuse_unspreadable, settings_of, share_of

PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
GEOMETRY = geometry_of(rigs.config(), 4, rigs.CONTEXT)
SIZES = {"token ids": 98, "rows of a gated MLP": 48}


def test_a_rank_has_its_heads_and_the_whole_vocabulary() -> None:
    """Bytes of history are a share of the model's; every rank samples over all ids."""
    refuse_unspreadable(GEOMETRY, PLAN, SIZES, 2)
    share = share_of(GEOMETRY, 2)
    assert (share.query_heads, share.kv_heads, share.vocabulary) == (2, 1, GEOMETRY.vocabulary)
    assert share.token_bytes * 2 == GEOMETRY.token_bytes
    asked = rigs.settings(tensor_parallel=2)
    found = fit(share, asked)
    assert found.formula[0] == "each of 2 ranks has 1 of 2 key heads, and pools of its own:"
    assert found.formula[1:] == fit(share, replace(asked, tensor_parallel=1)).formula


@pytest.mark.parametrize(
    ("plan", "sizes", "ranks", "words"),
    [
        ({}, SIZES, 2, "transformers has no tensor-parallel plan for model type llama"),
        (PLAN | {"layers.*.self_attn.q_proj": "colwise_gather_output"}, SIZES, 2, r"does not split q_proj by heads"),
        ({name: PLAN[name] for name in PLAN if name != "lm_head"}, SIZES, 2, r"does not split lm_head"),
        (PLAN | {"layers.*.mlp.experts": "moe_tp_experts"}, SIZES, 2, "has moe_tp_experts, which haulier does not do"),
        (PLAN, SIZES, 3, "the model's 4 query heads cannot be split evenly over 3 ranks"),
        (PLAN, SIZES, 4, "the model's 2 key heads cannot be split evenly over 4 ranks"),
        (PLAN, SIZES | {"token ids": 97}, 2, "the model's 97 token ids cannot be split evenly over 2 ranks"),
    ],
)
def test_what_the_plan_does_not_split_by_heads_is_refused(
    plan: dict[str, str], sizes: dict[str, int], ranks: int, words: str
) -> None:
    """Never run with other heads than its pools are made for. Control: ``PLAN`` itself is let through above."""
    with pytest.raises(RefusedError, match=f"--tensor-parallel {ranks}: .*{words}"):
        refuse_unspreadable(GEOMETRY, plan, sizes, ranks)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_plans_of_these_are_by_heads(model_type: str) -> None:
    """Whatever the installed release calls the rest of them."""
    config = rigs.config(model_type, vocab_size=98)
    experts = _experts(config)
    refuse_unspreadable(geometry_of(config, 4, rigs.CONTEXT), _spread_plan(config), _spread_sizes(config), 2, experts)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("phi3", {"pad_token_id": 0}, "does not split q_proj by heads"),
        ("olmo2", {}, "does not split q_proj by heads"),
        ("qwen3_moe", rigs.EXPERTS, "has 4 experts a layer, which haulier does not spread"),
        ("qwen3_next", rigs.HYBRID | rigs.EXPERTS, "linear-attention layers, which haulier does not spread"),
    ],
)
def test_transformers_plans_of_these_are_not(model_type: str, changes: dict[str, Any], words: str) -> None:
    """Fused projections, norms over all heads, experts, and states that are not history."""
    fields = transformers.AutoConfig.for_model(model_type).to_dict()
    config = rigs.config(model_type, vocab_size=98, **changes)
    assert fields["model_type"] == config.model_type
    with pytest.raises(RefusedError, match=words):
        refuse_unspreadable(
            geometry_of(config, 4, rigs.CONTEXT), _spread_plan(config), _spread_sizes(config), 2, _experts(config)
        )


@pytest.mark.parametrize(
    ("device", "found"),
    [("cpu", ("cpu", "cpu")), ("cuda", ("cuda:0", "cuda:2")), ("cuda:3", ("cuda:3", "cuda:5"))],
)
def test_ranks_follow_each_other_on_devices(device: str, found: tuple[str, str]) -> None:
    """From --device on."""
    assert (device_of(device, 0), device_of(device, 2)) == found


def test_a_ranks_settings_cross_as_they_are() -> None:
    """But for its device and threads, and graphs, which hold no collective."""
    asked = EngineSettings("m", device="cuda:1", tensor_parallel=4, threads=9, host_pool_gib=3.5)
    mine = settings_of(asked, 2, 5)
    assert (mine.device, mine.threads, mine.graphs) == ("cuda:3", 5, "off")
    assert replace(mine, device=asked.device, threads=9, graphs=asked.graphs) == asked
    plan = RankPlan(2, 1, 2, 3, 4, 5, "", as_fields(mine))
    assert RankPlan(**asdict(plan)).engine == mine
