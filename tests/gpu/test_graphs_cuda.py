"""Captured decode steps and fused kernels on a GPU: the reference's bits, no synchronisation, one capture a shape."""

from __future__ import annotations

import pytest
import torch

from common.config import EngineSettings
from tests.gpu.test_engine_cuda import CONTEXT, PAGE, model
from worker.engine.cells import Outcome, Scenario, play, same
from worker.engine.cuda_device import CudaDevice
from worker.engine.fused import adapted
from worker.engine.graphs import Graphs
from worker.engine.local import LocalEngine
from worker.engine.virtual_device import Again
from worker.structures import Sampling

pytestmark = pytest.mark.gpu
MANY = Scenario(
    prompts=tuple(
        (60 + 41 * number, Sampling(40 - 2 * number, temperature=0.5 * (number % 2))) for number in range(12)
    ),
    arrive={0: tuple(range(9)), 12: (9, 10, 11)},
    cancel={25: (1,)},
)
"""Twelve contexts, then eleven, ten and nine in shapes of twelve and ten, and so on until one is left."""


def _run(residency: str, retain: str, graphs: str = "auto") -> Outcome:
    settings = EngineSettings(
        "random", device="cuda:0", device_pages_gib=2, host_pool_gib=1.0, concurrency=12, context_tokens=CONTEXT,
        page_tokens=PAGE, chunk_tokens=1024, residency=residency, retain=retain, graphs=graphs,
    )  # fmt: skip

    def prepare(local: LocalEngine) -> None:
        local.engine.scheduler.turns = None
        torch.cuda.set_sync_debug_mode("error")

    def rested(local: LocalEngine) -> None:
        torch.cuda.set_sync_debug_mode("default")

    return play(model(128), settings, MANY, prepare, rested)


def _graphs(outcome: Outcome) -> Graphs:
    assert outcome.local.engine.graphs is not None
    return outcome.local.engine.graphs


def test_replayed_steps_have_the_bits_of_steps_that_ran_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: streamed (nothing is replayed), in place, resident; and resident with every capture left out."""
    resident, streamed, in_place = _run("full", "on"), _run("staged", "off"), _run("staged", "on")
    assert same(in_place, resident)
    assert same(streamed, resident)
    assert in_place.answers == resident.answers == streamed.answers
    assert _graphs(streamed).replays == 0
    for outcome in (resident, in_place):
        assert _graphs(outcome).captures == 10
        assert _graphs(outcome).replays > 30
    monkeypatch.setattr(CudaDevice, "capture", lambda self, fn: Again(fn))
    plain = _run("full", "on")
    assert same(plain, resident)


def test_without_padding_bits_may_differ_and_graphs_are_off() -> None:
    """The control: --graphs off runs every step in its own shape, and says nothing about the padded one's bits."""
    off = _run("staged", "on", "off")
    assert off.local.engine.graphs is None
    assert same(off, _run("full", "on", "off"))


def test_small_operations_are_fused_and_give_what_the_model_gives() -> None:
    """In life: the liger-kernel package is installed with haulier[cuda]."""
    pytest.importorskip("liger_kernel")
    loaded = model(128)
    ids = torch.arange(64, device="cuda:0")[None]
    with torch.no_grad():
        plain = loaded.module(ids).logits.float()
        with adapted(loaded) as names:
            assert {"Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb"} == set(names)
            loaded.module.set_attn_implementation("sdpa")
            fused = loaded.module(ids).logits.float()
    assert not torch.equal(plain, fused)
    assert torch.nn.functional.cosine_similarity(plain.flatten(), fused.flatten(), 0) > 0.999
