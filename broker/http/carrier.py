"""shell: takes each batch to the broker as a job, and keeps its end: on threads of its own, and again after a restart.

A batch that was answered for is on the disk; what is left to do for it is read from there, and every step may be done
twice: the job's id is the batch's, so that a hand-over cut off anywhere goes on where the broker stands.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from broker import client as fleet_client
from broker.client_rules import ENDED, as_json, job_name
from broker.http.faults import ApiFault, BrokerFailure
from broker.http.fleet import Fleet, StoppingError
from broker.http.records import FILE, BatchRecord, FileRecord
from broker.http.shelf import Shelf
from common import limits, messages
from common.clock import Clock
from common.errors import HaulierError

log = structlog.get_logger(room="broker.http.carrier")
Place = tuple[str, str]
"""A tenant, and a batch of its."""


class Carrier:
    """``add``, ``look`` and ``uses`` may be called from any thread."""

    def __init__(self, shelf: Shelf, fleet: Fleet, clock: Clock) -> None:
        self._shelf, self._fleet, self._clock = shelf, fleet, clock
        self._open: dict[Place, str] = {}
        self._busy: set[Place] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._told: dict[Place, str] = {}
        self._pool = ThreadPoolExecutor(limits.HTTP_CARRIERS_COUNT, "carrier")
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)

    def start(self) -> None:
        """Go on with every batch that has not ended."""
        for tenant in self._shelf.tenants():
            for name in self._shelf.batches(tenant):
                try:
                    record = self._shelf.batch(tenant, name)
                except ApiFault as fault:
                    log.error("batch_left_out", batch=name, reason=str(fault))
                    continue
                if not record.status:
                    self._open[(tenant, name)] = "" if record.handed_over else record.input_file_id
        self._thread.start()

    def stop(self) -> None:
        """Nothing more is begun; what is under way ends at its next wait."""
        self._fleet.stopping.set()
        self._wake.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, tenant: str, record: BatchRecord) -> None:
        """A batch is kept: see to it."""
        with self._lock:
            self._open[(tenant, record.id)] = record.input_file_id
        self._wake.set()

    def look(self) -> None:
        """Something may have changed: look now."""
        self._wake.set()

    def uses(self, tenant: str, file: str) -> str:
        """A batch that still has to hand this file over; empty for none."""
        with self._lock:
            return next((name for (one, name), needs in self._open.items() if (one, needs) == (tenant, file)), "")

    def _run(self) -> None:
        while not self._fleet.stopping.is_set():
            self._wake.clear()
            with self._lock:
                due = [place for place in self._open if place not in self._busy]
                self._busy.update(due)
            for place in due:
                try:
                    self._pool.submit(self._see_to, place)
                except RuntimeError:  # the pool is shut down: we stop
                    return
            self._wake.wait(max(limits.HTTP_LOOK_S, len(self._open) / limits.HTTP_LOOKS_A_SECOND_MAX_COUNT))

    def _see_to(self, place: Place) -> None:
        try:
            ended = self._step(*place)
        except StoppingError:
            return
        except HaulierError as error:  # the broker is away, the disk is full, the tenant's key is gone: it may pass
            ended = False
            if self._is_news(place, str(error)):
                log.warning("batch_waits", tenant=place[0], batch=place[1], reason=str(error))
        except Exception as error:  # one batch must not end the thread that all the others need
            ended = False
            if self._is_news(place, repr(error)):
                log.error("batch_step_failed", tenant=place[0], batch=place[1], exc_info=error)
        with self._lock:
            self._busy.discard(place)
            if ended:
                self._open.pop(place, None)
                self._told.pop(place, None)

    def _is_news(self, place: Place, words: str) -> bool:
        """Whether a batch waits for another reason than the one last told."""
        former, self._told[place] = self._told.get(place), words
        return words != former

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _step(self, tenant: str, name: str) -> bool:
        """Bring a batch on as far as it goes now; whether it has ended."""
        record = self._shelf.batch(tenant, name)
        if record.status:
            return True
        try:
            if not record.handed_over:
                status = _given_up(record, self._clock.wall())
                if status and not self._begun(tenant, record):
                    self._end(tenant, record, status, None, ())
                    return True
                record = self._hand_over(tenant, record)
            info = self._info(tenant, record)
        except BrokerFailure as failure:
            if failure.passes:
                raise
            self._end(tenant, record, "failed", None, (_error(failure.code, str(failure)),))
            return True
        if info.status not in ENDED:
            return False
        self._finish(tenant, record, info)
        return True

    def _begun(self, tenant: str, record: BatchRecord) -> bool:
        """Whether the broker has heard of the job: then it is cancelled there."""
        return self._fleet.tenant(tenant).find(messages.AskStatus(0, record.job), messages.JobInfo) is not None

    def _hand_over(self, tenant: str, record: BatchRecord) -> BatchRecord:
        """The broker has the whole input, or has said why it does not take it (``BrokerFailure``)."""
        try:
            file = self._shelf.file(tenant, record.input_file_id)
            source = fleet_client.InputFile(self._shelf.data(tenant, file.id), file.bytes, file.sha256)
            order = fleet_client.Order(
                record.job, job_name(file.filename), window_s=record.window_s, url=record.endpoint
            )
            fleet_client.submit(self._fleet.tenant(tenant), source, order, lambda done, total: None)
        except (ApiFault, FileNotFoundError) as error:
            raise BrokerFailure("input_file_deleted", f"the input file is not there any more: {error}", 4) from error
        record = self._shelf.change(tenant, record.id, lambda one: dataclasses.replace(one, handed_over=True))
        with self._lock:
            self._open[(tenant, record.id)] = ""
        log.info("batch_handed_over", tenant=tenant, batch=record.id, job=record.job)
        return record

    def _info(self, tenant: str, record: BatchRecord) -> messages.JobInfo:
        """Its job as it is now; a cancel that the broker may not have heard of is told first."""
        asked = messages.CancelJob(0, record.job) if record.cancelling_at else messages.AskStatus(0, record.job)
        return self._fleet.tenant(tenant).ask(asked, messages.JobInfo)

    def _finish(self, tenant: str, record: BatchRecord, info: messages.JobInfo) -> None:
        """Give its files ids and sizes, then keep its end. The ids come first, so that a second try gives no others."""
        if info.status == "failed":
            self._end(tenant, record, "failed", info, self._errors(tenant, info))
            return

        def planned(one: BatchRecord) -> BatchRecord:
            return dataclasses.replace(
                one, finalizing_at=one.finalizing_at or self._clock.wall(),
                output_file_id=one.output_file_id or (self._shelf.new_id(FILE) if info.completed else ""),
                error_file_id=one.error_file_id or (self._shelf.new_id(FILE) if info.failed else ""),
            )  # fmt: skip

        record = self._shelf.change(tenant, record.id, planned)
        for which, name in (("output", record.output_file_id), ("error", record.error_file_id)):
            if name and name not in self._shelf.files(tenant):
                size = self._size(tenant, record.job, which)
                title = f"{record.id}_{which}.jsonl"
                self._shelf.put_file(
                    tenant,
                    FileRecord(name, size, self._clock.wall(), title, "batch_output", job=record.job, which=which),
                )
        self._end(tenant, record, info.status, info, ())

    def _size(self, tenant: str, job: str, which: str) -> int:
        """Bytes of one of a job's files: they are counted where they are, and not copied."""
        download, size = fleet_client.Download(self._fleet.tenant(tenant), job, which), 0
        while data := download.pull():
            size += len(data)
        return size

    def _errors(self, tenant: str, info: messages.JobInfo) -> tuple[dict[str, Any], ...]:
        found: list[dict[str, Any]] = []
        if info.problems:
            for problem in fleet_client.problems(self._fleet.tenant(tenant), info.job):
                if len(found) == limits.HTTP_ERRORS_MAX_COUNT:
                    break
                found.append(_error(problem.code, problem.message, problem.line))
        if info.problems > len(found) or not found:
            code, _, words = info.reason.partition(": ")
            more = info.problems - len(found)
            found.append(_error("more_errors", f"and {more} more bad lines") if more else _error(code, words or code))
        return tuple(found)

    def _end(
        self, tenant: str, record: BatchRecord, status: str, info: messages.JobInfo | None,
        errors: tuple[dict[str, Any], ...],
    ) -> None:  # fmt: skip
        ended_at = info.ended_at if info is not None else self._clock.wall()
        plain = as_json(info) if info is not None else {}
        self._shelf.change(
            tenant, record.id,
            lambda one: dataclasses.replace(one, status=status, job_info=plain, errors=errors, ended_at=ended_at),
        )  # fmt: skip
        log.info("batch_ended", tenant=tenant, batch=record.id, status=status)


def _given_up(record: BatchRecord, now: float) -> str:
    """How a batch that the broker has not taken over ends now, unless it has heard of it after all; empty for not."""
    if record.cancelling_at:
        return "cancelled"
    return "expired" if now > record.created_at + record.window_s else ""


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
