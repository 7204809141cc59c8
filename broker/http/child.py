"""shell: the broker's side of its HTTP server: binds its socket, starts its process, starts it again when it ends.

The socket stays the broker's, so that a server that ends costs its clients a pause and no refused connection, and an
address that cannot be had is told before the broker serves anybody. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from broker.http.bearer import Bearer, exposed
from broker.http.fleet import check_tenants
from broker.http.plan import Plan
from common import limits, parent
from common.config import GIB, BrokerSettings, HttpSettings
from common.errors import RefusedError
from common.folders import announce

log = structlog.get_logger(room="broker.http.child")
NEEDS = ("starlette", "uvicorn", "python_multipart")
MODULE = "broker.http.main"
ENDPOINT_NAME = "http_endpoint"
"""File in the state folder that says where the server listens."""
STOP_S = limits.HTTP_STOP_S + 2.0
WELL_S = 60.0
"""A server that ran so long did not fail at its start."""


def check(settings: BrokerSettings) -> None:
    """Raise ``RefusedError`` for what must be changed before ``--http`` can work; a standby must say so now."""
    if settings.http is None:
        return
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        raise RefusedError(f"--http needs {', '.join(absent)}, not installed here: pip install 'haulier[http]'")
    if settings.http.cert is not None and settings.http.key is not None:
        check_tls(settings.http.cert, settings.http.key)
        if words := exposed(settings.http.key):
            log.warning("keys_exposed", reason=words)
    tenants: tuple[str, ...] = ()
    if settings.http.keys is not None:
        tenants = Bearer(settings.http.keys).tenants
        if words := exposed(settings.http.keys):
            log.warning("keys_exposed", reason=words)
    check_tenants(settings.keys, tenants, lambda words: log.warning("keys_exposed", reason=words))


def check_tls(cert: Path, key: Path) -> None:
    """Raise ``RefusedError`` unless both can be read, need no password, and belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise RefusedError(f"--http-key {key} needs a password: take one without, readable by the broker alone")

    try:
        context.load_cert_chain(cert, key, no_password)
    except OSError as error:  # what ssl raises is one too
        words = error.strerror if not isinstance(error, ssl.SSLError) else (error.reason or str(error))
        raise RefusedError(
            f"--http-cert {cert} and --http-key {key} cannot be used: {words}; both must be PEM files, the certificate "
            "with its chain and the key it was made for"
        ) from error


@contextlib.contextmanager
def serving(settings: BrokerSettings, broker: str) -> Iterator[None]:
    """Have HTTP served while the block runs, if asked for. ``broker`` is where the broker's own socket is bound."""
    if settings.http is None:
        yield
        return
    with _bound(settings.http) as listening:
        child = HttpChild(settings, settings.http, listening, broker)
        child.start()
        try:
            yield
        finally:
            child.stop()


class HttpChild:
    """The server's process, through all its starts. ``start`` and ``stop`` belong to the main thread."""

    def __init__(self, settings: BrokerSettings, http: HttpSettings, listening: socket.socket, broker: str) -> None:
        self._settings, self._http, self._listening, self._broker = settings, http, listening, broker
        self._stopping = threading.Event()
        self._read_end, self._write_end = os.pipe()
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._watch, name="http-child", daemon=True)

    def start(self) -> None:
        host, port = self._http.host, self._listening.getsockname()[1]
        url = f"http{'s' if self._http.cert is not None else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        announce(self._settings.state, ENDPOINT_NAME, url)
        log.info("http_listening", url=url, keys=self._http.keys is not None)
        self._thread.start()

    def stop(self) -> None:
        """End the process: it ends requests under way first, for a moment."""
        self._stopping.set()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        os.close(self._write_end)
        os.close(self._read_end)

    def _watch(self) -> None:
        pause = limits.BACKOFF_FIRST_S
        while True:
            started = time.monotonic()
            code = self._process.wait()
            if time.monotonic() - started >= WELL_S:
                pause = limits.BACKOFF_FIRST_S
            if self._stopping.is_set():
                return
            log.error("http_ended", code=code, again_in_s=pause)
            if self._stopping.wait(pause):
                return
            pause = min(pause * 2, limits.BACKOFF_MAX_S)
            self._process = self._spawn()
            if self._stopping.is_set():  # told to stop just before: it knew only the former one
                self._process.terminate()

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, parent.VARIABLE: str(self._read_end)}
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, self._plan()], stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True, pass_fds=(self._read_end, self._listening.fileno()),
        )  # fmt: skip

    def _plan(self) -> str:
        keys, http = self._settings.keys, self._http
        return Plan(
            self._listening.fileno(), _reached(self._broker), str(self._settings.state.resolve()),
            "" if keys.insecure or keys.directory is None else str(keys.directory.resolve()),
            "" if http.keys is None else str(http.keys.resolve()), http.upload_mib * 1024**2,
            int(self._settings.disk_reserve_gib * GIB),
            "" if http.cert is None else str(http.cert.resolve()), "" if http.key is None else str(http.key.resolve()),
        ).written()  # fmt: skip


def _reached(bound: str) -> str:
    """Where a process of this machine reaches a socket that is bound so."""
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    near = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"tcp://{near}:{port}"


def _bound(http: HttpSettings) -> socket.socket:
    """The listening socket. The server of a broker that was killed just now may have it for a moment still."""
    until = time.monotonic() + limits.PARENT_GRACE_S + 1
    while True:
        try:
            return _try_bind(http)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.05)
                continue
            words = f"cannot serve HTTP on {http.address}: {error.strerror or error}; choose another --http"
            raise RefusedError(words) from error


def _try_bind(http: HttpSettings) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # whoever takes nothing for so long is cut off by the system itself
            silence_ms = int(limits.HTTP_SILENCE_S * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
        listening.bind(address)
        listening.listen(limits.HTTP_CONNECTIONS_MAX_COUNT)
    except OSError:
        listening.close()
        raise
    return listening
