"""shell: a client's side of its conversation with the fleet: ask, submit, download. Knows messages alone.

One request is out at a time; it is sent again until its answer comes, at one endpoint after the other, each time on a
fresh socket, since every request of a client is idempotent (D2's habit, seen from this side). So a broker that is
killed and started again in the middle of anything costs the client a pause. Memory is flat: files are hashed, sent
and received a part at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import zmq

from broker.client_rules import ENDED, error_for
from common import codec, limits, messages, wire
from common.clock import Clock, SystemClock
from common.config import ClientSettings
from common.errors import PeerFault, RefusedError, UnreachableError, UsageError

T = TypeVar("T")
Tell = Callable[[int, int], None]
"""Takes bytes done and bytes in all."""
WAKE_S = 0.1
"""The longest a waiting client goes without calling ``idle``."""
ANSWER_S = 10.0
"""A connected broker has this long before the request goes out again on a fresh socket; doubled each time."""
DENIALS_MAX_COUNT = 2
"""Refused handshakes per endpoint before it is the keys: one alone may be a broker dying in the handshake."""
CUT_S = 3.0
"""Handshakes cut for this long, and none ever completed: the keys are the likelier reason than a broker starting."""
FAILURES_MAX_COUNT = 1_000
"""Failed lines looked at for a word about what went wrong."""
STUCK_MAX_COUNT = 100
"""Parts sent in a row without the broker's offset moving on before it is called stuck."""


def _nothing() -> None:
    """The default for ``idle``."""


class Asker(Protocol):
    """Whoever can put a request to a broker."""

    def ask(self, request: Any, answer: type[T]) -> T:
        """The answer to ``request``; a ``Failure`` is raised as an error."""


class Client:
    """A client's conversation. Used by the thread that made it; ``idle`` is called about every 0.1 s while it waits.

    Raises ``UnreachableError`` when no broker answers one request for ``timeout_s``, ``RefusedError`` when the keys do
    not fit, and the error of its exit code for each ``Failure`` a broker answers.
    """

    def __init__(
        self, settings: ClientSettings, idle: Callable[[], None] = _nothing, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._idle = idle
        self._clock = clock if clock is not None else SystemClock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: wire.Monitor | None = None
        self._endpoint = 0
        self._request = 0
        self._denied = 0
        self._let_in = False
        self._cut_since: float | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the conversation. The broker keeps nothing of it."""
        self._drop()
        self._context.destroy(linger=0)  # also what was opened and never finished, such as without usable keys

    def ask(self, request: Any, answer: type[T]) -> T:
        """The answer to ``request``, whose number is put in here. Raises the broker's ``Failure`` as an error."""
        found = self.answer_to(request)
        if isinstance(found, messages.Failure):
            raise error_for(found.exit_code, found.message)
        if not isinstance(found, answer):
            raise PeerFault(
                "wrong_answer", f"{type(request).__name__} was answered by {type(found).__name__}; is it our version?"
            )
        return found

    def answer_to(self, request: Any) -> Any:
        """Whatever the broker answers to ``request``, a ``Failure`` included."""
        self._request += 1
        data = codec.encode(dataclasses.replace(request, request=self._request))
        deadline = self._clock.monotonic() + self._settings.timeout_s
        patience, pause, tries = ANSWER_S, limits.BACKOFF_FIRST_S, 0
        while True:
            # a name that does not resolve says nothing, and the next endpoint may be the one that took over
            connect_s = min(limits.HANDSHAKE_S, limits.CONNECT_S * 2 ** min(tries // len(self._settings.brokers), 16))
            found = self._try(data, min(deadline, self._clock.monotonic() + patience), connect_s)
            tries += 1
            if isinstance(found, messages.Failure) and found.code == "stopping":
                self._drop()  # the next one is about to take over
            elif found is not None:
                self._denied, self._let_in = 0, True
                return found
            self._give_up_when_denied()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise self._unreachable()
            self._endpoint = (self._endpoint + 1) % len(self._settings.brokers)
            self.sleep(min(pause, left))
            patience, pause = patience * 2, min(pause * 2, limits.BACKOFF_MAX_EARLY_S)

    def sleep(self, seconds: float) -> None:
        """Wait, with ``idle`` called meanwhile."""
        until = self._clock.monotonic() + seconds
        while (left := until - self._clock.monotonic()) > 0:
            self._idle()
            time.sleep(min(left, WAKE_S))
        self._idle()

    # ------------------------------------------------------------------------------------------- one try, one socket

    def _try(self, data: bytes, until: float, connect_s: float) -> Any:
        """The answer to what ``data`` asks, or None: this socket will not bring it, and it is gone."""
        socket, monitor = self._link()
        sent = False
        connect_by = self._clock.monotonic() + connect_s
        while self._clock.monotonic() < (until if sent else min(until, connect_by)):
            self._idle()
            if not sent:
                sent = _send(socket, data)
            zmq.select([socket, monitor.socket], [] if sent else [socket], [], WAKE_S)
            found = self._received(socket)
            if found is not None:
                return found
            if self._broken(monitor):
                break
        self._drop()
        return None

    def _received(self, socket: zmq.Socket[bytes]) -> Any:
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            found = codec.decode(data)
            if isinstance(found, messages.Refused):
                raise RefusedError(f"{self._where()} refuses: {found.reason}")
            if getattr(found, "request", None) == self._request:
                return found  # anything else answers a request that was given up, or asked twice

    def _broken(self, monitor: wire.Monitor) -> bool:
        broken = False
        for news in monitor.news():
            self._denied += news.kind == "denied"
            if news.kind == "cut" and self._cut_since is None:
                self._cut_since = self._clock.monotonic()
            broken = broken or news.kind in ("denied", "cut", "lost")
        return broken

    def _link(self) -> tuple[zmq.Socket[bytes], wire.Monitor]:
        if self._socket is None or self._monitor is None:
            self._socket = wire.dealer(self._context, self._where(), self._settings.keys)
            self._monitor = wire.Monitor(self._socket)
            wire.connect(self._socket, self._where())
        return self._socket, self._monitor

    def _drop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        if self._socket is not None:
            self._socket.close(0)
        self._socket = self._monitor = None

    def _where(self) -> str:
        return self._settings.brokers[self._endpoint]

    def _give_up_when_denied(self) -> None:
        if self._denied >= DENIALS_MAX_COUNT * len(self._settings.brokers):
            if self._settings.keys.insecure:
                raise RefusedError(f"{self._where()} asks for keys; give --keys DIR instead of --insecure")
            raise RefusedError(
                f"{self._where()} does not let in the key of {self._settings.keys.directory}; --keys must name a "
                "folder that holds this broker's public key and a client key it knows. A revoked key stays worthless: "
                "delete that folder and use a new one (haulier keys add NAME on the broker's machine makes it)"
            )
        # once let in, the keys are right, and a broker behind a proxy is merely away
        if self._cut_since is not None and not self._let_in and self._clock.monotonic() - self._cut_since >= CUT_S:
            raise RefusedError(
                f"{self._where()} ends every handshake: --keys holds another broker's public key, or a proxy accepts "
                "there for a broker that is not up"
            )

    def _unreachable(self) -> UnreachableError:
        tried = ", ".join(self._settings.brokers)
        return UnreachableError(
            f"no broker answered at {tried} within {self._settings.timeout_s:g} s; is one running there? "
            "(--broker, --timeout)"
        )


def _send(socket: zmq.Socket[bytes], data: bytes) -> bool:
    try:
        socket.send(data, zmq.NOBLOCK)
    except zmq.Again:  # not connected yet: IMMEDIATE queues nothing before that
        return False
    return True


# -------------------------------------------------------------------------------------------------------- submitting


@dataclass(frozen=True, slots=True)
class Order:
    """What a job is asked to be; the fields of ``messages.Submit`` that do not come from the file."""

    job: str
    name: str
    lenient: bool = False
    priority: int = 0
    window_s: int = 0
    model: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was when it was hashed: ``size`` in bytes, ``sha256`` in hexadecimal."""

    path: Path
    size: int
    sha256: str


def check_input(path: Path) -> None:
    """Raise ``UsageError`` or ``RefusedError`` unless ``path`` is a readable file with something in it."""
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
            raise UsageError(f"input file {path} {what}; name a JSONL file of requests")
        if path.stat().st_size == 0:
            raise RefusedError(f"empty_file: {path} holds no line; put one request on each line")
        with path.open("rb"):
            pass
    except OSError as failure:
        raise UsageError(f"input file {path} cannot be read: {failure.strerror}") from failure


def hash_file(path: Path, tell: Tell) -> InputFile:
    """Size and SHA-256 of the file, read a part at a time. Raises as ``check_input`` does."""
    check_input(path)
    size, done, digest = path.stat().st_size, 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(limits.PART_MAX_BYTES):
                digest.update(part)
                done += len(part)
                tell(done, max(size, done))
    except OSError as failure:
        raise UsageError(f"input file {path} cannot be read: {failure.strerror}") from failure
    return InputFile(path, done, digest.hexdigest())


def submit(client: Asker, source: InputFile, order: Order, tell: Tell) -> messages.JobInfo:
    """Hand the file over from wherever the broker lacks it, and seal it. Idempotent by the order's job id."""
    with source.path.open("rb") as file:
        asked: Any = messages.Submit(
            request=0, job=order.job, name=order.name, size=source.size, sha256=source.sha256, lenient=order.lenient,
            priority=order.priority, window_s=order.window_s, model=order.model,
            url=order.url,
        )  # fmt: skip
        furthest, unmoved = -1, 0
        while True:
            answer = client.ask(asked, cast(type[Any], (messages.Need, messages.JobInfo)))
            if isinstance(answer, messages.JobInfo):
                return answer
            offset = answer.offset
            tell(offset, source.size)
            unmoved = 0 if offset > furthest else unmoved + 1
            furthest = max(furthest, offset)
            if unmoved > STUCK_MAX_COUNT:
                raise PeerFault("stuck_upload", f"the broker asks again and again for byte {offset} of {source.path}")
            if offset >= source.size:
                asked = messages.Seal(0, order.job)
                continue
            file.seek(offset)
            data = file.read(min(limits.PART_MAX_BYTES, source.size - offset))
            if not data:
                raise RefusedError(f"{source.path} became shorter while it was submitted; submit it again")
            asked = messages.Chunk(0, order.job, offset, data)


# ---------------------------------------------------------------------------------------------- following, receiving


def follow(client: Client, job: str, every_s: float) -> Iterator[messages.JobInfo]:
    """The job's state now and again every ``every_s`` seconds; the last one is an ended one."""
    while True:
        info = client.ask(messages.AskStatus(0, job), messages.JobInfo)
        yield info
        if info.status in ENDED:
            return
        client.sleep(every_s)


def problems(client: Asker, job: str) -> Iterator[messages.Problem]:
    """Every bad line of the job's input that the broker lists, in order."""
    offset = 0
    while True:
        page = client.ask(messages.AskProblems(0, job, offset), messages.Problems)
        yield from page.problems
        offset += len(page.problems)
        if not page.more or not page.problems:
            return


def jobs(client: Asker, open_only: bool = False) -> Iterator[messages.JobInfo]:
    """Every job that this key may see, or those that have not ended, newest first."""
    offset = 0
    while True:
        page = client.ask(messages.AskJobs(0, offset, open_only), messages.Jobs)
        yield from page.jobs
        offset += len(page.jobs)
        if not page.more or not page.jobs:
            return


class Download:
    """One of a job's two files (``output`` or ``error``) on its way here, in order of completion, a page at a time."""

    def __init__(self, client: Asker, job: str, which: str) -> None:
        self._client = client
        self._job = job
        self._which = which
        self._offset = 0
        self._inside = False
        self.lines = 0
        """Whole lines received."""
        self.ended = False
        """The job is closed and everything is here."""

    def pull(self) -> bytes:
        """What is there beyond the last page, as bytes of the file; empty when there is nothing more for now.

        A long line comes in several pulls, so pull until it is empty before writing anything else to the same file.
        """
        page = self._client.ask(messages.Fetch(0, self._job, self._which, self._offset), messages.Lines)
        if page.lines and page.next_offset <= self._offset:
            raise PeerFault(
                "stuck_fetch", f"the broker sends {self._which} lines without moving on from {self._offset}"
            )
        if self._inside and not page.lines:
            raise PeerFault("cut_line", f"the broker sends no more of the line at {self._which} {self._offset}")
        self._inside = page.piece_more
        self._offset = page.next_offset
        self.ended = page.ended and not page.piece_more
        if not page.lines:
            return b""
        whole = len(page.lines) - page.piece_more
        self.lines += whole
        return b"\n".join(page.lines) + (b"" if page.piece_more else b"\n")


def failures(client: Client, job: str) -> list[bytes]:
    """The first ``FAILURES_MAX_COUNT`` lines of a job's error file, or those that come before ``FETCH_MAX_BYTES`` are
    passed: for a word about what went wrong."""
    download, data = Download(client, job, "error"), bytearray()
    while download.lines < FAILURES_MAX_COUNT and len(data) < limits.FETCH_MAX_BYTES and (page := download.pull()):
        data += page
    return bytes(data).split(b"\n")[: min(download.lines, FAILURES_MAX_COUNT)]


def drain(download: Download, write: Callable[[bytes], None]) -> bool:
    """Write all that is there; whether there was anything."""
    any_data = False
    while data := download.pull():
        write(data)
        any_data = True
    return any_data
