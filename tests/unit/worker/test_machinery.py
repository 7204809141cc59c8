"""What the engine's thread builds: a ring that fits, and a fingerprint that tells models apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import GIB, EngineSettings, KeySettings, WorkerSettings
from common.errors import RefusedError
from worker import machinery


def settings(**how: int) -> WorkerSettings:
    engine = EngineSettings("m", concurrency=3, context_tokens=how.pop("context_tokens", 100))
    return WorkerSettings(("tcp://a:1",), Path("s"), KeySettings(insecure=True), engine, echo=True, **how)  # type: ignore[arg-type]


def test_an_echo_is_built_without_torch() -> None:
    """The fleet alone can be measured where no model could run."""
    built = machinery.build(settings(ring_mib=2), lambda _: None, lambda _: None, lambda _: None)
    assert (built.model.name, built.model.context_tokens, built.concurrency) == ("m", 100, 3)
    assert built.ring_bytes == 2 * machinery.MIB == built.producer.memory.capacity_bytes


def test_the_longest_prompt_must_fit_into_the_ring() -> None:
    """Named with the value to set."""
    with pytest.raises(RefusedError, match="--ring-mib to 2"):
        machinery.build(settings(ring_mib=1, context_tokens=400_000), lambda _: None, lambda _: None, lambda _: None)


def test_a_fingerprint_tells_apart_what_answers_differently(tmp_path: Path) -> None:
    """Weights, template, and how they are run: two workers of one fingerprint give one answer."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * (3 * machinery.MIB))
    first = machinery.fingerprint(tmp_path, "float32 staged")
    assert first == machinery.fingerprint(tmp_path, "float32 staged")
    seen = {
        first,
        machinery.fingerprint(tmp_path, "bfloat16 staged"),
        machinery.fingerprint("hub/id", "float32 staged"),
    }
    (tmp_path / "chat_template.jinja").write_text("x")
    seen.add(machinery.fingerprint(tmp_path, "float32 staged"))
    (tmp_path / "model.safetensors").write_bytes(b"a" * (3 * machinery.MIB - 1) + b"b")
    seen.add(machinery.fingerprint(tmp_path, "float32 staged"))
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"host_pool_gib": 17.0},
            "--host-pool-gib 17.0 and --ring-mib 64 ask for 17.062 GiB .* 16.000 GiB: lower --host",
        ),
        ({"host_pool_gib": 8.0, "ring_mib": 12 * 1024}, "lower --ring-mib"),
        ({"host_pool_gib": 9.0, "tensor_parallel": 2}, "64, each for 2 ranks, ask for 18.125 GiB .*lower --host"),
        ({"host_pool_gib": 99.0, "residency": "full", "ring_mib": 17 * 1024}, "^--ring-mib 17408 ask"),
        ({"host_pool_gib": 99.0, "echo": True, "ring_mib": 17 * 1024}, "^--ring-mib 17408 ask"),
    ],
)
def test_more_memory_than_there_is_is_refused(asked: dict[str, Any], words: str) -> None:
    """The system would promise it and kill somebody once it is written to: setting and numbers are said instead."""
    more = {name: asked[name] for name in ("ring_mib", "echo") if name in asked}
    engine = EngineSettings("m", host_pool_gib=asked["host_pool_gib"], residency=asked.get("residency", "staged"))
    engine = replace(engine, tensor_parallel=asked.get("tensor_parallel", 1))
    wanted = WorkerSettings(("tcp://a:1",), Path("s"), KeySettings(insecure=True), engine, **more)
    with pytest.raises(RefusedError, match=words):
        machinery.check_memory(wanted, 16 * GIB)
    machinery.check_memory(wanted, 200 * GIB)
    machinery.check_memory(wanted, 0)


def test_a_worker_looks_at_its_memory_before_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded for a worker that cannot be."""
    monkeypatch.setattr(machinery, "memory_bytes", lambda: machinery.MIB)
    with pytest.raises(RefusedError, match="--ring-mib 64 ask"):
        machinery.build(settings(), lambda _: None, lambda _: None, lambda _: None)
