"""The worker's connection over real sockets: keys that do not fit are told in words, frames are whole or refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, limits, wire
from common import keys as key_files
from common import messages as said
from common.config import KeySettings
from common.errors import RefusedError
from worker.inputs import LinkLost, LinkReady, Received
from worker.link import Link


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)


def until(link: Link, kind: type, seconds: float = limits.HANDSHAKE_S + 1) -> Any:
    """The first input of this kind."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for item in link.inputs():
            if isinstance(item, kind):
                return item
            assert not isinstance(item, LinkLost), item
        time.sleep(0.01)
    raise TimeoutError(kind.__name__)


def port(router: zmq.Socket[bytes]) -> str:
    return router.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]


def test_messages_pass_both_ways(context: zmq.Context[Any], tmp_path: Path) -> None:
    """With keys, as by default."""
    key_files.init(tmp_path / "keys")
    keys = KeySettings(tmp_path / "keys")
    with wire.authenticator(context, keys):
        router = wire.router(context, "tcp://127.0.0.1:*", keys)
        link = Link(context, port(router), keys)
        until(link, LinkReady)
        assert link.send(said.Unknown("hello")) is None
        peer, frame = router.recv_multipart()
        assert codec.decode(frame) == said.Unknown("hello")
        router.send_multipart([peer, codec.encode(said.Unknown("you too"))])
        assert until(link, Received).message == said.Unknown("you too")
        link.close()
        router.close(0)


def test_a_wrong_key_is_told_in_words(context: zmq.Context[Any], tmp_path: Path) -> None:
    """S5: the operator copied the wrong folder: within five seconds the worker says which setting to look at."""
    key_files.init(tmp_path / "keys")
    key_files.init(tmp_path / "other")
    with wire.authenticator(context, KeySettings(tmp_path / "keys")):
        router = wire.router(context, "tcp://127.0.0.1:*", KeySettings(tmp_path / "keys"))
        link = Link(context, port(router), KeySettings(tmp_path / "other"))
        lost = until(link, LinkLost)
        assert lost.denied
        assert "--keys" in lost.reason
        link.close()
        router.close(0)


def test_a_key_that_is_not_let_in_is_told_in_words(context: zmq.Context[Any], tmp_path: Path) -> None:
    """S5: the key was revoked; the broker is the right one."""
    key_files.init(tmp_path / "keys")
    folder = key_files.add(tmp_path / "keys", "ann")
    (tmp_path / "keys" / "authorized" / "ann.key").unlink()
    with wire.authenticator(context, KeySettings(tmp_path / "keys")):
        router = wire.router(context, "tcp://127.0.0.1:*", KeySettings(tmp_path / "keys"))
        link = Link(context, port(router), KeySettings(folder))
        lost = until(link, LinkLost)
        assert lost.denied
        assert "--keys" in lost.reason
        link.close()
        router.close(0)


def test_nobody_there_is_no_matter_of_keys(context: zmq.Context[Any]) -> None:
    """The broker is down: no word about keys, which would send the operator the wrong way."""
    with socket.socket() as probe:  # a port that nobody listens on
        probe.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    link = Link(context, where, KeySettings(insecure=True))
    lost = until(link, LinkLost)
    assert not lost.denied
    assert "nobody" in lost.reason
    link.close()


@pytest.mark.parametrize("frames", [[b"not msgpack"], [b"a", b"b"]])
def test_what_is_no_message_loses_the_link(context: zmq.Context[Any], frames: list[bytes]) -> None:
    """A peer with a bug costs this session and nothing else."""
    router = wire.router(context, "tcp://127.0.0.1:*", KeySettings(insecure=True))
    link = Link(context, port(router), KeySettings(insecure=True))
    until(link, LinkReady)
    assert link.send(said.Unknown("hello")) is None
    peer, _ = router.recv_multipart()
    router.send_multipart([peer, *frames])
    assert "protocol" in until(link, LinkLost).reason
    link.close()
    router.close(0)


def test_a_broker_that_does_not_read_loses_the_link(context: zmq.Context[Any]) -> None:
    """SIGSTOP of the broker for long: the queue fills, and a send says so instead of waiting."""
    router = wire.router(context, "tcp://127.0.0.1:*", KeySettings(insecure=True))
    link = Link(context, port(router), KeySettings(insecure=True))
    until(link, LinkReady)
    message = said.Unknown("x" * 4000)
    lost = next(lost for _ in range(100_000) if (lost := link.send(message)) is not None)
    assert "does not take" in lost.reason
    link.close()
    router.close(0)


def test_a_link_that_cannot_be_made_leaves_no_socket(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In life: an endpoint that is none: its socket would keep the context, and the process, from ending."""
    made: list[zmq.Socket[bytes]] = []
    real = wire.connect
    monkeypatch.setattr(wire, "connect", lambda socket, endpoint: made.append(socket) or real(socket, endpoint))
    with pytest.raises(RefusedError, match="no address"):
        Link(context, "tcp://nowhere", KeySettings(insecure=True))
    assert [socket.closed for socket in made] == [True]
