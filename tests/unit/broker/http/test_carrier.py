"""Batches on their way to the broker and to their end, over a scripted broker: cut anywhere, and gone on with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.http.carrier import Carrier
from broker.http.fleet import Fleet
from broker.http.records import BATCH, BatchRecord
from broker.http.shelf import Shelf
from common import keys as key_files
from common import limits, messages
from common.clock import SystemClock
from common.config import KeySettings
from tests.unit.broker.conftest import ScriptedBroker

LINES = b"".join(b'{"n": %d}\n' % number for number in range(500))


class Bench:
    """One shelf, one broker, and carriers over them, one after the other."""

    def __init__(self, folder: Path) -> None:
        key_files.init(folder / "keys")
        self.folder, self.keys = folder, KeySettings(folder / "keys")
        self.broker = ScriptedBroker(self.keys).start()
        self.shelf = Shelf(folder / "http", SystemClock())
        self.carrier: Carrier | None = None

    def start(self) -> None:
        self.fleet = Fleet(self.broker.endpoint, self.keys, by_tenant=False)
        self.carrier = Carrier(self.shelf, self.fleet, SystemClock())
        self.carrier.start()

    def stop(self) -> None:
        if self.carrier is not None:
            self.carrier.stop()
            self.fleet.close()
            self.carrier = None

    def batch(self, **changes: object) -> BatchRecord:
        upload = self.shelf.begin()
        upload.write(LINES)
        file = self.shelf.keep("local", upload, "in.jsonl").id
        record = BatchRecord(self.shelf.new_id(BATCH), time.time(), file, "/v1/completions", "24h", 86400, **changes)  # type: ignore[arg-type]
        self.shelf.put_batch("local", record)
        return record

    def until(self, name: str, holds: Callable[[BatchRecord], bool]) -> BatchRecord:
        deadline = time.monotonic() + 60
        while not holds(record := self.shelf.batch("local", name)):
            assert time.monotonic() < deadline, record
            time.sleep(0.01)
        return record


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(limits, "PART_MAX_BYTES", 1000)
    monkeypatch.setattr(limits, "HTTP_LOOK_S", 0.02)
    made = Bench(tmp_path)
    yield made
    made.stop()
    made.broker.stop()


def test_a_batch_is_handed_over_and_its_end_kept(bench: Bench) -> None:
    """The job is for the batch's url and window; the sizes are those of what a download would bring."""
    record = bench.batch()
    bench.start()
    bench.until(record.id, lambda one: one.handed_over)
    job = bench.broker.jobs[record.job]
    assert (bytes(job.data), job.order.url, job.order.window_s) == (LINES, "/v1/completions", 86400)
    job.output, job.error = [b"a" * 3000, b"b"], [b"c"]
    job.status = "completed"
    ended = bench.until(record.id, lambda one: bool(one.status))
    sizes = [bench.shelf.file("local", name).bytes for name in (ended.output_file_id, ended.error_file_id)]
    assert (ended.status, sizes) == ("completed", [3003, 2])


@pytest.mark.parametrize("message", [1, 2, 5, 9])
def test_a_hand_over_cut_anywhere_goes_on(bench: Bench, message: int) -> None:
    """The broker is killed at that message and loses what it had not synced; then this side ends, too."""
    record = bench.batch()
    bench.broker.lose_on_kill = 500
    bench.broker.kill_at(message)
    bench.start()
    deadline = time.monotonic() + 60
    while not bench.broker.kills and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.stop()
    bench.start()
    bench.until(record.id, lambda one: one.handed_over)
    assert bytes(bench.broker.jobs[record.job].data) == LINES
    assert len(bench.broker.jobs) == 1


def test_what_the_broker_refuses_for_good_fails_and_the_rest_waits(bench: Bench) -> None:
    """Control: busy for a while is no failure."""
    first, second = bench.batch(), bench.batch()

    def answer(message: object) -> object:
        if isinstance(message, messages.Submit) and message.job == first.job:
            return messages.Failure(message.request, "disk_reserve", "no room", 4)
        if isinstance(message, messages.Submit) and len(bench.broker.heard) < 20:
            return messages.Failure(message.request, "busy", "ask again", 3)
        return None

    bench.broker.answer = answer
    bench.start()
    failed = bench.until(first.id, lambda one: bool(one.status))
    assert (failed.status, failed.errors[0]["code"]) == ("failed", "disk_reserve")
    assert bench.until(second.id, lambda one: one.handed_over).status == ""


def test_an_input_deleted_before_it_was_handed_over_fails_its_batch(bench: Bench) -> None:
    """Control: ``uses`` says so while it is needed, so that a deletion is refused."""
    record = bench.batch()
    bench.shelf.delete_file("local", record.input_file_id)
    kept = bench.batch()
    bench.broker.answer = lambda message: (
        messages.Failure(message.request, "busy", "", 3) if getattr(message, "job", "") == kept.job else None
    )
    bench.start()
    failed = bench.until(record.id, lambda one: bool(one.status))
    assert (failed.status, failed.errors[0]["code"]) == ("failed", "input_file_deleted")
    assert bench.carrier is not None
    assert bench.carrier.uses("local", kept.input_file_id) == kept.id
    assert bench.carrier.uses("bob", kept.input_file_id) == ""


def test_cancelled_before_the_broker_heard_of_it(bench: Bench) -> None:
    """It never becomes a job. Control: the one beside it does."""
    bench.broker.answer = lambda message: (
        messages.Failure(message.request, "no_job", "no job", 4)
        if isinstance(message, messages.AskStatus) and message.job not in bench.broker.jobs
        else None
    )
    record, other = bench.batch(cancelling_at=2.0), bench.batch()
    bench.start()
    assert bench.until(record.id, lambda one: bool(one.status)).status == "cancelled"
    bench.until(other.id, lambda one: one.handed_over)
    assert list(bench.broker.jobs) == [other.job]


def test_a_broker_whose_disk_is_full_costs_no_batch(bench: Bench) -> None:
    """It was answered for: it waits until there is room. Control: what the broker refuses for good fails it."""
    refused: dict[str, str] = {"code": "store_full"}

    def full(message: object) -> object:
        if isinstance(message, messages.Submit) and refused:
            return messages.Failure(message.request, refused["code"], "no room", 4)
        return None

    bench.broker.answer = full
    record = bench.batch()
    bench.start()
    for code in ("store_full", "disk"):
        refused["code"] = code
        heard = len(bench.broker.heard)
        deadline = time.monotonic() + 60
        while len(bench.broker.heard) < heard + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert bench.shelf.batch("local", record.id).status == ""
    refused.clear()
    assert bench.until(record.id, lambda one: one.handed_over).status == ""
    refused["code"] = "job_deleted"
    other = bench.batch()
    bench.carrier.add("local", other)  # type: ignore[union-attr]
    assert bench.until(other.id, lambda one: bool(one.status)).status == "failed"


def test_a_batch_that_never_reached_the_broker_expires_with_its_window(bench: Bench) -> None:
    """Control: one that has time left waits on, and one that the broker has heard of is the broker's to end."""

    def answer(message: object) -> object:
        if isinstance(message, messages.Submit):
            return messages.Failure(message.request, "store_full", "no room", 4)
        return messages.Failure(getattr(message, "request", 0), "no_job", "no such job", 4)

    bench.broker.answer = answer
    late, early = bench.batch(), bench.batch()
    bench.shelf.put_batch("local", dataclasses.replace(late, created_at=time.time() - late.window_s - 1))
    bench.shelf.put_batch("local", dataclasses.replace(early, created_at=time.time()))
    bench.start()
    assert bench.until(late.id, lambda one: bool(one.status)).status == "expired"
    assert bench.shelf.batch("local", early.id).status == ""
