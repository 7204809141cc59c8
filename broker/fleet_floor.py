"""shell: the floor that `haulier bench fleet` prints beside itself: the fleet's messages and commits without rules.

One ROUTER with a store, one DEALER with an outbox, CURVE as in the fleet, msgpack, SQLite WAL with synchronous FULL on
both sides, one commit a turn, an engine that answers with the request's own text. Nothing is checked, fenced,
recovered or counted: what haulier costs beyond this is its own doing. Knows no rule and no message of the fleet.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import zmq

from common import wire
from common.config import KeySettings
from common.database import open_database, transaction
from common.errors import UnreachableError

LINES_A_MESSAGE = 64
PATIENCE_S = 20.0
"""Without one message for this long the other half is gone."""
Line = tuple[int, int, bytes]
"""Index, attempt, body."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What the bare loop reached: ``lines`` through it in ``seconds``, from the first dispatch to the last ack."""

    lines: int
    in_flight: int
    seconds: float

    @property
    def lines_per_s(self) -> float:
        return self.lines / self.seconds


def measure(lines: int, in_flight: int, body: bytes, folder: Path, keys: KeySettings) -> Floor:
    """Run ``lines`` copies of ``body`` through the bare loop, at most ``in_flight`` at once. Files go to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    spool = folder / "input"
    spool.write_bytes(body * lines)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, wire.authenticator(context, keys):
        socket = wire.router(context, "tcp://127.0.0.1:*", keys)
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        where = endpoint.decode() if isinstance(endpoint, bytes) else ""
        command = [sys.executable, "-m", "broker.fleet_floor", where, str(keys.directory or ""), str(folder)]
        worker = subprocess.Popen(command)
        try:
            return Floor(lines, in_flight, _broker(socket, folder / "store.db", spool, lines, in_flight, len(body)))
        finally:
            worker.kill()
            worker.wait()
            socket.close(0)


def _broker(socket: zmq.Socket[bytes], store: Path, spool: Path, lines: int, in_flight: int, size: int) -> float:
    """Dispatch all lines, store all results, ack them; seconds from the first dispatch to the last ack."""
    database = open_database(store, [_make_lines], "the floor's store")
    with transaction(database) as connection:  # a job as it stands after its submission
        connection.executemany(
            "INSERT INTO lines VALUES (?, 0, ?, ?)", ((index, index * size, size) for index in range(lines))
        )
    source = os.open(spool, os.O_RDONLY)
    peer = _receive(socket)[0][0]
    started, sent, stored = time.perf_counter(), 0, 0
    while True:
        with transaction(database) as connection:
            # the first turn has nothing to store; every other waits for something
            done = [msgpack.unpackb(frames[1]) for frames in _receive(socket)] if sent else []
            for results in done:
                connection.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", results)
                connection.executemany("UPDATE lines SET state = 2 WHERE line = ?", [(row[0],) for row in results])
                stored += len(results)
            batches: list[Sequence[Line]] = []
            while sent < lines and sent - stored <= in_flight - LINES_A_MESSAGE:
                last = min(lines, sent + LINES_A_MESSAGE)
                connection.execute("UPDATE lines SET state = 1 WHERE line >= ? AND line < ?", (sent, last))
                batches.append([(index, 1, os.pread(source, size, index * size)) for index in range(sent, last)])
                sent = last
        for results in done:
            socket.send_multipart([peer, msgpack.packb(["ack", [row[:2] for row in results]])])
        for batch in batches:
            socket.send_multipart([peer, msgpack.packb(["batch", batch])])
        if stored == lines:
            os.close(source)
            return time.perf_counter() - started


def _worker(endpoint: str, keys: KeySettings, folder: Path) -> None:
    """Answer batches until killed: run, outbox, commit, then speak; what was acked leaves with the next commit."""
    database = open_database(folder / "outbox.db", [_make_outbox], "the floor's outbox")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = wire.dealer(context, endpoint, keys)
    wire.connect(socket, endpoint)
    socket.send(b"hello")
    while True:
        dones: list[list[tuple[int, int, str, int, bytes]]] = []
        with transaction(database) as connection:
            for (data,) in _receive(socket):
                kind, rows = msgpack.unpackb(data)
                if kind == "ack":
                    connection.executemany("DELETE FROM outbox WHERE line = ? AND attempt = ?", rows)
                    continue
                dones.append([(line, attempt, "ok", 200, body) for line, attempt, body in rows])
                connection.executemany("INSERT INTO outbox VALUES (?, ?, ?, ?, ?)", dones[-1])
        for done in dones:
            socket.send(msgpack.packb(done))


def _receive(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages that are there; waits for the first."""
    if not socket.poll(int(PATIENCE_S * 1000)):
        raise UnreachableError(f"the floor's other half said nothing for {PATIENCE_S:g} s")
    found = []
    while True:
        try:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return found


def _make_lines(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE lines (line INTEGER PRIMARY KEY, state INTEGER NOT NULL, start INTEGER NOT NULL,"
        " size INTEGER NOT NULL) STRICT"
    )
    connection.execute(
        "CREATE TABLE results (line INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, status TEXT NOT NULL,"
        " code INTEGER NOT NULL, body BLOB NOT NULL) STRICT"
    )


def _make_outbox(connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TABLE outbox (line INTEGER NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL,"
        " code INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (line, attempt)) STRICT, WITHOUT ROWID"
    )


def body_of(size: int) -> bytes:
    """A request's JSON of ``size`` bytes, as in the fleet's own measurement."""
    empty = json.dumps({"model": "echo", "messages": [{"role": "user", "content": ""}]})
    return empty.replace('""', '"' + "x" * (size - len(empty)) + '"').encode()


if __name__ == "__main__":
    _worker(
        sys.argv[1],
        KeySettings(Path(sys.argv[2])) if sys.argv[2] else KeySettings(None, insecure=True),
        Path(sys.argv[3]),
    )
