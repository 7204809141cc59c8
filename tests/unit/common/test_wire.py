"""S5 on the wire: only a known key gets a word through, and both sides learn of a wrong one within seconds."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import keys, limits, wire
from common.config import KeySettings
from common.errors import RefusedError


class House:
    """A listening broker socket with its keys and its monitor."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        self.keys = KeySettings(folder)
        self.context = context
        self.router = wire.router(context, "tcp://127.0.0.1:*", self.keys)
        self.monitor = wire.Monitor(self.router)
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def knock(self, settings: KeySettings, endpoint: str | None = None) -> tuple[str, bytes | None, set[str]]:
        """What the caller learned, what the broker heard from it, what the broker's monitor saw."""
        where = endpoint or self.endpoint
        socket = wire.dealer(self.context, where, settings)
        monitor = wire.Monitor(socket)
        wire.connect(socket, where)
        deadline = time.monotonic() + limits.HANDSHAKE_S
        learned = ""
        while not learned and time.monotonic() < deadline:
            if monitor.socket.poll(20):
                learned = next((news.kind for news in monitor.news() if news.kind != "connected"), "")
            elif socket.poll(0, zmq.POLLOUT):
                learned = "ready"
        if learned == "ready":
            socket.send(b"hello", zmq.NOBLOCK)
        heard = self.router.recv_multipart()[1] if self.router.poll(2_000 if learned == "ready" else 100) else None
        seen = {news.kind for news in self.monitor.news()}
        monitor.close()
        socket.close(0)
        return learned, heard, seen


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    folder = tmp_path / "keys"
    keys.init(folder)
    context: zmq.Context[Any] = zmq.Context()
    with wire.authenticator(context, KeySettings(folder)):
        made = House(folder, context)
        yield made
        made.monitor.close()
        made.router.close(0)
    context.term()


def test_a_known_key_is_let_in(house: House) -> None:
    """The control of all the refusals below: with the right key the same knock is heard."""
    learned, heard, _ = house.knock(house.keys)
    assert (learned, heard) == ("ready", b"hello")


def test_the_broker_knows_whose_word_it_hears(house: House) -> None:
    """Jobs belong to keys: each message carries its sender's public key."""
    socket = wire.dealer(house.context, house.endpoint, house.keys)
    wire.connect(socket, house.endpoint)
    assert socket.poll(5_000, zmq.POLLOUT)
    socket.send(b"hi")
    assert house.router.poll(5_000)
    frame = house.router.recv_multipart(copy=False)[1]
    assert str(frame.get("User-Id")).encode() == keys.load_client(house.keys.directory or Path()).public
    socket.close(0)


def test_a_strangers_key_is_denied_and_both_sides_know(house: House, tmp_path: Path) -> None:
    """A worker with the keys of another fleet but the right server key."""
    other, mixed = tmp_path / "other", tmp_path / "mixed"
    keys.init(other)
    mixed.mkdir()
    shutil.copy(other / "client.key_secret", mixed)
    shutil.copy((house.keys.directory or Path()) / "server.key", mixed)
    learned, heard, seen = house.knock(KeySettings(mixed))
    assert (learned, heard) == ("denied", None)
    assert "denied" in seen


def test_a_wrong_server_key_is_cut_off_and_both_sides_know(house: House, tmp_path: Path) -> None:
    """A client that holds an old server key."""
    other = tmp_path / "other"
    keys.init(other)
    learned, heard, seen = house.knock(KeySettings(other))
    assert (learned, heard) == ("cut", None)
    assert "denied" in seen


def test_a_peer_without_keys_is_denied(house: House) -> None:
    """A raw NULL socket finds the port."""
    learned, heard, _ = house.knock(KeySettings(None, insecure=True))
    assert (learned, heard) == ("denied", None)


def test_a_revoked_key_is_denied_at_its_next_handshake(house: House) -> None:
    """Revocation needs no restart of the broker."""
    folder = house.keys.directory or Path()
    bundle = keys.add(folder, "bob")
    kept = folder.parent / "kept"
    shutil.copytree(bundle, kept)
    assert house.knock(KeySettings(kept))[1] == b"hello"
    keys.revoke(folder, "bob")
    learned, heard, _ = house.knock(KeySettings(kept))
    assert (learned, heard) == ("denied", None)


def test_nobody_listening_is_told_at_once(house: House) -> None:
    """The broker is down: the socket says so and never reconnects behind our back."""
    with socket.socket() as held:  # bound and not listening: nobody else can get the port meanwhile
        held.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        assert house.knock(house.keys, endpoint)[0] == "lost"


def test_a_port_in_use_names_the_setting(house: House) -> None:
    """A second broker on one address."""
    with pytest.raises(RefusedError, match="--bind"):
        wire.router(house.context, house.endpoint, house.keys)


def test_an_oversized_frame_costs_its_sender_the_connection(house: House) -> None:
    """MAXMSGSIZE: a peer cannot make the broker hold a gigabyte."""
    socket = wire.dealer(house.context, house.endpoint, house.keys)
    monitor = wire.Monitor(socket)
    wire.connect(socket, house.endpoint)
    assert socket.poll(5_000, zmq.POLLOUT)
    socket.send(b"x" * (limits.MESSAGE_MAX_BYTES + 1))
    deadline, kinds = time.monotonic() + 5, set()
    while "lost" not in kinds and time.monotonic() < deadline:
        monitor.socket.poll(100)
        kinds |= {news.kind for news in monitor.news()}
    assert "lost" in kinds
    assert not house.router.poll(0)
    monitor.close()
    socket.close(0)


@pytest.mark.parametrize("make", [wire.router, wire.dealer])
def test_unusable_keys_leave_no_socket_behind(make: Any, tmp_path: Path) -> None:
    """A folder without keys: the one line that says so, and a context that can end (it waits for open sockets)."""
    context: zmq.Context[Any] = zmq.Context()
    with pytest.raises(RefusedError, match="keys init") as caught:
        make(context, "tcp://127.0.0.1:*", KeySettings(tmp_path))
    assert caught.tb is not None  # its frames, as a caller's log may keep them, hold no open socket
    assert [one for one in context._sockets if not one.closed] == []
    context.term()
