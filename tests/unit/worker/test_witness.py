"""Counting what is run, where it is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import RefusedError
from common.messages import LineRef
from worker.witness import Witness


def test_each_run_leaves_a_line(tmp_path: Path) -> None:
    """Two workers, one file: every line of it whole."""
    one, two = Witness(tmp_path / "w"), Witness(tmp_path / "w")
    one.saw(LineRef("job", 0, 1))
    two.saw(LineRef("job", 0, 2))
    assert (tmp_path / "w").read_text() == f"job 0 1 {os.getpid()}\njob 0 2 {os.getpid()}\n"
    Witness(None).saw(LineRef("job", 0, 3))


def test_a_witness_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Counting in vain would look like no run at all."""
    with pytest.raises(RefusedError, match="witness"):
        Witness(tmp_path / "absent" / "w")
