"""shell: the endpoints: files, batches, models, health. Each reads what is asked, has it done, and words the answer.

What may wait for the disk or the broker runs on the server's own few threads; the event loop only moves bytes. An
upload goes to the disk as it comes, a download comes from the broker a page at a time, no faster than it is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from broker.client import Download
from broker.client_rules import ENDED
from broker.http import objects, wanted
from broker.http.carrier import Carrier
from broker.http.door import TENANT
from broker.http.faults import ApiFault, BrokerFailure, missing
from broker.http.fleet import Fleet
from broker.http.form import Form, too_large
from broker.http.records import BATCH, FILE, BatchRecord, FileRecord
from broker.http.shelf import Shelf, Upload
from broker.http.visits import Visits
from broker.http.web import Site
from common import limits, messages
from common.clock import Clock
from common.messages import JobInfo

T = TypeVar("T")
WRITE_BYTES = 1024 * 1024
"""What of an upload is held before it is written."""


class Api:
    """The endpoints over one shelf and one fleet. ``max_bytes`` is the most an upload's file may have, ``pulse`` the
    file that the broker's loop touches.
    """

    def __init__(
        self, shelf: Shelf, fleet: Fleet, carrier: Carrier, clock: Clock, max_bytes: int, pulse: Path,
        visits: Visits | None = None,
    ) -> None:  # fmt: skip
        self._shelf, self._fleet, self._carrier, self._clock, self._pulse = shelf, fleet, carrier, clock, pulse
        self._max_bytes = max_bytes
        self._since = clock.wall()
        self._pool = ThreadPoolExecutor(limits.HTTP_THREADS_COUNT, "http")
        self._site = Site(fleet, visits, clock, self._run)

    def app(self) -> Router:
        """Every failure goes up to ``Door``, which words it."""
        return Router(
            [
                Route("/v1/files", self.upload, methods=["POST"]),
                Route("/v1/files", self._quick(self._list_files), methods=["GET"]),
                Route("/v1/files/{id}", self._quick(self._file), methods=["GET"]),
                Route("/v1/files/{id}", self._quick(self._delete_file), methods=["DELETE"]),
                Route("/v1/files/{id}/content", self.content, methods=["GET"]),
                Route("/v1/batches", self.create, methods=["POST"]),
                Route("/v1/batches", self._quick(self._list_batches), methods=["GET"]),
                Route("/v1/batches/{id}", self._quick(self._batch), methods=["GET"]),
                Route("/v1/batches/{id}/cancel", self._quick(self._cancel), methods=["POST"]),
                Route("/v1/models", self._quick(self._models), methods=["GET"]),
                *self._site.routes(),
                Route("/healthz", self._quick(self._health), methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, what: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(what, *arguments))

    def _quick(self, what: Callable[[str, Request], dict[str, Any]]) -> Callable[[Request], Any]:
        """An endpoint whose answer ``what`` (tenant, request) makes on a thread."""

        async def endpoint(request: Request) -> Response:
            return JSONResponse(await self._run(what, request.scope[TENANT], request))

        return endpoint

    # -- files --------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes + limits.HTTP_FORM_MAX_BYTES:
            raise too_large(self._max_bytes)
        form = Form(request.headers.get("content-type", ""), self._max_bytes)
        upload = await self._run(self._shelf.begin)
        try:
            await self._receive(request, form, upload)
            record = await self._run(self._shelf.keep, request.scope[TENANT], upload, form.filename)
        finally:
            await self._run(upload.drop)
        return JSONResponse(objects.file_object(record))

    async def _receive(self, request: Request, form: Form, upload: Upload) -> None:
        held: list[bytes] = []
        size = 0
        async for piece in request.stream():
            held.append(form.feed(piece))
            size += len(held[-1])
            if size >= WRITE_BYTES:
                await self._run(upload.write, b"".join(held))
                held, size = [], 0
        form.end()
        await self._run(upload.write, b"".join(held))

    def _list_files(self, tenant: str, request: Request) -> dict[str, Any]:
        asked = wanted.listed(request.query_params, FILE, wanted.FILES_LIMITS)
        names = self._shelf.files(tenant)
        if asked.purpose:  # the purpose is in the record alone
            known = {one.id: one for one in self._records(tenant, names) if one.purpose == asked.purpose}
            chosen, more = objects.page(list(known), asked.after, asked.limit, asked.newest_first)
            records = [known[name] for name in chosen]
        else:
            chosen, more = objects.page(names, asked.after, asked.limit, asked.newest_first)
            records = self._records(tenant, chosen)
        return objects.listing([objects.file_object(record) for record in records], more)

    def _records(self, tenant: str, names: list[str]) -> list[FileRecord]:
        """Those of them that are there still."""
        found = []
        for name in names:
            try:
                found.append(self._shelf.file(tenant, name))
            except ApiFault as fault:
                if fault.status != 404:
                    raise
        return found

    def _file(self, tenant: str, request: Request) -> dict[str, Any]:
        return objects.file_object(self._shelf.file(tenant, request.path_params["id"]))

    def _delete_file(self, tenant: str, request: Request) -> dict[str, Any]:
        name = request.path_params["id"]
        self._shelf.file(tenant, name)
        if batch := self._carrier.uses(tenant, name):
            words = f"{batch} has not been taken over by the broker yet and needs this file; cancel it, or wait"
            raise ApiFault(409, "file_in_use", words, "file_id")
        record = self._shelf.delete_file(tenant, name)
        if record.job and not any(one.job == record.job for one in self._records(tenant, self._shelf.files(tenant))):
            self._fleet.tenant(tenant).find(messages.DeleteJob(0, record.job), messages.Deleted)
        return objects.deleted(name)

    async def content(self, request: Request) -> Response:
        tenant, name = request.scope[TENANT], request.path_params["id"]
        record = await self._run(self._shelf.file, tenant, name)
        if not record.job:
            path = self._shelf.data(tenant, name)
            try:
                status = await self._run(path.stat)
            except FileNotFoundError:  # deleted just now
                raise missing("file", name) from None
            return FileResponse(path, media_type="application/octet-stream", stat_result=status)
        download = Download(self._fleet.tenant(tenant), record.job, record.which)
        try:
            first = await self._run(download.pull)
        except BrokerFailure as failure:
            if failure.code == "no_job":  # the broker's --keep, or haulier delete
                raise missing("file", name) from failure
            raise
        return StreamingResponse(
            self._pages(download, first), media_type="application/octet-stream",
            headers={"content-length": str(record.bytes)},
        )  # fmt: skip

    async def _pages(self, download: Download, first: bytes) -> AsyncIterator[bytes]:
        """One page is here at a time: the next is asked for when its reader has taken the last."""
        data = first
        while data:
            yield data
            data = await self._run(download.pull)

    # -- batches ------------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limits.HTTP_BODY_MAX_BYTES:
                raise ApiFault(413, "body_too_large", f"the body has more than {limits.HTTP_BODY_MAX_BYTES} bytes")
        return JSONResponse(await self._run(self._create, request.scope[TENANT], bytes(body)))

    def _create(self, tenant: str, body: bytes) -> dict[str, Any]:
        asked = wanted.batch(body)
        file = self._shelf.file(tenant, asked.input_file_id)
        if file.purpose != "batch":
            raise ApiFault(
                400, "invalid_value", f"{file.id} has purpose {file.purpose!r}, not 'batch'", "input_file_id"
            )
        record = BatchRecord(
            self._shelf.new_id(BATCH), self._clock.wall(), file.id, asked.endpoint, asked.completion_window,
            asked.window_s, asked.metadata,
        )  # fmt: skip
        self._shelf.put_batch(tenant, record)
        self._carrier.add(tenant, record)
        return objects.batch_object(record, None)

    def _list_batches(self, tenant: str, request: Request) -> dict[str, Any]:
        asked = wanted.listed(request.query_params, BATCH, wanted.BATCHES_LIMITS)
        chosen, more = objects.page(self._shelf.batches(tenant), asked.after, asked.limit, newest_first=True)
        return objects.listing([self._shown(tenant, self._shelf.batch(tenant, name)) for name in chosen], more)

    def _batch(self, tenant: str, request: Request) -> dict[str, Any]:
        return self._shown(tenant, self._shelf.batch(tenant, request.path_params["id"]))

    def _cancel(self, tenant: str, request: Request) -> dict[str, Any]:
        now = self._clock.wall()
        record = self._shelf.change(tenant, request.path_params["id"], functools.partial(_cancelled, now=now))
        self._carrier.look()
        info = None
        if record.handed_over:
            info = self._fleet.tenant(tenant).ask(messages.CancelJob(0, record.job), JobInfo)
        return objects.batch_object(record, info)

    def _shown(self, tenant: str, record: BatchRecord) -> dict[str, Any]:
        """The batch as it is now."""
        if record.status:
            info = JobInfo(0, **record.job_info) if record.job_info else None
            return objects.batch_object(record, info)
        if not record.handed_over:
            return objects.batch_object(record, None)
        info = self._fleet.tenant(tenant).find(messages.AskStatus(0, record.job), JobInfo)
        if info is None or info.status in ENDED:
            self._carrier.look()
        return objects.batch_object(record, info)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _models(self, tenant: str, request: Request) -> dict[str, Any]:
        workers = self._fleet.tenant(tenant).ask(messages.AskWorkers(0), messages.Workers).workers
        return objects.models(workers, self._since)

    def _health(self, tenant: str, request: Request) -> dict[str, Any]:
        """By the mark that the broker's loop leaves at each beat: it costs the broker nothing, so anybody may ask."""
        try:
            age = self._clock.wall() - self._pulse.stat().st_mtime
        except OSError:
            age = float("inf")
        if age > limits.LIVENESS_S:
            raise ApiFault(503, "broker_silent", f"the broker has done no turn for {limits.LIVENESS_S:g} s or more")
        return {"status": "ok"}


def _cancelled(record: BatchRecord, now: float) -> BatchRecord:
    if record.status:
        words = f"Cannot cancel a batch with status '{record.status}'."
        raise ApiFault(409, "batch_ended", words, "batch_id")
    return dataclasses.replace(record, cancelling_at=record.cancelling_at or now)
