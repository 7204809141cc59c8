"""values: what an HTTP request is answered with when it cannot be met, in the form of OpenAI's error objects."""

from __future__ import annotations

from typing import Any

from common.errors import HaulierError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiFault(HaulierError):
    """A request that is answered by ``status`` and an error object. ``code`` is stable, ``param`` names the culprit."""

    exit_code = 4

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = SERVER if self.status >= 500 else "rate_limit_error" if self.status == 429 else INVALID
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str, code: str = "invalid_value") -> ApiFault:
    """400: the field ``param`` is not as it must be."""
    return ApiFault(400, code, message, param)


def missing(kind: str, name: str) -> ApiFault:
    """404: no such ``kind`` (``file``, ``batch``) among the tenant's, whether it is another's or nobody's."""
    return ApiFault(404, f"{kind}_not_found", f"No such {kind}: {name[:80]!r}", f"{kind}_id")


NO_ROOM = frozenset({"store_full", "disk"})
"""The broker's codes for a disk that took nothing: an outage, unlike a file too large for what it keeps for results."""


class BrokerFailure(HaulierError):
    """The broker's answer to a request of the client's protocol that cannot be met."""

    exit_code = 4

    def __init__(self, code: str, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.code = code
        self.passes = exit_code == 3 or code in NO_ROOM
        """Whether asking again later may help: then nothing that was answered for is given up."""
