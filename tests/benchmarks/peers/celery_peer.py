"""shell: Celery with Redis. Every write synced (appendfsync always), acks_late, prefetch 1, one worker process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from celery_tasks import ECHO, PORT_VARIABLE, make_app
from children import Child, free_port, listens
from home import HERE, Home


class CeleryPeer:
    """Client, broker and worker of Celery; results are counted in Redis."""

    name = "Celery + Redis"
    packages = ("celery", "redis")
    settings = "Redis appendonly, appendfsync always; acks_late, prefetch 1, one worker process (solo pool)"

    def __init__(self, home: Home, folder: Path, environment: dict[str, str]) -> None:
        self._home, self._folder, self._port = home, folder, free_port()
        self._environment = {**environment, PORT_VARIABLE: str(self._port), "PYTHONPATH": str(HERE)}
        self._redis: Any = redis.Redis(port=self._port, db=1)
        self._children: dict[str, Child] = {}
        self._app: Any = make_app(self._port)

    def start_broker(self) -> None:
        """Redis on a port of its own, its data in the run's folder, kept over a restart."""
        command = [self._home.redis_server, "--port", str(self._port), "--bind", "127.0.0.1", "--dir"]
        command += [str(self._folder), "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--loglevel"]
        libraries = {"LD_LIBRARY_PATH": self._home.redis_libraries} if self._home.redis_libraries else {}
        child = self._children["broker"] = Child([*command, "warning"], self._folder / "broker.log", libraries)
        child.wait_ready(lambda: listens(self._port))

    def start_worker(self) -> None:
        """One worker process that runs one task at a time."""
        command = [str(self._home.python), "-m", "celery", "-A", "celery_tasks", "worker", "--pool", "solo", "-l"]
        self._children["worker"] = Child([*command, "warning"], self._folder / "worker.log", self._environment)

    def kill(self, which: str) -> None:
        """SIGKILL to ``broker`` or ``worker``."""
        self._children.pop(which).kill()

    def submit(self, bodies: Sequence[str]) -> None:
        """All bodies into the queue; durable when this returns."""
        for body in bodies:
            self._app.send_task(ECHO, (body,))

    def results(self) -> int | None:
        """Results stored so far, or None while Redis cannot be asked."""
        try:
            return int(self._redis.dbsize())
        except (redis.RedisError, OSError):
            return None

    def singles(self, bodies: Sequence[str]) -> list[float]:
        """Seconds from submission to result, one body at a time."""
        took = []
        for body in bodies:
            started = time.perf_counter()
            answer = self._app.send_task(ECHO, (body,)).get(timeout=30)
            took.append(time.perf_counter() - started)
            if answer != body:
                raise RuntimeError("Celery answered with something else")
        return took

    def close(self) -> None:
        """End what runs."""
        self._app.close()
        self._redis.close()
        for child in self._children.values():
            child.kill()
