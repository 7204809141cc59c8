"""shell: the page for people, at ``/fleet``: who may see it; the broker's answers as ``broker.http.page`` has them.

For reading only: nothing on it changes a job. Without ``--http-keys`` whoever reaches loopback sees it; with them it
asks for a bearer key once (``broker.http.visits``), and shows that tenant's jobs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from broker.http import page
from broker.http.bearer import LOCAL
from broker.http.door import FLEET, LOGIN, LOGOUT, TENANT, VISITOR, fault_of
from broker.http.faults import ApiFault
from broker.http.fleet import Fleet
from broker.http.visits import Visits, cookie
from broker.looking import look
from common import limits
from common.clock import Clock
from common.errors import HaulierError

Run = Callable[..., Awaitable[Any]]
"""Has a function called on a thread that may wait."""


class Site:
    """The page's endpoints. ``visits`` is None where nobody has to log in."""

    def __init__(self, fleet: Fleet, visits: Visits | None, clock: Clock, run: Run) -> None:
        self._fleet, self._visits, self._clock, self._run = fleet, visits, clock, run

    def routes(self) -> list[Route]:
        return [
            Route("/", self._root, methods=["GET"]),
            Route(FLEET, self._page, methods=["GET"]),
            Route(LOGIN, self._form, methods=["GET"]),
            Route(LOGIN, self._login, methods=["POST"]),
            Route(LOGOUT, self._logout, methods=["POST"]),
        ]

    async def _root(self, request: Request) -> Response:
        return _sent_to(FLEET)

    async def _page(self, request: Request) -> Response:
        tenant = request.scope[TENANT]
        if tenant == VISITOR:
            return _sent_to(LOGIN)
        try:
            seen = await self._run(look, self._fleet.tenant(tenant))
        except HaulierError as error:
            fault = fault_of(error)
            return _html(page.problem(str(fault)), fault.status)
        at = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return _html(page.fleet(seen, "" if tenant == LOCAL else tenant, at))

    async def _form(self, request: Request) -> Response:
        return _html(page.login()) if self._visits is not None else _sent_to(FLEET)

    async def _login(self, request: Request) -> Response:
        if self._visits is None:
            return _sent_to(FLEET)
        _own_form(request)
        try:
            token = self._visits.begin(await _key_in(request))
        except ApiFault as fault:
            words = "This key lets nobody in." if fault.status == 401 else str(fault)
            return _html(page.login(words), fault.status)
        return _sent_to(FLEET, cookie(token, _secure(request)))

    async def _logout(self, request: Request) -> Response:
        _own_form(request)
        if self._visits is not None:
            self._visits.end(request.headers.get("cookie", ""))
        return _sent_to(LOGIN, cookie("", _secure(request)))


def _html(text: str, status: int = 200) -> Response:
    return HTMLResponse(text, status, headers=page.HEADERS)


def _sent_to(path: str, set_cookie: str = "") -> Response:
    answer = RedirectResponse(path, 303, headers={"cache-control": "no-store"})
    if set_cookie:
        answer.headers["set-cookie"] = set_cookie
    return answer


async def _key_in(request: Request) -> str:
    """The key that was typed in; empty for none. A body that is longer than a key can be is none."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > 4 * limits.HTTP_KEY_MAX_CHARS:
            raise ApiFault(413, "body_too_large", "that is longer than any key")
    fields = parse_qs(body.decode("latin-1"), max_num_fields=4, encoding="utf-8", errors="replace")
    return fields.get("key", [""])[0][: limits.HTTP_KEY_MAX_CHARS]


def _own_form(request: Request) -> None:
    """Raise ``ApiFault`` 403 for a form that another site's page had a browser send."""
    site = request.headers.get("sec-fetch-site", "")
    if site:
        own = site in ("same-origin", "none")
    else:  # browsers leave it out over plain HTTP beyond this machine, and say where the form was
        origin = request.headers.get("origin", "")
        own = not origin or urlsplit(origin).netloc == request.headers.get("host", "")
    if not own:
        raise ApiFault(403, "not_let_in", "this form belongs to the page it came with: open /fleet yourself")


def _secure(request: Request) -> bool:
    """Whether the browser came over TLS, here or at a proxy before us."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
