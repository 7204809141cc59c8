"""What the engine's thread builds: a ring that fits, and a fingerprint that tells models apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import EngineSettings, KeySettings, WorkerSettings
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
