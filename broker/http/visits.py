"""shell: who looks at the page of ``broker.http.web`` with a browser: a key typed in once, a cookie from then on.

A browser sends no ``Authorization`` by itself, so the login form takes the bearer key and gives a token of chance for
it. Tokens live in this process's memory: nothing is on the disk, and after a restart people log in again. A token
opens the page alone, never the endpoints under ``/v1``, so no other site can have a browser act by it; it ends with
its key, with logging out, and after ``limits.HTTP_VISIT_S``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie

from broker.http.bearer import Bearer, digest_of
from broker.http.faults import ApiFault
from common import limits
from common.clock import Clock

COOKIE = "haulier_visit"


class Visits:
    """The tokens given out. One thread: the server's event loop."""

    def __init__(self, bearer: Bearer, clock: Clock) -> None:
        self._bearer, self._clock = bearer, clock
        self._begun: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        """By a token's SHA-256: its key's, and when it ends (monotonic seconds), oldest first."""

    def begin(self, key: str) -> str:
        """A token for the owner of ``key``. Raises ``ApiFault`` 401 or 403 when the key lets nobody in."""
        digest = digest_of(key.strip())
        self._bearer.owner(digest)
        token = secrets.token_urlsafe(32)
        self._begun[_digest(token)] = digest, self._clock.monotonic() + limits.HTTP_VISIT_S
        while len(self._begun) > limits.HTTP_VISITS_MAX_COUNT:
            self._begun.popitem(last=False)
        return token

    def tenant(self, cookies: str) -> str:
        """Whose token a ``Cookie`` header carries; empty for nobody's, or one that has ended."""
        name = _digest(token_in(cookies))
        digest, until = self._begun.get(name, (b"", 0.0))
        if not digest:
            return ""
        try:
            if self._clock.monotonic() < until:
                return self._bearer.owner(digest)
        except ApiFault:  # the key was taken out of the file, or its tenant out of the broker's
            pass
        del self._begun[name]
        return ""

    def end(self, cookies: str) -> None:
        """The token opens nothing from now on."""
        self._begun.pop(_digest(token_in(cookies)), None)


def token_in(cookies: str) -> str:
    """The token in a ``Cookie`` header, or empty."""
    try:
        found = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def cookie(token: str, secure: bool) -> str:
    """The ``Set-Cookie`` header for a token; for an empty one, that which takes it away."""
    age = int(limits.HTTP_VISIT_S) if token else 0
    return f"{COOKIE}={token}; Path=/fleet; HttpOnly; SameSite=Strict; Max-Age={age}{'; Secure' if secure else ''}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
