"""shell: Dask distributed. Nothing is durable there: scheduler, one worker process with one thread, client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import witness
from children import Child, free_port, listens
from distributed import Client
from home import HERE, Home


class DaskPeer:
    """Client, scheduler and worker of Dask; results are counted by the client's futures."""

    name = "Dask distributed"
    packages = ("dask", "distributed")
    settings = "no durability; one worker process with one thread, no nanny"

    def __init__(self, home: Home, folder: Path, environment: dict[str, str]) -> None:
        self._home, self._folder, self._port = home, folder, free_port()
        self._environment = {**environment, "PYTHONPATH": str(HERE)}
        self._children: dict[str, Child] = {}
        self._client: Any = None
        self._futures: list[Any] = []

    def start_broker(self) -> None:
        """The scheduler on a port of its own."""
        command = [str(self._home.python), "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port"]
        command += [str(self._port), "--no-dashboard"]
        child = self._children["broker"] = Child(command, self._folder / "broker.log", self._environment)
        child.wait_ready(lambda: listens(self._port))

    def start_worker(self) -> None:
        """One worker process."""
        command = [str(self._home.python), "-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{self._port}"]
        command += ["--host", "127.0.0.1", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory"]
        command.append(str(self._folder / "worker"))
        self._children["worker"] = Child(command, self._folder / "worker.log", self._environment)

    def kill(self, which: str) -> None:
        """SIGKILL to ``broker`` or ``worker``."""
        self._children.pop(which).kill()

    def submit(self, bodies: Sequence[str]) -> None:
        """All bodies to the scheduler."""
        self._futures = self._connected().map(witness.work, bodies, pure=False)

    def results(self) -> int | None:
        """Futures finished so far."""
        return sum(future.status == "finished" for future in self._futures)

    def singles(self, bodies: Sequence[str]) -> list[float]:
        """Seconds from submission to result, one body at a time."""
        took = []
        for body in bodies:
            started = time.perf_counter()
            answer = self._connected().submit(witness.work, body, pure=False).result(timeout=30)
            took.append(time.perf_counter() - started)
            if answer != body:
                raise RuntimeError("Dask answered with something else")
        return took

    def close(self) -> None:
        """End what runs."""
        self._futures = []
        if self._client is not None:
            with contextlib.suppress(OSError, TimeoutError):
                self._client.close(timeout=2)
        for child in self._children.values():
            child.kill()

    def _connected(self) -> Any:
        if self._client is None:
            self._client = Client(f"tcp://127.0.0.1:{self._port}", set_as_default=False, timeout="10s")
        return self._client
