"""What steps spend their time on: kinds by name, time that overlaps counted once, a trace that can be opened."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from worker.engine.bench import BenchSettings, bench
from worker.engine.observed import kind_of, memory_over_time, profiled, union_s
from worker.engine.virtual_device import VirtualDevice


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "link, to the device"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_2x4_h_bz_bias_TNT", "matrix products"),
        ("_rms_norm_forward_kernel", "norms, rotation, gates"),
        ("void at::native::index_elementwise_kernel<128, 4>", "rows appended, gathered and scattered"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    """As an H200 names them."""
    assert kind_of(name) == kind


def test_time_that_overlaps_counts_once() -> None:
    """In life: the link copies while kernels run."""
    assert union_s([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert union_s([]) == 0


def test_a_profile_tells_what_ran_and_writes_a_trace(tmp_path: Path) -> None:
    """On a CPU: operations of torch."""
    square = torch.ones(64, 64)
    found = profiled(VirtualDevice(), lambda: square @ square, tmp_path / "trace.json.gz")
    assert found["ms_step"]["matrix products"] > 0
    assert 0 < found["device_busy_ms_step"] <= found["under_profiler_ms_step"]
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_memory_is_noted_on_a_gpu_alone() -> None:
    """A CPU's is the machine's: nothing is made up."""
    with memory_over_time(VirtualDevice(), wanted=True) as seen:
        pass
    assert seen == []


def test_the_bench_tells_both(tmp_path: Path) -> None:
    """``bench engine --profile FILE --memory``: further steps, beside the measured ones."""
    settings = BenchSettings("tiny", contexts=2, length=40, steps=2, profile=tmp_path / "t.json.gz", memory=True)
    found = bench(settings)
    assert found["profile"]["ms_step"]
    assert found["memory_gb"] == []
    assert found["bitwise"] is True
