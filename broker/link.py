"""shell: the broker's one socket: frames in as inputs, messages out without ever waiting. Knows no rule.

Drained until EAGAIN, within what one turn may take. A connection that would block or is unknown is reported, never
waited for. Long bodies go out in parts, paced, so that no worker's queue is filled by them and beats get through.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import structlog
import zmq

from broker.effects import BodyAt, SendBatch
from broker.inputs import Came, Faulted
from broker.spool import Spool
from common import codec, limits, messages, wire
from common.errors import PeerFault
from common.keys import FIRST_NAME, Authorized

log = structlog.get_logger(room="broker.link")
WRONG_KEY = (
    "their --keys holds another broker's server.key, or a client key that was not added here, or none (--insecure)"
)


@dataclass(slots=True)
class _Parts:
    """Long bodies on their way to one connection."""

    waiting: deque[tuple[messages.Fence, BodyAt, int]] = field(default_factory=deque)
    sent: int = 0
    since: float = 0.0


class Link:
    """The ROUTER. ``authorized`` is None without keys: everybody who reaches it then sees all."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        authorized: Authorized | None,
        spool: Spool,
        monitor: wire.Monitor | None = None,
    ) -> None:
        self.socket = socket
        self._authorized = authorized
        self._spool = spool
        self._parts: dict[bytes, _Parts] = {}
        self._monitor = monitor
        self._looked_at = 0.0
        self._denied, self._last_denied = 0, ""

    @property
    def weights(self) -> Mapping[str, float]:
        """Shares of keys, as the key folder says now: always the same object."""
        return self._authorized.weights if self._authorized is not None else {}

    @property
    def busy(self) -> bool:
        """Whether parts of bodies wait to be sent."""
        return bool(self._parts)

    def wait(self, seconds: float) -> None:
        """Until something came in, at most ``seconds``."""
        self.socket.poll(int(seconds * 1000), zmq.POLLIN)

    def receive(self) -> Iterator[Came | Faulted]:
        """What came in, until there is no more or the turn is full. Who was not let in is told to the log."""
        self._look_at_doors()
        size = 0
        for _ in range(limits.MESSAGES_A_TURN_COUNT):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield self._read(frames)
            size += len(frames[-1])
            if size > limits.MESSAGES_A_TURN_BYTES:
                return

    def _look_at_doors(self) -> None:
        """Once a beat: keys that came and went, so that a revoked key's next message is its last (S5), and who knocked
        with a key that does not fit.
        """
        for news in self._monitor.news() if self._monitor is not None else ():
            if news.kind == "denied":
                self._denied += 1
                self._last_denied = news.detail
        now = time.monotonic()
        if now - self._looked_at < limits.BEAT_S:
            return
        self._looked_at = now
        if self._authorized is not None:
            self._authorized.refresh()
        if self._denied:
            log.warning("not_let_in", handshakes=self._denied, last=self._last_denied, advice=WRONG_KEY)
            self._denied = 0

    def _read(self, frames: list[Any]) -> Came | Faulted:
        peer = frames[0].bytes
        if len(frames) != 2:
            return Faulted(peer, "bad_frames", f"a message of {len(frames) - 1} frames; one is expected")
        user, admin = "", True
        if self._authorized is not None:
            name = self._authorized.name(_key(frames[1]))
            if name is None:
                return Faulted(peer, "revoked", "this key is let in no more")
            user, admin = name, name.startswith(FIRST_NAME)
        try:
            message = codec.decode(frames[1].buffer)
        except PeerFault as fault:
            return Faulted(peer, fault.code, str(fault))
        return Came(peer, user, admin, message)

    def send(self, peer: bytes, message: Any) -> bool:
        """Hand a message to the socket; False if this connection would block or is gone. An answer that fits into no
        frame is answered by its failure: it costs its asker that question, and nobody else anything.
        """
        try:
            data = codec.encode(message)
        except PeerFault as fault:
            log.error("not_sendable", message=type(message).__name__, reason=str(fault))
            request = getattr(message, "request", None)
            if request is None:
                return False
            data = codec.encode(messages.Failure(request, fault.code, f"the answer cannot be sent: {fault}", 70))
        try:
            self.socket.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    def send_batch(self, batch: SendBatch) -> bool:
        """Read the bodies of an assignment and send it; the rest of long ones follows in parts."""
        lines: list[messages.BatchLine] = []
        for job, run in groupby(batch.lines, key=lambda line: line.ref.job):
            of_job = list(run)
            bodies = self._spool.read_many(job, [(one.offset, min(one.size, limits.PART_MAX_BYTES)) for one in of_job])
            lines += [
                messages.BatchLine(one.ref, one.url, one.size, body) for one, body in zip(of_job, bodies, strict=True)
            ]
        if not self.send(batch.peer, messages.Batch(batch.fence, batch.assignment, tuple(lines))):
            return False
        for line in batch.lines:
            if line.size > limits.PART_MAX_BYTES:
                parts = self._parts.setdefault(batch.peer, _Parts())
                parts.waiting.append((batch.fence, line, limits.PART_MAX_BYTES))
        return True

    def send_parts(self, mono: float) -> list[bytes]:
        """Send the parts that are due; the connections that did not take theirs."""
        failed = []
        for peer, parts in list(self._parts.items()):
            if mono - parts.since >= limits.BEAT_S:
                parts.since, parts.sent = mono, 0
            while parts.waiting and parts.sent < limits.BODY_PARTS_A_BEAT_COUNT:
                fence, line, offset = parts.waiting[0]
                size = min(limits.PART_MAX_BYTES, line.size - offset)
                data = self._spool.read(line.ref.job, line.offset + offset, size)
                if not self.send(peer, messages.BodyPart(fence, line.ref, offset, data)):
                    failed.append(peer)
                    parts.waiting.clear()
                    break
                parts.sent += 1
                parts.waiting.popleft()
                if offset + len(data) < line.size:
                    parts.waiting.appendleft((fence, line, offset + len(data)))
            if not parts.waiting:
                del self._parts[peer]
        return failed

    def forget_all(self) -> None:
        """No session stands any more: what is left of bodies is sent to nobody."""
        self._parts.clear()

    def forget(self, job: str) -> None:
        """The job is over: what is left of its bodies is sent to nobody."""
        for parts in self._parts.values():
            parts.waiting = deque(one for one in parts.waiting if one[1].ref.job != job)

    def close(self, linger_s: float = 0.5) -> None:
        """Close; what was said last gets ``linger_s`` to leave."""
        if self._monitor is not None:
            self._monitor.close()
        self.socket.close(int(linger_s * 1000))


def _key(frame: Any) -> bytes:
    """The public key (Z85) that sent a frame, as the authenticator put it there."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""
