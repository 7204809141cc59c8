"""What the peers' kill rows count, held to peers made up here: one loses, one runs twice, one does neither."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parent / "peers"
MODULES = ("measure", "home", "witness", "children")


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The scripts' own module, which lies in no package."""
    monkeypatch.syspath_prepend(PEERS)
    module = importlib.import_module("measure")
    monkeypatch.setattr(module, "QUIET_S", 0.2)
    monkeypatch.setattr(module, "BROKER_AWAY_S", 0.0)
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


class MadeUp:
    """A peer in memory: runs half at once, and the rest once what was killed is back, unless it is told to fail."""

    def __init__(self, seen: Path, loses: int = 0, repeats: int = 0) -> None:
        self._seen, self._loses, self._repeats = seen, loses, repeats
        self._waiting: list[str] = []
        self._stored: set[str] = set()
        self._killed = self._asked = False

    def start_broker(self) -> None:
        self._work()

    def start_worker(self) -> None:
        self._work()

    def _work(self) -> None:
        if self._waiting and not self._killed:
            self._run(self._waiting[: len(self._waiting) // 2])

    def _run(self, some: Sequence[str]) -> None:
        with self._seen.open("a") as file:
            file.writelines(f"{body.split()[0]}\n" for body in some)
        self._stored.update(some)

    def kill(self, which: str) -> None:
        self._killed = True

    def submit(self, bodies: Sequence[str]) -> None:
        self._waiting = list(bodies)

    def results(self) -> int | None:
        if not self._asked:  # the first answer after a restart is what was there before
            self._asked = True
            return len(self._stored)
        rest = [body for body in self._waiting if body not in self._stored]
        if rest and self._killed:
            self._run([*rest[self._loses :], *list(self._stored)[: self._repeats]])
            self._repeats, self._waiting = 0, []
        return len(self._stored)

    def singles(self, bodies: Sequence[str]) -> list[float]:
        return [0.001 * (index + 1) for index in range(len(bodies))]

    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize("which", ["broker", "worker"])
def test_a_peer_that_does_well_loses_nothing(measure: ModuleType, tmp_path: Path, which: str) -> None:
    """Half of the tasks ran, a process was killed, the other half ran afterwards, once each."""
    row = measure.kill(MadeUp(tmp_path / "seen"), tmp_path / "seen", which, 20)
    assert (row["ran_before_kill"], row["lost"], row["run_twice"]) == (10, 0, 0)
    assert row["all_done_s"] is not None
    assert row["next_done_s"] is not None


def test_a_lost_task_is_counted(measure: ModuleType, tmp_path: Path) -> None:
    """Control for the row above: three never come back, and it is said for how long they were waited for."""
    row = measure.kill(MadeUp(tmp_path / "seen", loses=3), tmp_path / "seen", "broker", 20)
    assert (row["lost"], row["all_done_s"], row["waited_quiet_s"]) == (3, None, 0.2)


def test_a_task_that_runs_twice_is_counted(measure: ModuleType, tmp_path: Path) -> None:
    """Control: the witness sees what a set of results hides."""
    row = measure.kill(MadeUp(tmp_path / "seen", repeats=4), tmp_path / "seen", "worker", 20)
    assert (row["lost"], row["run_twice"]) == (0, 4)


def test_nothing_done_after_the_kill_is_never(measure: ModuleType, tmp_path: Path) -> None:
    """A broker that comes back empty: no next result, ever."""
    row = measure.kill(MadeUp(tmp_path / "seen", loses=10), tmp_path / "seen", "broker", 20)
    assert (row["lost"], row["next_done_s"]) == (10, None)


def test_percentiles_are_of_what_came_after_warming_up(measure: ModuleType, tmp_path: Path) -> None:
    """The first 20 pay for connections; 100 of 21 to 120 ms are left."""
    row = measure.latency(MadeUp(tmp_path / "seen"), 100)
    assert row == {"singles": 100, "p50_ms": 70.5, "p99_ms": 119.01}
