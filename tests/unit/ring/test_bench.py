"""The bench runs what it says it runs; its figures are not judged here, since a test asserts no timing."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from common.errors import RefusedError
from ring import bench
from ring.commands import register_bench


def test_the_soak_returns_every_byte() -> None:
    """The wrap soak of ten million batches, in small: many wraps, and it ends where it began."""
    found = bench.soak(5_000, capacity_bytes=1 << 15, entries=64)
    assert found["live"] == 0
    assert found["taken"] == found["returned"]
    assert found["wraps"] > 100
    assert found["padding_taken"] > 0
    assert found["doorbell_word"] == 5_000


def test_the_stall_control_is_part_of_the_bench() -> None:
    """Whoever runs the bench sees the published failure beside the ring that does not have it."""
    found = bench.stall()
    assert found["stalled"]
    assert found["wraps"] == found["predicted_wraps"]
    assert not found["with_padding_stalled"]


def test_growth_is_none() -> None:
    """R1: no net growth after warm-up (a few counters grow by bytes, not by batches)."""
    assert bench.growth(1_000)["net_bytes"] < 1_000


def test_latency_without_a_gpu_is_refused() -> None:
    """A machine without a GPU says so instead of inventing a figure."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RefusedError, match="no CUDA device"):
        bench.latency()


def _app() -> typer.Typer:
    app = typer.Typer()
    register_bench(app)

    @app.command("other")
    def other() -> None:
        """A second command, so that typer keeps the first one's name."""

    return app


def test_the_command_prints_one_json_object() -> None:
    """``haulier bench ring --json`` is read by scripts."""
    arguments = ["ring", "--json", "--batches", "2000", "--rate-batches", "1000", "--device", "cpu"]
    result = CliRunner().invoke(_app(), arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rate"]["ring_batches_s"] > 0
    assert found["soak"]["batches"] == 2000
    assert found["latency"] is None


def test_the_command_refuses_an_unknown_device() -> None:
    """A typing mistake costs one line, not a measurement."""
    result = CliRunner().invoke(_app(), ["ring", "--device", "tpu"])
    assert result.exit_code == 2
