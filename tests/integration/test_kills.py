"""SIGKILL of broker, worker or both at named points of their work: nothing lost, little run again (D1-D4, S2)."""

from __future__ import annotations

import json
import signal
import sqlite3
import time

import pytest

from common.messages import LineRef
from tests.integration.fleet_kit import IN_FLIGHT, Fleet
from worker import effects as do
from worker.outbox import Outbox
from worker.structures import Outcome

LINES = 60


IN_CI = ("broker.before_result_commit", "broker.after_result_commit", "broker.after_assign_commit", "broker.checking")


@pytest.mark.parametrize("point", IN_CI)
def test_a_broker_killed_at_a_point_costs_no_line_and_no_run(fleet: Fleet, point: str) -> None:
    """It dies there and is started again; its worker lives on: no line is lost and none is run a second time (D3)."""
    first = fleet.broker(HAULIER_CRASH_AT=point)
    fleet.watch(first, lambda: fleet.broker(wait=False))
    fleet.worker()
    job = fleet.submit(LINES)
    fleet.until(lambda: first.poll() is not None, "it dies")
    assert first.returncode == -signal.SIGKILL
    fleet.whole(job, LINES)
    assert fleet.again() == 0


@pytest.mark.parametrize(
    "point", ["worker.running:20", "worker.before_result_commit:3", "worker.after_result_commit:3"]
)
def test_a_worker_killed_at_a_point_costs_what_it_ran(fleet: Fleet, point: str) -> None:
    """It dies there and is started again: what was durable is handed over, at most what it held is run again (D1)."""
    fleet.broker()
    first = fleet.worker(HAULIER_CRASH_AT=point)
    job = fleet.submit(LINES)
    assert first.wait(60) == -signal.SIGKILL
    fleet.worker()
    fleet.whole(job, LINES)
    assert fleet.again() <= IN_FLIGHT


def test_both_killed_at_once_cost_what_ran(fleet: Fleet) -> None:
    """The machine's power goes: broker and worker both, in the middle of a job."""
    broker, worker = fleet.broker(), fleet.worker()
    job = fleet.submit(LINES)
    fleet.until_run(LINES // 3)
    for process in (broker, worker):
        process.kill()
    for process in (broker, worker):
        process.wait(60)
    fleet.broker()
    fleet.worker()
    fleet.whole(job, LINES)
    assert fleet.again() <= IN_FLIGHT


def test_a_standby_takes_over_a_killed_broker(fleet: Fleet) -> None:
    """The active broker is killed; the standby opens its store; worker and client find it; nothing is run twice."""
    active = fleet.broker()
    fleet.standby()
    fleet.worker()
    job = fleet.submit(LINES)
    fleet.until_run(LINES // 3)
    fleet.end(active)
    fleet.whole(job, LINES)
    assert fleet.again() == 0


@pytest.mark.parametrize("whose", ["broker", "worker"])
def test_a_process_that_is_stopped_and_goes_on_recovers(fleet: Fleet, whose: str) -> None:
    """SIGSTOP longer than the liveness, then SIGCONT: the session is lost and found, every line ends once (S2)."""
    processes = {"broker": fleet.broker(), "worker": fleet.worker(delay_ms=100)}
    job = fleet.submit(LINES)
    fleet.until_run(LINES // 4)
    processes[whose].send_signal(signal.SIGSTOP)
    time.sleep(6.5)
    processes[whose].send_signal(signal.SIGCONT)
    fleet.whole(job, LINES)
    assert all(process.poll() is None for process in processes.values())
    assert fleet.again() == 0  # the only worker came back with what it held


def test_ten_thousand_finished_lines_are_handed_over_after_a_restart(fleet: Fleet) -> None:
    """An outbox full of finished work outlives its worker and broker: all of it arrives, none is run again (D2).

    The lines are put into the outbox as a worker would have left them: run, durable, not yet said.
    """
    lines = 10_000
    broker = fleet.broker()
    job = fleet.submit(lines)
    fleet.until(lambda: fleet.status(job).status == "in_progress", "the job runs")
    fleet.end(broker, signal.SIGTERM)
    fill_outbox(fleet, job, lines)
    fleet.broker()
    fleet.worker()
    info = fleet.ended(job)
    assert (info.completed, info.wasted) == (lines, 0)
    assert not fleet.runs()
    assert fleet.audit(job).holds


def fill_outbox(fleet: Fleet, job: str, lines: int) -> None:
    """What a broker that gave all lines to one worker, and that worker, have on disk."""
    store = sqlite3.connect(fleet.folder / "state" / "broker.sqlite")
    store_id = store.execute("SELECT store_id FROM broker").fetchone()[0]
    slot = fleet.folder / "workers" / "0"
    slot.mkdir(parents=True)
    box = Outbox(slot)
    found = box.begin()
    with store:
        store.execute("UPDATE lines SET state=1, attempt=1, held=1, worker=?", (found.worker,))
        store.execute("INSERT INTO sessions VALUES (?,?,?,?,?,?,?)", (found.worker, "client", 1, 1, 1, "lost", 0.0))
    store.close()
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "x"}}]}).encode()
    box.write([do.Save(Outcome(LineRef(job, n, 1), "ok", 200, 1, 1, body), store_id) for n in range(lines)],
              found.incarnation)  # fmt: skip
    box.close()
