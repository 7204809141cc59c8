"""The door and the endpoints behind it, called as a server calls them: bounds, refusals, idle readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from broker.client import Download
from broker.http.app import Api
from broker.http.bearer import Bearer
from broker.http.carrier import Carrier
from broker.http.door import Door, fault_of
from broker.http.faults import ApiFault, BrokerFailure
from broker.http.fleet import Fleet, StoppingError
from broker.http.records import FILE, FileRecord
from broker.http.shelf import Shelf
from broker.http.visits import Visits
from common import limits, messages
from common.clock import SystemClock
from common.config import KeySettings
from common.errors import RefusedError, UnreachableError

Receive = Callable[[], Awaitable[dict[str, Any]]]
PAGES = 50


def scope(path: str = "/v1/files", method: str = "GET", **headers: str) -> dict[str, Any]:
    names = {"host": "localhost", **headers}
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in names.items()], "root_path": "",
        "asgi": {"spec_version": "2.4"}, "http_version": "1.1",
    }  # fmt: skip


async def nothing() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def asked(door: Door, what: dict[str, Any], receive: Receive = nothing) -> tuple[int, Any]:
    """Status and JSON of one request."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await door(what, receive, send)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


def test_requests_of_a_tenant_and_of_all_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: as many as the bound, and again once they are through."""
    monkeypatch.setattr(limits, "HTTP_TENANT_REQUESTS_MAX_COUNT", 2)
    monkeypatch.setattr(limits, "HTTP_REQUESTS_MAX_COUNT", 3)
    path = tmp_path / "keys"
    path.write_text("k1 alice\nk2 bob\n")

    async def run() -> None:
        go = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await JSONResponse({})(scope, receive, send)

        door = Door(slow, Bearer(path))
        alice, bob = scope(authorization="Bearer k1"), scope(authorization="Bearer k2")
        under_way = [asyncio.ensure_future(asked(door, dict(alice))) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await asked(door, dict(alice)))[0] == 429
        under_way.append(asyncio.ensure_future(asked(door, dict(bob))))
        await asyncio.sleep(0)
        assert (await asked(door, dict(bob)))[0] == 503
        go.set()
        assert [status for status, _ in await asyncio.gather(*under_way)] == [200, 200, 200]
        assert (await asked(door, dict(alice)))[0] == 200

    asyncio.run(run())


def test_a_refused_body_is_read_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most clients read no answer before they have sent all. Control: a body within the bound is read to its end."""
    monkeypatch.setattr(limits, "HTTP_DRAIN_MAX_BYTES", 1000)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        raise ApiFault(400, "no", "no")

    def run(size: int) -> int:
        left = size

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 100
            return {"type": "http.request", "body": b"x" * 100, "more_body": left > 0}

        assert asyncio.run(asked(Door(refuse, None), scope(), receive))[0] == 400
        return left

    assert run(900) == 0
    assert run(100_000) > 90_000


def test_who_sends_nothing_is_let_go() -> None:
    """Control: who sends it is answered."""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await JSONResponse({})(scope, receive, send)

    async def silent() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    assert asyncio.run(asked(Door(reads, None, silence_s=0.05), scope(), silent))[0] == 408
    assert asyncio.run(asked(Door(reads, None, silence_s=0.05), scope()))[0] == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiFault(413, "a", "b"), 413, "a"),
        (BrokerFailure("no_job", "x", 4), 404, "no_job"),
        (BrokerFailure("busy", "x", 3), 503, "busy"),
        (BrokerFailure("job_open", "x", 4), 409, "job_open"),
        (RefusedError("/secret/path"), 403, "tenant_not_let_in"),
        (UnreachableError("x"), 503, "broker_unreachable"),
        (StoppingError("x"), 503, "stopping"),
        (KeyError("/secret/path"), 500, "bug"),
    ],
)
def test_every_failure_is_an_error_object(error: Exception, status: int, code: str) -> None:
    """What the server's own files are called is nobody's business."""
    fault = fault_of(error)
    assert (fault.status, fault.code) == (status, code)
    assert set(fault.body()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in str(fault)


class CountingFleet(Fleet):
    """A broker whose every file has ``PAGES`` pages."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:1", KeySettings(None, insecure=True), by_tenant=False)
        self.pulls = 0

    def tenant(self, tenant: str) -> Any:
        return self

    def ask(self, request: Any, answer: Any) -> messages.Lines:
        self.pulls += 1
        done = request.offset >= PAGES
        lines = () if done else (b"x" * 999,)
        return messages.Lines(0, request.job, lines, request.offset + len(lines), done)


class EagerApi(Api):
    """Control: everything is fetched before the first byte goes out."""

    async def _pages(self, download: Download, first: bytes) -> AsyncIterator[bytes]:
        pages = [first]
        while data := await self._run(download.pull):
            pages.append(data)
        for page in pages:
            yield page


@pytest.mark.parametrize(("kind", "most"), [(Api, 2), (EagerApi, PAGES + 1)])
def test_a_page_is_fetched_when_its_reader_has_taken_the_last(tmp_path: Path, kind: type[Api], most: int) -> None:
    """A reader that takes one page and then nothing: so many pages were asked for, while it stands still and in all."""
    fleet, clock = CountingFleet(), SystemClock()
    shelf = Shelf(tmp_path, clock)
    api = kind(shelf, fleet, Carrier(shelf, fleet, clock), clock, 1000, tmp_path / "pulse")
    name = shelf.new_id(FILE)
    shelf.put_file("local", FileRecord(name, 1000 * PAGES, 1.0, "o", "batch_output", job="j", which="output"))

    async def run() -> int:
        stopped, go, received = asyncio.Event(), asyncio.Event(), bytearray()

        async def send(message: Any) -> None:
            received.extend(message.get("body", b""))
            if received and not go.is_set():
                stopped.set()
                await go.wait()

        call = asyncio.ensure_future(Door(api.app(), None)(scope(f"/v1/files/{name}/content"), nothing, send))
        await stopped.wait()
        await asyncio.sleep(0.05)
        held = fleet.pulls
        go.set()
        await call
        assert len(received) == 1000 * PAGES
        return held

    try:
        held = asyncio.run(run())
    finally:
        api.close()
    assert fleet.pulls == PAGES + 1
    assert held <= most
    assert (held <= 2) == (kind is Api)


def test_an_answer_that_breaks_off_is_cut_and_not_ended() -> None:
    """The server sees no last piece, so its client knows that it has not all. Control: one that is whole has it."""

    def ended(fails: bool) -> bool:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            if fails:
                raise UnreachableError("away")

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(Door(StreamingResponse(pieces()), None)(scope(), nothing, send))
        return sent[-1].get("more_body", True) is False

    assert ended(fails=False)
    assert not ended(fails=True)


# -- the page for people --------------------------------------------------------------------------------------------


async def headers_of(door: Door, what: dict[str, Any], body: bytes = b"") -> tuple[int, dict[str, str], str]:
    """Status, headers and text of one request."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await door(what, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(one.get("body", b"") for one in sent[1:]).decode()


class NoFleet(Fleet):
    """A broker that does not answer."""

    def tenant(self, tenant: str) -> Any:
        raise UnreachableError(f"no broker answered {tenant}")


def page_door(tmp_path: Path, keys: bool) -> Door:
    path = tmp_path / "keys"
    path.write_text("k1 alice\n")
    bearer = Bearer(path) if keys else None
    visits = Visits(bearer, SystemClock()) if bearer is not None else None
    fleet = NoFleet("tcp://127.0.0.1:1", KeySettings(None, insecure=True), keys)
    shelf = Shelf(tmp_path / "tenants", SystemClock(), 0)
    carrier = Carrier(shelf, fleet, SystemClock())
    return Door(Api(shelf, fleet, carrier, SystemClock(), 100, tmp_path / "pulse", visits).app(), bearer, visits=visits)


def test_with_keys_the_page_asks_for_one_and_the_cookie_opens_nothing_else(tmp_path: Path) -> None:
    """Without a cookie: the form. With it: the page, here of a broker that is away, and still no endpoint of /v1."""

    async def run() -> None:
        door = page_door(tmp_path, keys=True)
        assert (await headers_of(door, scope("/")))[1]["location"] == "/fleet"
        status, found, _ = await headers_of(door, scope("/fleet", cookie="haulier_visit=guess"))
        assert (status, found["location"]) == (303, "/fleet/login")
        status, found, text = await headers_of(door, scope("/fleet/login"))
        assert status == 200
        assert 'type="password"' in text
        assert "default-src 'none'" in found["content-security-policy"]
        for body, answer in ((b"key=k2", 401), (b"", 401), (b"key=" + b"x" * 9000, 413), (b"\xff\xfe=\x00&key", 401)):
            assert (await headers_of(door, scope("/fleet/login", "POST"), body))[0] == answer
        status, found, _ = await headers_of(door, scope("/fleet/login", "POST"), b"key=k1")
        assert (status, found["location"]) == (303, "/fleet")
        cookie = found["set-cookie"].partition(";")[0]
        status, _, text = await headers_of(door, scope("/fleet", cookie=cookie))
        assert status == 503
        assert "no broker answered alice" in text
        for path, method in (("/v1/files", "GET"), ("/v1/batches", "POST"), ("/v1/models", "GET")):
            assert (await headers_of(door, scope(path, method, cookie=cookie)))[0] == 401
        assert (await headers_of(door, scope("/fleet", authorization="Bearer k1")))[0] == 503
        assert (await headers_of(door, scope("/fleet", authorization="Bearer k2")))[0] == 401
        status, found, _ = await headers_of(door, scope("/fleet/logout", "POST", cookie=cookie))
        assert (status, found["location"]) == (303, "/fleet/login")
        assert (await headers_of(door, scope("/fleet", cookie=cookie)))[0] == 303

    asyncio.run(run())


def test_other_sites_send_no_forms_of_ours(tmp_path: Path) -> None:
    """By what the browser says of where the form was. Control: the page's own, and programs, which say nothing."""

    async def run() -> None:
        door = page_door(tmp_path, keys=True)
        for headers, status in (
            ({"sec-fetch-site": "cross-site"}, 403), ({"sec-fetch-site": "same-site"}, 403),
            ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
            ({"sec-fetch-site": "same-origin"}, 303), ({"origin": "http://localhost"}, 303), ({}, 303),
        ):  # fmt: skip
            for path in ("/fleet/login", "/fleet/logout"):
                assert (await headers_of(door, scope(path, "POST", **headers), b"key=k1"))[0] == status

    asyncio.run(run())


def test_without_keys_loopback_sees_the_page_and_other_names_do_not(tmp_path: Path) -> None:
    """A web page whose name was made to point here gets nothing of it."""

    async def run() -> None:
        door = page_door(tmp_path, keys=False)
        assert (await headers_of(door, scope("/fleet")))[0] == 503
        assert (await headers_of(door, scope("/fleet/login")))[1]["location"] == "/fleet"
        assert (await headers_of(door, scope("/fleet/login", "POST"), b"key=k1"))[1]["location"] == "/fleet"
        assert (await headers_of(door, scope("/fleet", host="evil.example")))[0] == 403
        assert (await headers_of(door, scope("/fleet", origin="http://evil.example")))[0] == 403

    asyncio.run(run())


def test_who_is_refused_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, for ever: the refusal goes out all the same, and the connection is to end."""
    monkeypatch.setattr(limits, "HTTP_DRAIN_S", 0.1)
    path = tmp_path / "keys"
    path.write_text("k1 alice\n")

    async def run() -> None:
        async def drips() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x", "more_body": True}

        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(Door(JSONResponse({}), Bearer(path))(scope(method="POST"), drips, send), 30)
        assert sent[0]["status"] == 401
        assert (b"connection", b"close") in sent[0]["headers"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BrokerFailure("store_full", "x", 4), 507), (BrokerFailure("disk", "x", 4), 507),
        (BrokerFailure("busy", "x", 3), 503), (BrokerFailure("no_job", "x", 4), 404),
        (BrokerFailure("job_open", "x", 4), 409), (UnreachableError("x"), 503), (StoppingError("x"), 503),
        (OSError(28, "No space left on device"), 507), (OSError(5, "Input/output error"), 500),
    ],
)  # fmt: skip
def test_a_failure_that_may_pass_is_none_of_the_requests(error: Exception, status: int) -> None:
    """Clients try again on 5xx; 409 says that the request itself cannot be met."""
    assert fault_of(error).status == status
