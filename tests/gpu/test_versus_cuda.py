"""Transformers beside the engine on a GPU: its continuous batching, and a cache that is offloaded."""

from __future__ import annotations

import pytest

from common.config import EngineSettings
from worker.engine import versus
from worker.engine.versus import Requests

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS = EngineSettings("w1", device="cuda:0", concurrency=8)


def test_continuous_batching_answers_every_request() -> None:
    """Half precision may choose other tokens; how many is what was asked for, in the order of the requests."""
    loaded = versus.load_shape(SETTINGS, 256)
    prompts, answers = Requests(12, (3, 100), (2, 40)).drawn(1000)
    seconds, said = versus.OTHERS["continuous"](loaded.module, prompts, answers)
    assert [len(one) for one in said] == answers
    assert seconds > 0


def test_an_offloaded_cache_is_decoded_from() -> None:
    """Both caches are measured where there is a device to offload from."""
    found = versus.decode_rates(versus.load_shape(SETTINGS, 2048), 2, 1000, 3, ours=10.0)
    assert found["transformers_offloaded_tokens_s"] > 0
