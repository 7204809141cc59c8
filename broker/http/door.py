"""shell: what every HTTP request passes around its endpoint: who it is, how many there are, how long it lasts.

ASGI, one event loop. Refusals are OpenAI's error objects. A refused request's body is read and thrown away up to a
bound, since most clients read no answer before they have sent everything.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.http.bearer import LOCAL, Bearer
from broker.http.faults import NO_ROOM, ApiFault, BrokerFailure
from broker.http.visits import Visits
from common import limits
from common.errors import DISK_FULL, HaulierError, PeerFault, RefusedError, UnreachableError

log = structlog.get_logger(room="broker.http.door")
TENANT = "haulier.tenant"
"""Where the scope of a request says whose it is."""
OPEN_PATHS = ("/healthz",)
FLEET, LOGIN, LOGOUT = "/fleet", "/fleet/login", "/fleet/logout"
PAGE_PATHS = ("/", FLEET, LOGIN, LOGOUT)
"""What people open with a browser: with keys, a cookie says who they are, and opens nothing else."""
VISITOR = " visitor"
"""Who has not logged in there; no tenant's name has a blank."""
_LOOPBACK = re.compile(r"(?:127(?:\.\d{1,3}){3}|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


class Door:
    """Around an application. ``bearer`` is None on loopback without keys: then no web page is let in."""

    def __init__(
        self, app: ASGIApp, bearer: Bearer | None, silence_s: float = limits.HTTP_SILENCE_S,
        visits: Visits | None = None,
    ) -> None:  # fmt: skip
        self._app, self._bearer, self._silence_s, self._visits = app, bearer, silence_s, visits
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, no lifespan
            return
        call = _Call(receive, send, self._silence_s)
        tenant = ""
        try:
            tenant = self._let_in(scope)
            scope[TENANT] = tenant
            scope["app"] = self  # so that the router raises what it refuses, in place of wording it
            await self._app(scope, call.receive, call.send)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the last door: whatever it is, its client hears of it
            if call.answered:  # the answer is cut, and its reader sees that: it has fewer bytes than it was to have
                log.warning("answer_cut", path=scope["path"], reason=f"{type(error).__name__}: {error}")
                return
            await call.refuse(fault_of(error))
        finally:
            if tenant:
                self._under_way[tenant] -= 1
                self._under_way += Counter()  # drops who has none

    def _let_in(self, scope: Scope) -> str:
        """Whose request it is; it counts as under way from now on."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] in OPEN_PATHS:
            tenant = " anybody"
        elif self._visits is not None and scope["path"] in PAGE_PATHS and b"authorization" not in headers:
            tenant = self._visits.tenant(headers.get(b"cookie", "")) or VISITOR
        elif self._bearer is not None:
            tenant = self._bearer.tenant(headers.get(b"authorization", ""))
        else:
            _no_web_page(headers)
            tenant = LOCAL
        if self._under_way[tenant] >= limits.HTTP_TENANT_REQUESTS_MAX_COUNT:
            raise ApiFault(429, "too_many_requests", "too many of your requests are under way; come again in a moment")
        if self._under_way.total() >= limits.HTTP_REQUESTS_MAX_COUNT:
            raise ApiFault(503, "busy", "too many requests are under way; come again in a moment")
        self._under_way[tenant] += 1
        return tenant


def _no_web_page(headers: dict[bytes, str]) -> None:
    """Without keys, what a browser on this machine sends for some web page is nobody's request."""
    if b"origin" in headers or not _LOOPBACK.fullmatch(headers.get(b"host", "")):
        words = "without --http-keys only programs of this machine are let in, by 127.0.0.1 or localhost"
        raise ApiFault(403, "not_let_in", words)


def fault_of(error: Exception) -> ApiFault:
    """How a failure is answered. What is a bug of ours is logged with its traceback, and told without."""
    if isinstance(error, ApiFault):
        return error
    if isinstance(error, HTTPException):
        return ApiFault(
            error.status_code, "unknown_url", f"there is nothing here by that path and method: {error.detail}"
        )
    if isinstance(error, BrokerFailure):
        status = 404 if error.code == "no_job" else 507 if error.code in NO_ROOM else 503 if error.passes else 409
        return ApiFault(status, error.code, str(error))
    if isinstance(error, RefusedError):
        log.error("broker_refuses", reason=str(error))
        return ApiFault(403, "tenant_not_let_in", "the broker does not let this tenant in; its log says why")
    if isinstance(error, UnreachableError | PeerFault):
        return ApiFault(503, "broker_unreachable", f"the broker does not answer: {error}; come again in a moment")
    if isinstance(error, HaulierError) and error.exit_code == 3:
        return ApiFault(503, "stopping", f"{error}; come again in a moment")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        log.error("disk_full", reason=str(error))
        return ApiFault(507, "disk_full", "the server's disk has no room for this; delete files, or free some there")
    log.error("request_failed", exc_info=error)
    return ApiFault(500, "bug", "a bug of ours; the server's log has it")


class _Call:
    """One request's two directions."""

    def __init__(self, receive: Receive, send: Send, silence_s: float) -> None:
        self._receive, self._send, self._silence_s = receive, send, silence_s
        self._all_received = False
        self.answered = False

    async def receive(self) -> Message:
        if self._all_received:
            return await self._receive()  # only whether the client is still there
        try:
            message = await asyncio.wait_for(self._receive(), self._silence_s)
        except TimeoutError as error:
            self._all_received = True
            raise ApiFault(408, "silent", f"nothing of the request came for {self._silence_s:g} s") from error
        self._all_received = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.answered = True
        await asyncio.wait_for(self._send(message), self._silence_s)

    async def refuse(self, fault: ApiFault) -> None:
        try:
            async with asyncio.timeout(limits.HTTP_DRAIN_S):
                if not await self._drained():
                    return
        except TimeoutError:  # whoever is refused does not hold a connection by sending slowly
            pass
        headers = [(b"content-type", b"application/json")]
        if not self._all_received:
            headers.append((b"connection", b"close"))
        if fault.status in (429, 503):
            headers.append((b"retry-after", b"1"))
        if fault.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        body = json.dumps(fault.body()).encode()
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({"type": "http.response.start", "status": fault.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _drained(self) -> bool:
        """Read the rest of the request, or what of it is worth waiting for; False when its client is gone."""
        drained = 0
        while not self._all_received and drained <= limits.HTTP_DRAIN_MAX_BYTES:
            try:
                message = await self.receive()
            except ApiFault:
                return True
            if message["type"] == "http.disconnect":
                return False
            drained += len(message.get("body", b""))
        return True
