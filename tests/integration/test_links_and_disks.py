"""Bad links, full and damaged disks, clocks that jump, held locks: real processes, nothing lost (D1-D6, S3)."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import RefusedError
from tests.integration.fleet_kit import Fleet
from tests.integration.tcp_proxy import Proxy

LINES = 60


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[Proxy]:
    """Between the worker and the broker; the client goes straight."""
    made = Proxy(fleet.endpoint)
    yield made
    made.close()


def test_a_link_that_delays_costs_only_time(fleet: Fleet, proxy: Proxy) -> None:
    """Every piece is 50 ms late each way: no session is lost, nothing is run twice."""
    fleet.broker()
    proxy.delay_s = 0.05
    fleet.worker(at=proxy.endpoint)
    job = fleet.submit(LINES)
    fleet.whole(job, LINES)
    assert fleet.again() == 0
    assert "session_gone" not in fleet.log("broker")


def test_a_link_cut_in_the_middle_of_a_message_loses_nothing(fleet: Fleet, proxy: Proxy) -> None:
    """Three times the connection ends after so many bytes, wherever that is: what was durable is said again."""
    fleet.broker()
    fleet.worker(at=proxy.endpoint)
    job = fleet.submit(LINES)
    for _ in range(3):
        cuts = proxy.cuts
        proxy.carried, proxy.cut_after = 0, 1500
        fleet.until(lambda cuts=cuts: proxy.cuts > cuts or fleet.status(job).status == "completed", "it is cut")
    fleet.whole(job, LINES)
    assert proxy.cuts
    assert "message_broken" not in fleet.log("worker")


def test_a_link_that_stalls_is_noticed_and_found_again(fleet: Fleet, proxy: Proxy) -> None:
    """Nothing passes for longer than the liveness, and nobody is told: silence ends the session, on both ends."""
    fleet.broker()
    worker = fleet.worker(at=proxy.endpoint, delay_ms=50)
    job = fleet.submit(LINES)
    fleet.until_run(LINES // 4)
    proxy.stalled = True
    fleet.until(lambda: not fleet.workers(), "the broker counts it as gone", 15)
    fleet.until(lambda: '"session_gone"' in fleet.log("worker"), "the worker notices", 15)
    proxy.stalled = False
    fleet.whole(job, LINES)
    assert worker.poll() is None
    assert fleet.again() == 0  # it came back with what it held


def test_a_result_of_64_mb_over_a_slow_link_keeps_the_session(fleet: Fleet, proxy: Proxy) -> None:
    """S3: one answer takes many beats to cross; beats go between its parts, and a short line is not stuck behind it."""
    size = 64 * 1000 * 1000
    fleet.broker()
    proxy.bytes_a_second = 8 * 1024 * 1024
    fleet.worker(at=proxy.endpoint, HAULIER_LONG_BYTES=str(size))
    job = fleet.submit(2)
    info = fleet.ended(job, 120)
    assert (info.completed, info.failed) == (2, 0), info
    assert info.ended_at - info.started_at > 6  # longer than the liveness
    assert "session_gone" not in fleet.log("broker")
    assert fleet.again() == 0
    said = [line["response"]["body"]["choices"][0]["message"]["content"] for line in fleet.fetched(job)]
    assert said[0] == "say 1"  # the short one was not stuck behind the long one
    assert size - 100 < len(said[1]) < size


def test_a_held_interpreter_lock_costs_no_session(fleet: Fleet) -> None:
    """S3: a helper in C keeps the worker's interpreter for 3 s, its session thread with it; its work stays its own."""
    fleet.broker()
    fleet.worker(delay_ms=50, HAULIER_HOLD_LOCK_S="3")
    job = fleet.submit(LINES)
    began = time.monotonic()
    fleet.whole(job, LINES)
    assert time.monotonic() - began > 3  # it was held
    assert "session_gone" not in fleet.log("broker")
    assert fleet.again() == 0


@pytest.mark.parametrize("jump", ["86400 0", "-86400 0", "3600 3600"])
def test_a_clock_that_jumps_loses_nothing(fleet: Fleet, jump: str) -> None:
    """D6: the broker's wall clock is set a day on or back, or its machine slept an hour, in the middle of a job."""
    clock = fleet.folder / "clock"
    fleet.broker(HAULIER_CLOCK=str(clock))
    fleet.worker(delay_ms=50)
    job = fleet.submit(LINES, window_s=7200)
    fleet.until_run(LINES // 3)
    fresh = fleet.folder / "clock.new"
    fresh.write_text(jump)
    fresh.rename(clock)
    fleet.whole(job, LINES)


def test_a_truncated_store_is_refused_and_touched_no_further(fleet: Fleet) -> None:
    """D6: half of the store's file is gone: the broker says which file, and what to do."""
    broker = fleet.broker()
    fleet.worker(delay_ms=5)
    job = fleet.submit(LINES)
    fleet.whole(job, LINES)
    fleet.end(broker, signal.SIGTERM)
    path = fleet.folder / "state" / "broker.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    half = path.stat().st_size // 2
    os.truncate(path, half)
    again = fleet.broker(name="again")
    assert again.wait(30) == 4
    assert "broker.sqlite" in fleet.log("again")
    assert path.stat().st_size == half


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def takes_again(fleet: Fleet, job: str) -> bool:
    """A broker without room answers every question with that."""
    try:
        return bool(fleet.status(job))
    except RefusedError as refusal:
        if "disk is full" not in str(refusal):
            raise
        return False


@pytest.mark.parametrize("whose", ["state", "workers"])
def test_a_disk_that_fills_loses_nothing_and_goes_on(fleet: Fleet, small_disk: Path, whose: str) -> None:
    """D6: the broker's, then the worker's disk fills in the middle of a job: a clear word, no ack, nothing lost; with
    room again all of it completes, and nothing that was finished is run again.
    """
    (fleet.folder / whose).symlink_to(small_disk)
    fleet.broker()
    fleet.worker(delay_ms=30)
    job = fleet.submit(LINES)
    fleet.until_run(LINES // 4)
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        except OSError:
            pass
    name, words = ("broker", "store_full") if whose == "state" else ("worker", "outbox_blocked")
    fleet.until(lambda: words in fleet.log(name), "it says that its disk is full", 30)
    time.sleep(1.0)
    filler.unlink()
    fleet.until(lambda: takes_again(fleet, job), "the broker takes again", 30)
    fleet.whole(job, LINES)
    assert fleet.again() == 0
