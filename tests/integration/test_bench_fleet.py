"""The fleet's bench runs a real broker and a real worker, and its figures are of what it says. No timing is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest

from broker import fleet_bench


@pytest.mark.timeout(120)
def test_a_small_bench_measures_fleet_and_floor(tmp_path: Path) -> None:
    """`haulier bench fleet --json` on a user's machine: one JSON object, all lines done, nothing left on the disk."""
    command = [sys.executable, "-m", "common.cli", "bench", "fleet", "--lines", "300", "--in-flight", "64"]
    command += ["--singles", "2", "--no-recovery", "--state", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fleet"]["lines"] == found["floor"]["lines"] == 300
    assert found["fleet"]["settings"] == {"synchronous": "FULL", "curve": True, "workers": 1, "in_flight": 64}
    assert 0 < found["fleet"]["in_flight_max_seen"] <= 64
    assert found["fleet"]["lines_per_s"] > 0
    assert found["fleet"]["singles"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_worker_killed_at_work_is_noticed(tmp_path: Path) -> None:
    """The row of the bench that kills a worker ends: its session is seen to go, and no line stays assigned to it."""
    found = fleet_bench.measure_detection(tmp_path / "fleet", 64, SIGKILL, lambda name, done, total: None)
    assert found["lines_still_assigned"] == 0


@pytest.mark.timeout(180)
def test_an_outbox_is_handed_over_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart row in small: two brokers killed, the outboxes of two dead workers adopted, nothing run in vain."""
    monkeypatch.setattr(fleet_bench, "OUTBOX_LINES", 60)
    found = fleet_bench.measure_restart(tmp_path / "fleet", 64, lambda name, done, total: None)
    assert found["outbox_lines"] >= 60
