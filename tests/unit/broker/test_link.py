"""The broker's socket: what comes in is read with suspicion, what goes out never waits, long bodies are paced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from broker.effects import BodyAt, SendBatch
from broker.inputs import Came, Faulted
from broker.link import Link
from broker.spool import Spool
from common import codec, limits, messages
from common.messages import Fence, LineRef
from tests.unit.broker.kit import JOB

FENCE = Fence("s", 1, 1, 1)


class Frame:
    def __init__(self, data: bytes, key: str = "") -> None:
        self.bytes = self.buffer = data
        self.key = key

    def get(self, name: str) -> str:
        if not self.key:
            raise zmq.ZMQError(zmq.EINVAL)
        return self.key

    def __len__(self) -> int:
        return len(self.bytes)


class Socket:
    """A ROUTER of the test's own: frames to hand out, frames taken, and how it fails."""

    def __init__(self) -> None:
        self.incoming: deque[list[Frame]] = deque()
        self.sent: list[tuple[bytes, Any]] = []
        self.failure: int | None = None

    def recv_multipart(self, flags: int, copy: bool) -> list[Frame]:
        if not self.incoming:
            raise zmq.Again
        return self.incoming.popleft()

    def send_multipart(self, frames: tuple[bytes, bytes], flags: int) -> None:
        assert flags & zmq.NOBLOCK
        if self.failure is not None:
            raise zmq.ZMQError(self.failure) if self.failure != zmq.EAGAIN else zmq.Again
        self.sent.append((frames[0], codec.decode(frames[1])))


class Keys:
    def name(self, key: bytes) -> str | None:
        return {b"k-admin": "admin", b"k-bob": "bob"}.get(key)

    def refresh(self) -> bool:
        return False


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    one = Spool(tmp_path)
    yield one
    one.close()


def made(spool: Spool, keys: Any = None) -> tuple[Link, Socket]:
    socket: Any = Socket()
    return Link(socket, keys, spool), socket


def test_messages_come_with_whose_key_it_was(spool: Spool) -> None:
    """Jobs belong to keys: the socket's own word on who sent it, not the message's."""
    link, socket = made(spool, Keys())
    data = codec.encode(messages.AskWorkers(1))
    for key in ("k-admin", "k-bob"):
        socket.incoming.append([Frame(b"p"), Frame(data, key)])
    first, second = link.receive()
    assert isinstance(first, Came)
    assert isinstance(second, Came)
    assert (first.user, first.admin, second.user, second.admin) == ("admin", True, "bob", False)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([Frame(b"p"), Frame(b"\xc1", "k-bob")], "not_msgpack"),
        ([Frame(b"p"), Frame(b"x", "k-bob"), Frame(b"y", "k-bob")], "bad_frames"),
        ([Frame(b"p")], "bad_frames"),
        ([Frame(b"p"), Frame(codec.encode(messages.AskWorkers(1)), "k-gone")], "revoked"),
        ([Frame(b"p"), Frame(codec.encode(messages.AskWorkers(1)))], "revoked"),
    ],
)
def test_what_is_no_message_becomes_a_fault(spool: Spool, frames: list[Frame], code: str) -> None:
    """Garbage, a raw peer, a key revoked while its session was open: an input like any other."""
    link, socket = made(spool, Keys())
    socket.incoming.append(frames)
    (found,) = link.receive()
    assert isinstance(found, Faulted)
    assert found.code == code


def test_an_answer_too_large_for_a_frame_fails_alone(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with long lists of models and a client that asks for them: one question fails, the broker lives on."""
    link, socket = made(spool)
    long = messages.Problems(7, JOB, tuple(messages.Problem(1, "c", "m" * 300) for _ in range(100)), False)
    assert link.send(b"p", long)
    assert socket.sent.pop()[1] == long, "control: what fits goes out as it is"
    monkeypatch.setattr(limits, "MESSAGE_MAX_BYTES", 1000)
    assert link.send(b"p", long)
    _, failure = socket.sent.pop()
    assert isinstance(failure, messages.Failure)
    assert (failure.request, failure.code) == (7, "too_large")
    fence = messages.Fence("s" * 512, 1, 1, 1)
    assert not link.send(b"p", messages.Drain(fence, "r" * 3000)), "a session's message has no question to fail"


def test_a_turn_takes_so_many_messages(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood does not keep the broker from its beats."""
    monkeypatch.setattr(limits, "MESSAGES_A_TURN_COUNT", 3)
    link, socket = made(spool)
    for _ in range(5):
        socket.incoming.append([Frame(b"p"), Frame(codec.encode(messages.AskWorkers(1)))])
    assert len(list(link.receive())) == 3
    monkeypatch.setattr(limits, "MESSAGES_A_TURN_BYTES", 1)
    assert len(list(link.receive())) == 1
    assert len(list(link.receive())) == 1


@pytest.mark.parametrize("failure", [zmq.EAGAIN, zmq.EHOSTUNREACH])
def test_a_deaf_connection_is_reported_never_waited_for(spool: Spool, failure: int) -> None:
    """A queue that is full, or a peer that is gone."""
    link, socket = made(spool)
    socket.failure = failure
    assert not link.send(b"p", messages.Unknown("x"))
    assert not link.send_batch(SendBatch(b"p", FENCE, 1, ()))
    socket.failure = None
    assert link.send(b"p", messages.Unknown("x"))


def test_any_other_failure_of_the_socket_is_ours(spool: Spool) -> None:
    """It must not pass as a peer that is gone."""
    link, socket = made(spool)
    socket.failure = zmq.ENOTSOCK
    with pytest.raises(zmq.ZMQError):
        link.send(b"p", messages.Unknown("x"))


def test_long_bodies_go_out_in_parts_and_paced(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 64 MiB body must not fill a worker's queue: so many parts a beat, in order, and beats get through."""
    monkeypatch.setattr(limits, "PART_MAX_BYTES", 10)
    monkeypatch.setattr(limits, "BODY_PARTS_A_BEAT_COUNT", 2)
    body = bytes(range(65, 65 + 57))
    spool.append(JOB, 0, b"head" + body)
    link, socket = made(spool)
    ref = LineRef(JOB, 0, 1)
    assert link.send_batch(SendBatch(b"p", FENCE, 1, (BodyAt(ref, "/v1/completions", 4, len(body)),)))
    assert link.busy
    counts = []
    for second in range(1, 5):
        before = len(socket.sent)
        assert link.send_parts(float(second)) == []
        assert link.send_parts(second + 0.1) == []
        counts.append(len(socket.sent) - before)
    assert counts == [2, 2, 1, 0]
    assert not link.busy
    first, *parts = (message for _, message in socket.sent)
    assert first.lines[0].total == 57
    assert first.lines[0].body + b"".join(part.data for part in parts) == body


def test_parts_of_a_job_that_is_over_are_forgotten(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the middle of a long body: its input file is gone, and nobody reads it any more."""
    monkeypatch.setattr(limits, "PART_MAX_BYTES", 10)
    spool.append(JOB, 0, b"x" * 50)
    link, socket = made(spool)
    link.send_batch(SendBatch(b"p", FENCE, 1, (BodyAt(LineRef(JOB, 0, 1), "/v1/completions", 0, 50),)))
    link.forget(JOB)
    spool.drop(JOB)
    assert link.send_parts(1.0) == []
    assert len(socket.sent) == 1
    assert not link.busy


def test_parts_for_a_connection_that_is_gone_are_forgotten(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker went away in the middle of a long body."""
    monkeypatch.setattr(limits, "PART_MAX_BYTES", 10)
    spool.append(JOB, 0, b"x" * 50)
    link, socket = made(spool)
    link.send_batch(SendBatch(b"p", FENCE, 1, (BodyAt(LineRef(JOB, 0, 1), "/v1/completions", 0, 50),)))
    socket.failure = zmq.EHOSTUNREACH
    assert link.send_parts(1.0) == [b"p"]
    assert not link.busy
