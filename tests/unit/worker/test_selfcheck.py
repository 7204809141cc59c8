"""``haulier selfcheck``: all passes on a sound machine, and each check can fail: a table that cannot turn red proves
nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from common import database
from common.errors import RefusedError
from ring.accounting import Accounting
from ring.memory import HostRingMemory
from ring.stall_control import PaddingForgotten
from worker import selfcheck, selfcheck_commands
from worker.engine import race_checks, self_checks
from worker.engine.event_pool import EventPool
from worker.engine.page_leases import PageLeases
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge, Transport
from worker.engine.virtual_device import VirtualDevice

COPY = f"edge: {Edge.COPY_BEFORE_ATTENTION.value}"


def test_a_sound_machine_passes_every_check(tmp_path: Path) -> None:
    """In life: the first command on new hardware. Every edge of the design and every head size is in the table."""
    checks = list(selfcheck.run("cpu", tmp_path))
    assert [check.name for check in checks if not check.passed] == []
    names = " ".join(check.name for check in checks)
    assert len([check for check in checks if check.name.startswith("edge: ")]) == len(Edge) + 1
    for word in ("storage", "doorbell", "event pool", "heads of 64", "heads of 128", "heads of 256"):
        assert word in names
    assert list(tmp_path.iterdir()) == []


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, check: Any) -> str:
    monkeypatch.setattr(owner, name, value)
    ended = selfcheck._checked("it", check)
    assert not ended.passed
    return ended.detail


def test_a_missing_wait_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build or a driver in which compute does not wait for the copy."""
    said = failing(
        monkeypatch, Transport, "before_attention", lambda self, lease: None,
        lambda: race_checks.edge(VirtualDevice, Edge.COPY_BEFORE_ATTENTION),
    )  # fmt: skip
    assert "RaceError" in said


def test_a_control_that_does_not_corrupt_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing ever overlaps would pass every race test, and prove none."""
    said = failing(
        monkeypatch, race_checks, "omitted", lambda edge: set(),
        lambda: race_checks.edge(VirtualDevice, Edge.COPY_BEFORE_ATTENTION),
    )  # fmt: skip
    assert "without the edge no race is named" in said


def test_a_page_recycled_under_its_copy_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """L5 left out."""
    said = failing(
        monkeypatch, PageLeases, "recycle", lambda self, page: page,
        lambda: race_checks.page_reuse(VirtualDevice),
    )  # fmt: skip
    assert "next owner's rows" in said


def test_an_event_pool_without_generations_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4 left out: a handle given back still answers."""
    said = failing(
        monkeypatch, EventPool, "_live", lambda self, event: None, lambda: self_checks.event_pool(VirtualDevice)
    )
    assert "DoubleReleaseError" in said


def test_a_ring_that_forgets_its_padding_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3 left out of the real ring; and a control that does not stall."""
    assert "the ring itself stalls" in failing(
        monkeypatch, selfcheck, "stall", lambda: {"stalled": True, "wraps": 2, "predicted_wraps": 2,
        "with_padding_stalled": True}, selfcheck.stall_control,
    )  # fmt: skip
    assert "does not stall" in failing(
        monkeypatch, selfcheck, "stall", lambda: {"stalled": False, "wraps": 9, "predicted_wraps": 2,
        "with_padding_stalled": False}, selfcheck.stall_control,
    )  # fmt: skip
    assert issubclass(PaddingForgotten, Accounting)


def test_ids_that_do_not_arrive_are_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: a device view that is a copy, and not the pages."""
    monkeypatch.setattr(
        HostRingMemory, "payload_device_view", lambda self: torch.zeros(self.capacity_bytes // 4, dtype=torch.int32)
    )
    ended = selfcheck._checked("it", lambda: selfcheck.doorbell(None))
    assert "read other ids" in ended.detail


def test_other_bits_are_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: the staged route's rows reach attention one bit off."""
    real = StagedRoute.call

    def call(self: Any, packed: Any, rows: Any, query: Any, *rest: Any) -> torch.Tensor:
        return real(self, packed, rows, query * (1 + 1e-6), *rest)

    said = failing(monkeypatch, StagedRoute, "call", call, lambda: self_checks.bits(VirtualDevice, 64))
    assert "logits differ" in said


def test_a_folder_that_cannot_keep_a_database_is_a_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D6: a network mount."""
    said = failing(monkeypatch, database, "filesystem", lambda _: "nfs4", lambda: selfcheck.storage(tmp_path))
    assert "nfs4" in said


def app() -> typer.Typer:
    """The command line with this room alone; the second command keeps the first one's name."""
    made = typer.Typer()
    selfcheck_commands.register(made)
    made.command("other")(lambda: None)
    return made


def test_the_command_says_it_in_words_json_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: read by a person, or by what provisions machines."""
    ended = [selfcheck.Check("one", True, "fine", 0.1), selfcheck.Check("two", False, "CheckFailed: bytes differ", 0.2)]
    monkeypatch.setattr(selfcheck, "run", lambda device, state: iter(ended))
    words = CliRunner().invoke(app(), ["selfcheck"])
    assert words.exit_code == 1
    assert "FAIL  two" in words.stdout
    assert "1 of 2 checks pass on cpu" in words.stdout
    found = json.loads(CliRunner().invoke(app(), ["selfcheck", "--json"]).stdout)
    assert (found["passed"], [one["passed"] for one in found["checks"]]) == (False, [True, False])
    monkeypatch.setattr(selfcheck, "run", lambda device, state: iter(ended[:1]))
    assert CliRunner().invoke(app(), ["selfcheck"]).exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    """A6: no table of failures, one line."""
    with pytest.raises(RefusedError, match="--device cuda:0"):
        list(selfcheck.run("cuda:0"))
