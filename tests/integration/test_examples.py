"""The example beside the documentation, as people use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.fleet_kit import DEADLINE_S, REPOSITORY, Fleet

SHOW = Path(__file__).resolve().parents[2] / "docs" / "examples" / "show.py"


def files(folder: Path, count: int) -> list[str]:
    """Questions and answers, longer together than a pipe holds."""
    text = "x" * 1000
    lines = [{"custom_id": f"q{n}", "body": {"messages": [{"content": text}]}} for n in range(count)]
    answer = {"response": {"body": {"choices": [{"message": {"content": text}}]}}}
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "out.jsonl").write_text("".join(json.dumps({**line, **answer}) + "\n" for line in lines))
    return [sys.executable, str(SHOW), str(folder / "in.jsonl"), str(folder / "out.jsonl")]


def test_a_reader_that_leaves_costs_no_traceback(tmp_path: Path) -> None:
    """show.py IN OUT | head -1: the answers one wanted, and no traceback after them."""
    process = subprocess.Popen(files(tmp_path, 500), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(30), said) == (141, b"")


def test_every_answer_is_shown(tmp_path: Path) -> None:
    """A reader that stays."""
    done = subprocess.run(files(tmp_path, 3), capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("xxx\n") == 6


def test_the_notebook_runs_as_it_is_written(fleet: Fleet) -> None:
    """docs/examples/notebook.py, cell by cell, against a fleet that answers with the question."""
    fleet.broker()
    fleet.worker(delay_ms=1)
    environment = {**os.environ, "HAULIER_BROKER": fleet.endpoint, "HAULIER_KEYS": str(fleet.keys),
                   "PYTHONPATH": str(REPOSITORY)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SHOW.with_name("notebook.py")), "echo"], capture_output=True, text=True, check=False,
        timeout=DEADLINE_S, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0].startswith("What is the capital of France? What is the capital of France?")
    assert said[2] == "completed 2 of 2"
    assert "line 2 of the input" in said[3]
