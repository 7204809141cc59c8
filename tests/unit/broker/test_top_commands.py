"""``haulier top`` as people and scripts run it: on a terminal, into a pipe, once, as JSON."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import cli, messages

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def serving(scripted: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """A broker with one running job and one worker."""
    (tmp_path / "in.jsonl").write_bytes(b'{"custom_id": "a"}\n{"custom_id": "b"}\n')
    scripted.on_status = lambda job: setattr(job, "status", "in_progress")
    assert cli.main(["submit", "--broker", scripted.endpoint, "--insecure", str(tmp_path / "in.jsonl")]) == 0
    model = messages.ModelInfo("smollm2-135m", "f", 2048)
    scripted.workers = (
        messages.WorkerInfo("w-1", 2, 3, "ready", (model,), 8, 4, 1, 2, 30, 40, 0.5, messages.RingReport(64, 0, 0, 8)),
    )
    capfd.readouterr()
    return scripted


def test_one_frame_for_people_and_one_object_for_scripts(serving: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """--once fits 80 columns and has no escape in it; --json is one object."""
    flags = ["--broker", serving.endpoint, "--insecure"]
    assert cli.main(["top", "--once", *flags]) == 0
    text = capfd.readouterr().out
    assert text.splitlines()[0] == "1 open job, 1 worker, 0.0 tokens/s"
    assert "in_progress" in text
    assert "ring 8 B of 64 B used" in text
    assert all(len(line) <= 80 and line.isprintable() for line in text.splitlines())
    assert cli.main(["top", "--json", *flags]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [one["worker"] for one in found["workers"]] == ["w-1"]
    assert [one["status"] for one in found["jobs"]] == ["in_progress"]
    assert cli.main(["top", "--every", "0", *flags]) == 2


def _ran(serving: Any, stdout: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "common.cli", "top", "--every", "0.2", "--broker", serving.endpoint, "--insecure"],
        stdout=stdout, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def _read(descriptor: int, enough: Callable[[bytes], bool], seconds: float = 60.0) -> bytes:
    found, until = b"", time.monotonic() + seconds
    while not enough(found) and time.monotonic() < until:
        if select.select([descriptor], [], [], 0.2)[0]:
            found += os.read(descriptor, 65_536)
    return found


def test_into_a_pipe_it_is_plain_lines_on_a_terminal_one_screen(serving: Any) -> None:
    """Control: the same command, told apart by its output alone. Ctrl-C ends either with 130."""
    read_end, write_end = os.pipe()
    process = _ran(serving, write_end, {})
    os.close(write_end)
    piped = _read(read_end, lambda found: found.count(b"1 open job") >= 2)
    process.send_signal(2)
    assert process.wait(60) == 130
    os.close(read_end)
    assert b"\x1b" not in piped
    assert piped.count(b"1 open job") >= 2
    parent, child = pty.openpty()
    process = _ran(serving, child, {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"})
    os.close(child)
    shown = _read(parent, lambda found: found.count(b"1 open job") >= 2)
    process.send_signal(2)
    _read(parent, lambda found: b"\x1b[?1049l" in found, 5.0)
    assert process.wait(60) == 130
    os.close(parent)
    assert b"\x1b[?1049h" in shown  # the terminal's other screen, so that the former one comes back
