"""shell: who is let in over HTTP (S5): ``Authorization: Bearer KEY`` by a file of ``KEY TENANT`` lines, read again.

Keys are kept as their SHA-256 alone and compared in constant time, each with every one, so that neither a core file nor
the time of an answer tells any of a key. A tenant is a name of the broker's own keys (``haulier keys add TENANT``):
its jobs are those of that key, with its share, and it is out with that key's ``keys revoke``, whatever the file says.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import structlog

from broker.http.faults import ApiFault
from common.errors import RefusedError
from common.keys import AUTHORIZED, FIRST_NAME, is_name

log = structlog.get_logger(room="broker.http.bearer")
LOCAL = "local"
"""The one tenant where no keys are asked for."""


class Bearer:
    """The keys of one file. Any thread may ask. Raises ``RefusedError`` when the file cannot be used at the start.

    ``keys`` is the broker's key folder, None where it asks for no keys.
    """

    def __init__(self, path: Path, keys: Path | None = None) -> None:
        self._path = path
        self._authorized = keys / AUTHORIZED if keys is not None else None
        self._stamp = self._look()
        self._known = _read(path)

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(sorted({tenant for _, tenant in self._known}))

    def tenant(self, header: str) -> str:
        """Whose key the header carries. Raises ``ApiFault`` 401 for no key and for a wrong one, 403 once revoked."""
        scheme, _, key = header.partition(" ")
        return self.owner(digest_of(key.strip()) if scheme.lower() == "bearer" else b"")

    def owner(self, digest: bytes) -> str:
        """Whose key has this SHA-256. Raises as ``tenant``."""
        self._refresh()
        found = ""
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant  # no early end: all are compared, whichever fits
        if not found:
            raise ApiFault(401, "invalid_api_key", "no key, or one not known here: Authorization: Bearer KEY")
        if self._authorized is not None and not (self._authorized / f"{found}.key").exists():
            raise ApiFault(403, "tenant_not_let_in", "the broker lets this tenant in no more")
        return found

    def _refresh(self) -> None:
        """Keys come and go without a restart; a file that cannot be read leaves those there were, and is told."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = _read(self._path)
        except RefusedError as error:
            log.error(
                "http_keys_kept", reason=str(error), advice="the keys read before stay in force until it is mended"
            )

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return 0, 0, 0
        return found.st_ino, found.st_mtime_ns, found.st_size


def exposed(path: Path) -> str:
    """In words, that others on this machine can read the file, and what to do; empty if they cannot."""
    try:
        read = path.stat().st_mode & 0o044
    except OSError:
        return ""
    return f"others can read {path}: chmod go= it" if read else ""


def digest_of(key: str) -> bytes:
    """The SHA-256 by which a key is known."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _read(path: Path) -> tuple[tuple[bytes, str], ...]:
    """Digests and tenants of the file's lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is not UTF-8"
        raise RefusedError(f"--http-keys {path} cannot be read: {words}") from error
    found: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:  # the line itself is not shown: it may hold a key
            raise RefusedError(f"--http-keys {path} line {number} must be KEY TENANT, apart by a blank")
        key, tenant = words
        if not key.isascii():
            raise RefusedError(f"--http-keys {path} line {number}: a key of other than ASCII cannot travel in a header")
        if not is_name(tenant) or tenant.startswith(FIRST_NAME):
            raise RefusedError(
                f"--http-keys {path} line {number}: the tenant {tenant!r} must be letters, digits, - and _, at most "
                f"64, and must not begin with {FIRST_NAME}, whose keys see every job"
            )
        if found.setdefault(digest_of(key), tenant) != tenant:
            raise RefusedError(f"--http-keys {path} line {number}: the key is another tenant's already")
    if not found:
        raise RefusedError(f"--http-keys {path} holds no key: put KEY TENANT on a line")
    return tuple(found.items())
