"""A store, a spool and jobs on a real disk, for the tests of the broker's shell."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from broker.effects import NewJob
from broker.intake import Intake
from broker.rules import handle
from broker.spool import Spool
from broker.state import Job, State
from broker.store import Store
from tests.unit.broker.kit import JOB, NOW, STORE


def good_line(number: int, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "custom_id": f"c{number}", "method": "POST", "url": "/v1/completions",
        "body": {"model": "m", "prompt": f"p{number}"},
    }  # fmt: skip
    return json.dumps({**fields, **changes}).encode() + b"\n"


class Disk:
    """What a broker has on its disk, and the state that goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store.open(folder / "broker.sqlite")
        self.store.take_over(lambda: STORE)
        self.spool = Spool(folder / "spool")
        self.intake = Intake(self.store, self.spool)
        self.state = self.store.load(NOW, 30.0)

    def sealed(self, data: bytes, lenient: bool = False, model: str = "m", job: str = JOB, **changes: Any) -> Job:
        """A job whose input is there and waits to be checked."""
        digest = hashlib.sha256(data).hexdigest()
        one = Job(job, self.state.next_job, "", "n", len(data), digest, lenient, 0, 0, model, NOW.wall)
        one.status, one.received = "validating", len(data)
        for name, value in changes.items():
            setattr(one, name, value)
        self.state.next_job += 1
        self.state.jobs[job] = one
        self.spool.append(job, 0, data)
        self.spool.seal(job)
        with self.store.turn():
            self.store.apply([NewJob(one)])
        return one

    def check(self, job: Job, turns: int = 1000) -> Job:
        """Turns of the intake until the job's file is read, or ``turns`` of them."""
        for _ in range(turns):
            if job.status != "validating":
                break
            self.turn_of(job)
        return job

    def turn_of(self, job: Job) -> None:
        with self.store.turn():
            checked = self.intake.step(job, NOW.wall)
            if checked is not None:
                self.store.apply(handle(self.state, checked, NOW).writes)

    def problems(self) -> list[tuple[int, str]]:
        return self.store.connection.execute("SELECT line, code FROM problems ORDER BY line").fetchall()

    def close(self) -> None:
        self.store.close()
        self.spool.close()


def reload(disk: Disk) -> State:
    """What a new process would read back."""
    return disk.store.load(NOW, 30.0)
