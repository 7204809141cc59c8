"""shell: a JetStream worker: takes tasks in batches, publishes the results, acks a task once its result is stored."""

from __future__ import annotations

import asyncio
import sys

import nats
import witness
from nats.errors import Error

BATCH = 256
"""The fastest of 1 (a third of it), 64, 256 and 1,000 where this was first run."""
RETRY_S = 0.05


async def main(port: int) -> None:
    """Work until killed. What fails stays unacknowledged, and the server hands it out again."""
    connection = await nats.connect(
        f"nats://127.0.0.1:{port}", max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_quiet
    )
    stream = connection.jetstream(publish_async_max_pending=1000)
    tasks = await stream.pull_subscribe("tasks.*", durable="workers", stream="TASKS")
    while True:
        try:
            held = await tasks.fetch(BATCH, timeout=1)
            stored = []
            for task in held:
                body = witness.work(task.data.decode())
                stored.append(await stream.publish_async(f"results.{task.subject.split('.')[1]}", body.encode()))
            await asyncio.wait_for(asyncio.gather(*stored), 5)
            for task in held:
                await task.ack()
        except (Error, OSError, TimeoutError):
            await asyncio.sleep(RETRY_S)


async def _quiet(_: Exception) -> None:
    """Reconnecting is the library's business; its complaints are expected here."""


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
