"""shell: the Celery application of worker and client. Settings: the most durable that Redis has."""

from __future__ import annotations

import os

import witness
from celery import Celery

PORT_VARIABLE = "PEERS_REDIS_PORT"
ECHO = "celery_tasks.echo"


def make_app(port: int) -> Celery:
    """An application whose queue and results lie in the Redis at ``port``."""
    made = Celery("peers", broker=f"redis://127.0.0.1:{port}/0", backend=f"redis://127.0.0.1:{port}/1")
    made.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
    )
    made.task(witness.work, name=ECHO)
    return made


if PORT_VARIABLE in os.environ:  # the worker's process, which looks for an ``app`` here
    app = make_app(int(os.environ[PORT_VARIABLE]))
