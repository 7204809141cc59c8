"""rules: one model over several devices: what each rank holds of it, and what cannot be spread, by name.

Each rank has some of the heads, their history in pools of its own, and a part of every matrix by transformers' own
tensor-parallel plan. Spread is what that plan splits by heads, and nothing else. Knows no torch: a plan is the mapping
from module names to styles that transformers has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from common.config import EngineSettings
from common.errors import RefusedError
from worker.engine.geometry import Geometry

BY_HEADS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
"""Styles that leave each rank whole heads of its own: queries, their keys and values, and the sum over ranks behind."""
HEAD = {"lm_head": "colwise_gather_output"}
"""Every rank has all logits, the same bits, so that all sample the same token."""
OTHERS = ("colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce")
"""Other styles that were tried: gated MLPs, embeddings, norms of each head."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a further rank's process is told, as one JSON object: no secret is in it."""

    rank: int
    store_port: int
    """Of the store on loopback where the ranks find each other."""
    link: int
    words: int
    """Sockets, inherited: to rank 0's engine, and for this process's last words."""
    ring_bytes: int
    ring_entries: int
    folder: str
    """Where the model's files are; empty: as ``--model`` says."""
    settings: dict[str, object]

    @property
    def engine(self) -> EngineSettings:
        """This rank's."""
        return EngineSettings(**self.settings)  # type: ignore[arg-type]


def settings_of(settings: EngineSettings, rank: int, threads: int) -> EngineSettings:
    """A rank's own: its device and its threads. Graphs are off: a collective is in every step."""
    return replace(settings, device=device_of(settings.device, rank), threads=threads, graphs="off")


def device_of(device: str, rank: int) -> str:
    """Ranks follow each other on CUDA devices; on the CPU all are ``cpu``."""
    kind, _, index = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"


def as_fields(settings: EngineSettings) -> dict[str, object]:
    """For ``RankPlan.settings``."""
    return asdict(settings)


def refuse_unspreadable(
    geometry: Geometry, plan: Mapping[str, str], sizes: Mapping[str, int], ranks: int, experts: int = 0
) -> None:
    """Raise ``RefusedError``, naming --tensor-parallel, unless ``plan`` splits this model by heads over ``ranks``.
    ``sizes``: other widths that are split, by their names in the model's config. ``experts``: of each layer."""
    asked = f"--tensor-parallel {ranks}"
    if geometry.linear is not None:
        raise RefusedError(
            f"{asked}: model type {geometry.model_type} has linear-attention layers, which haulier does not spread"
        )
    if experts:
        raise RefusedError(
            f"{asked}: model type {geometry.model_type} has {experts} experts a layer, which haulier does not spread"
        )
    styles = {re.sub(r"^.*\.", "", name): style for name, style in plan.items()}
    if not styles:
        raise RefusedError(f"{asked}: transformers has no tensor-parallel plan for model type {geometry.model_type}")
    for name, wanted in (BY_HEADS | HEAD).items():
        if styles.pop(name, "no") != wanted:
            raise RefusedError(
                f"{asked}: transformers' plan for model type {geometry.model_type} does not split {name} by heads "
                f"({wanted}), so haulier cannot spread its history"
            )
    other = sorted({style for style in styles.values() if style not in OTHERS})
    if other:
        raise RefusedError(
            f"{asked}: transformers' plan for model type {geometry.model_type} has {', '.join(other)}, which haulier "
            "does not do"
        )
    counts = {"query heads": geometry.query_heads, "key heads": geometry.kv_heads} | dict(sizes)
    for what, count in counts.items():
        if count % ranks:
            raise RefusedError(f"{asked}: the model's {count} {what} cannot be split evenly over {ranks} ranks")


def share_of(geometry: Geometry, ranks: int) -> Geometry:
    """What one rank attends: its heads. The vocabulary is whole: every rank samples."""
    return replace(geometry, query_heads=geometry.query_heads // ranks, kv_heads=geometry.kv_heads // ranks)
