"""What fleets, brokers and batch services are reported to do wrong in life: each case is a test that names its kind.

Real processes where the kind needs them; the limits of the file beside it where a rule alone decides.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import database, limits, messages
from common import keys as key_files
from common.config import ClientSettings, KeySettings
from common.errors import RefusedError
from tests.integration.fleet_kit import CONCURRENCY, Fleet, chat
from tests.integration.tcp_proxy import Proxy

LINES = 40


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[Proxy]:
    made = Proxy(fleet.endpoint)
    yield made
    made.close()


def test_01_a_line_longer_than_every_timer_runs_once(fleet: Fleet) -> None:
    """Kind: a task longer than the visibility time-out is given to a second worker while the first still runs it."""
    fleet.broker()
    for name in ("one", "two"):
        fleet.worker(name=name, delay_ms=int(1000 * (limits.LIVENESS_S + 2)))
    job = fleet.submit(4)
    fleet.whole(job, 4)
    assert fleet.again() == 0


def test_02_a_broker_restarted_under_a_busy_worker_runs_nothing_twice(fleet: Fleet) -> None:
    """Kind: the broker restarts while a worker is busy, the ack fails, the task runs again."""
    broker = fleet.broker()
    fleet.worker(delay_ms=1500)
    job = fleet.submit(CONCURRENCY)
    fleet.until_run(CONCURRENCY)
    fleet.end(broker, signal.SIGTERM)
    fleet.broker()
    fleet.whole(job, CONCURRENCY)
    assert fleet.again() == 0


def test_03_a_store_that_cannot_write_acks_nothing(fleet: Fleet) -> None:
    """Kind: the result store is down, the task is acked anyway, the result is gone."""
    broker = fleet.broker(HAULIER_CRASH_AT="broker.before_result_commit")
    fleet.worker()
    job = fleet.submit(LINES)
    fleet.until(lambda: broker.poll() is not None, "it dies with results uncommitted")
    outbox = sqlite3.connect(f"file:{fleet.folder / 'workers' / '0' / 'outbox.db'}?mode=ro", uri=True)
    kept = outbox.execute("SELECT count(*) FROM result").fetchone()[0]
    outbox.close()
    assert kept > 0
    fleet.broker()
    fleet.whole(job, LINES)
    assert fleet.again() == 0


def test_04_a_link_cut_exactly_at_the_ack_costs_no_second_run(fleet: Fleet, proxy: Proxy) -> None:
    """Kind: a long task ends, its result is stored, the connection breaks before the ack: it runs again."""
    fleet.broker()
    fleet.worker(at=proxy.endpoint, delay_ms=1000)
    job = fleet.submit(CONCURRENCY)
    fleet.until_run(CONCURRENCY)
    proxy.mute_down = True
    fleet.until(lambda: fleet.status(job).completed == CONCURRENCY, "all are stored, and no ack arrives")
    proxy.mute_down = False
    proxy.cut()
    fleet.until(lambda: fleet.log("worker").count('"welcomed"') >= 2, "it logs in again")
    audit = fleet.whole(job, CONCURRENCY)
    assert (fleet.again(), audit.wasted) == (0, 0)


def test_05_a_worker_that_holds_its_interpreter_lock_keeps_its_work(fleet: Fleet) -> None:
    """Kind: a worker in a long call that holds the interpreter lock is declared dead and its work reclaimed."""
    fleet.broker()
    fleet.worker(delay_ms=200, HAULIER_HOLD_LOCK_S="3")
    fleet.worker(name="idle", delay_ms=200)
    job = fleet.submit(LINES)
    fleet.whole(job, LINES)
    assert "session_gone" not in fleet.log("broker")
    assert fleet.again() == 0


def test_06_a_flapping_link_condemns_no_line(fleet: Fleet, proxy: Proxy) -> None:
    """Kind: each lost connection counts against the task that ran, until a good one is set aside as poison."""
    fleet.broker()
    fleet.worker(at=proxy.endpoint, delay_ms=1500)
    job = fleet.submit(4)
    fleet.until_run(4)
    for _ in range(6):
        proxy.cut()
        time.sleep(0.3)
    fleet.whole(job, 4)
    assert "worker_died" not in fleet.log("broker")


def test_07_a_worker_back_under_the_same_name_gets_its_lines_back(fleet: Fleet) -> None:
    """Kind: a container restarts with the same host name and pid; what it had in flight is never recovered."""
    fleet.broker()
    worker = fleet.worker(delay_ms=300)
    job = fleet.submit(LINES)
    fleet.until_run(CONCURRENCY)
    fleet.end(worker)
    fleet.worker(delay_ms=10)
    fleet.whole(job, LINES)
    names = [json.loads(line)["worker"] for line in fleet.log("worker").splitlines() if '"worker_starts"' in line]
    assert len(names) == 2
    assert len(set(names)) == 1


def test_08_a_fleet_brought_up_again_at_once_starts(fleet: Fleet) -> None:
    """Kind: brought up again right after a hard stop, the worker is refused: its old registration still counts."""
    for _ in range(2):
        broker, worker = fleet.broker(), fleet.worker()
        fleet.until(lambda: bool(fleet.workers()), "the worker is in", 20)
        fleet.end(worker)
        worker = fleet.worker()  # the broker has not noticed yet
        fleet.until(lambda: any(one.phase == "ready" for one in fleet.workers()), "it is in again", 20)
        fleet.end(worker)
        fleet.end(broker)


def test_09_a_new_connection_of_a_known_worker_is_heard_by_a_busy_broker(fleet: Fleet) -> None:
    """Kind: a new connection under a used identity while the router is busy: its messages never arrive."""
    broker, worker = fleet.broker(), fleet.worker(delay_ms=50)
    job = fleet.submit(LINES)
    fleet.until_run(CONCURRENCY)
    broker.send_signal(signal.SIGSTOP)
    fleet.end(worker)
    fleet.worker(delay_ms=10)
    time.sleep(1.5)  # it knocks while nobody reads
    broker.send_signal(signal.SIGCONT)
    fleet.whole(job, LINES)


def test_10_a_worker_consumes_after_its_brokers_troubles(fleet: Fleet) -> None:
    """Kind: after a broker's error the worker still beats but never consumes again."""
    broker = fleet.broker()
    fleet.worker(delay_ms=5)
    for _ in range(2):
        job = fleet.submit(LINES)
        fleet.whole(job, LINES)
        fleet.end(broker)
        broker = fleet.broker()
    job = fleet.submit(LINES)
    fleet.whole(job, LINES)


def test_11_the_last_lines_do_not_hang_beside_idle_workers(fleet: Fleet) -> None:
    """Kind: a job is stuck at 95 to 99 % with idle workers and pending items."""
    fleet.broker()
    frozen = fleet.worker(delay_ms=100)
    job = fleet.submit(LINES)
    fleet.until_run(CONCURRENCY)
    frozen.send_signal(signal.SIGSTOP)
    fleet.worker(name="idle", delay_ms=5)
    fleet.whole(job, LINES)
    frozen.send_signal(signal.SIGCONT)


def test_12_prompts_that_fill_the_ring_one_by_one_all_pass(fleet: Fleet) -> None:
    """Kind: the ring is full, nothing is in it that moves, and nothing ever moves again."""
    fleet.broker()
    fleet.worker("--context-tokens", "250000", delay_ms=1)
    lines = [chat(number, f"{number:06d}" * (15_000 + 5_000 * (number % 4)), max_tokens=8) for number in range(24)]
    info = fleet.ended(fleet.submit(lines))
    assert (info.completed, info.failed) == (24, 0), info


def test_13_a_custom_id_used_twice_is_refused_with_its_lines(fleet: Fleet) -> None:
    """Kind: a duplicate custom_id leaves the batch stuck for ever."""
    fleet.broker()
    fleet.worker()
    lines = [chat(0), chat(1), chat(0, "again")]
    info = fleet.ended(fleet.submit(lines))
    assert info.status == "failed"
    assert "duplicate_custom_id" in info.reason
    lenient = fleet.submit(lines, lenient=True)
    info = fleet.ended(lenient)
    assert (info.completed, info.failed) == (2, 1), info
    assert fleet.audit(lenient).holds


def test_14_memory_stays_flat_over_a_hundred_thousand_lines(fleet: Fleet) -> None:
    """Kind: hundreds of thousands of lines exhaust memory near the end. Bounded in broker and client."""
    lines = 100_000
    broker = fleet.broker()
    path = fleet.folder / "long.jsonl"
    with path.open("w") as file:
        for number in range(lines):
            file.write(json.dumps(chat(number, "x" * 100, max_tokens=4)) + "\n")
    own, theirs = psutil.Process(), psutil.Process(broker.pid)
    before = own.memory_info().rss
    job = fleet.submit_file(path)
    fleet.worker("--concurrency", "800", delay_ms=0)
    fleet.until(lambda: fleet.status(job).completed >= 10_000, "ten thousand are done", 120)
    early = theirs.memory_info().rss
    info = fleet.ended(job, 240)
    assert (info.completed, info.failed) == (lines, 0), info
    assert theirs.memory_info().rss - early <= 50 * 1024 * 1024
    assert own.memory_info().rss - before <= 50 * 1024 * 1024


def test_15_one_impossible_line_ends_alone(fleet: Fleet) -> None:
    """Kind: one prompt that is too long ends the whole job; one malformed line ends the run."""
    fleet.broker()
    fleet.worker("--context-tokens", "100", delay_ms=1)
    good = [json.dumps(chat(number)) for number in (0, 2)]
    data = "\n".join([good[0], json.dumps(chat(1, "x" * 500)), '{"custom_id": "cut', good[1]]) + "\n"
    job = fleet.submit(data.encode(), lenient=True)
    info = fleet.ended(job)
    assert (info.status, info.completed, info.failed) == ("completed", 2, 2), info
    errors = fleet.fetched(job, "error")
    said = json.dumps(errors)
    assert "context_length_exceeded" in said
    assert "invalid_json_line" in said


def test_16_a_job_cancelled_while_it_runs_accounts_for_every_line(fleet: Fleet) -> None:
    """Kind: cancelled while running: finished ids are in neither file."""
    fleet.broker()
    fleet.worker(delay_ms=100)
    job = fleet.submit(LINES)
    fleet.until(lambda: fleet.status(job).completed >= CONCURRENCY, "some are done")
    fleet.client.ask(messages.CancelJob(0, job), messages.JobInfo)
    info = fleet.ended(job)
    output, errors = fleet.fetched(job), fleet.fetched(job, "error")
    ids = Counter(line["custom_id"] for line in output + errors)
    assert info.status == "cancelled"
    assert ids == Counter(f"id-{number}" for number in range(LINES))
    assert len(output) >= CONCURRENCY
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


def test_17_a_job_of_failures_does_not_read_as_success(fleet: Fleet) -> None:
    """Kind: failures counted as completed; ``completed`` with every line failed reads as success."""
    from broker.client_rules import job_exit_code

    fleet.broker()
    fleet.worker("--context-tokens", "100", delay_ms=1)
    info = fleet.ended(fleet.submit([chat(number, "x" * 500) for number in range(5)]))
    assert (info.completed, info.failed) == (0, 5), info
    assert "5 of 5 lines failed" in info.reason
    assert job_exit_code(info) == 1


def test_18_one_keys_long_job_does_not_starve_anothers_short_one(fleet: Fleet) -> None:
    """Kind: one tenant's ten thousand requests starve everyone else for a day."""
    from broker import client as fleet_client

    other = key_files.add(fleet.keys, "guest")
    fleet.broker()
    long = fleet.submit(5_000)
    fleet.worker(delay_ms=20)
    fleet.until(lambda: fleet.status(long).completed > 0, "the long one runs")
    mine = fleet.client
    settings = ClientSettings(tuple(fleet.endpoints), KeySettings(other), 60)
    with fleet_client.Client(settings) as fleet._client:
        short = fleet.submit(20)
        fleet.ended(short, 30)
    fleet._client = mine
    assert fleet.status(long).completed < 2_500


def test_19_a_store_on_a_shared_host_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind: a write-ahead log on a shared host mount is corrupt within a minute. Refused at the start."""
    for kind in ("nfs4", "9p", "virtiofs", "fuse.sshfs", "cifs"):
        monkeypatch.setattr(database, "filesystem", lambda folder, kind=kind: kind)
        with pytest.raises(RefusedError, match=kind):
            database.refuse_unsafe(tmp_path, "the broker's store")


def test_20_another_writer_makes_the_broker_wait_and_not_fail(fleet: Fleet) -> None:
    """Kind: random "database is locked" under several writers."""
    broker = fleet.broker()
    fleet.worker(delay_ms=5)
    job = fleet.submit(LINES)
    other = sqlite3.connect(fleet.folder / "state" / "broker.sqlite", isolation_level=None, timeout=10)
    for _ in range(3):
        other.execute("BEGIN IMMEDIATE")
        time.sleep(0.5)
        other.execute("COMMIT")
        time.sleep(0.05)
    other.close()
    fleet.whole(job, LINES)
    assert broker.poll() is None
    assert "locked" not in fleet.log("broker")


def test_21_a_bad_job_holds_nothing_and_can_be_removed(fleet: Fleet) -> None:
    """Kind: bad batches keep counting against a quota and cannot be removed."""
    fleet.broker()
    fleet.worker()
    bad = fleet.submit(b"not a request\n" * 50)
    assert fleet.ended(bad).status == "failed"
    fleet.until(lambda: not list((fleet.folder / "state" / "spool").glob("*.jsonl")), "its input is dropped")
    fleet.client.ask(messages.DeleteJob(0, bad), messages.Deleted)
    with pytest.raises(RefusedError, match="no job"):
        fleet.status(bad)
    fleet.whole(fleet.submit(LINES), LINES)


def test_22_a_cancelled_jobs_worker_stops_computing(fleet: Fleet) -> None:
    """Kind: a cancelled job's worker computes on for ever; the device is busy with what nobody wants."""
    fleet.broker()
    fleet.worker(delay_ms=60_000)
    job = fleet.submit(CONCURRENCY)
    fleet.until_run(CONCURRENCY)
    fleet.client.ask(messages.CancelJob(0, job), messages.JobInfo)
    began = time.monotonic()
    assert fleet.ended(job).status == "cancelled"
    fleet.until(lambda: all(not one.running for one in fleet.workers()), "the engine runs nothing", 10)
    assert time.monotonic() - began < 30  # lines of a minute were stopped, not waited for
    assert fleet.audit(job).wasted == 0
