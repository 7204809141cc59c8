"""A scripted broker on a real ROUTER: answers a client from a dict, and can be killed at any message and come back."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from common import codec, messages, wire
from common.config import KeySettings

NOW = 1_700_000_000.0


@dataclass
class ScriptedJob:
    """What is durable of one job."""

    order: messages.Submit
    data: bytearray = field(default_factory=bytearray)
    sealed: bool = False
    status: str = "validating"
    output: list[bytes] = field(default_factory=list)
    error: list[bytes] = field(default_factory=list)
    problems: tuple[messages.Problem, ...] = ()
    reason: str = ""
    asked: int = 0

    def info(self, request: int) -> messages.JobInfo:
        ended = self.status in ("completed", "failed", "cancelled", "expired")
        total = len(self.data.splitlines())
        left = 0 if ended else total - len(self.output) - len(self.error)
        return messages.JobInfo(
            request, self.order.job, self.order.name, self.status, total, len(self.output), len(self.error), 0, left, 0,
            10, 20, NOW, NOW, NOW if ended else 0, len(self.problems), self.reason, total,
        )  # fmt: skip


class ScriptedBroker:
    """``jobs`` outlives every kill; ``kill_at(n)`` ends the broker, unanswered, at its n-th message from now on."""

    def __init__(self, keys: KeySettings, page: int = 3, piece: int = 1000) -> None:
        self.keys, self.page, self.piece = keys, page, piece
        self.jobs: dict[str, ScriptedJob] = {}
        self.heard: list[Any] = []
        self.kills = 0
        self.alive = False
        self.port = 0
        self.workers: tuple[messages.WorkerInfo, ...] = ()
        self.on_status: Callable[[ScriptedJob], None] = lambda job: None
        self.answer: Callable[[Any], Any] | None = None
        self.lose_on_kill = 0
        """Bytes of an unsealed input that a kill takes back: what was not synced yet."""
        self._kill_in = -1
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._bound = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> ScriptedBroker:
        self._stop.clear()
        self._bound.clear()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._bound.wait(10)
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def kill_at(self, message: int, back: bool = True) -> None:
        self._kill_in = message
        self._back = back

    def _serve(self) -> None:
        while not self._stop.is_set():
            context: zmq.Context[Any] = zmq.Context()
            try:
                with wire.authenticator(context, self.keys):
                    router = wire.router(context, f"tcp://127.0.0.1:{self.port or '*'}", self.keys)
                    self.port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
                    self.alive = True
                    self._bound.set()
                    killed = self._until_killed(router)
                    self.alive = False
                    router.close(0)
            finally:
                context.term()
            if killed:
                self.kills += 1
                for job in self.jobs.values():
                    if self.lose_on_kill and not job.sealed:
                        del job.data[-self.lose_on_kill :]
                if not self._back or self._stop.wait(0.2):
                    return

    def _until_killed(self, router: zmq.Socket[bytes]) -> bool:
        while not self._stop.is_set():
            if not router.poll(20):
                continue
            peer, data = router.recv_multipart()
            self._kill_in -= 1
            if self._kill_in == 0:
                return True
            message = codec.decode(data)
            self.heard.append(message)
            answer = self.answer(message) if self.answer is not None else None
            router.send_multipart([peer, codec.encode(answer if answer is not None else self._answered(message))])
        return False

    def _answered(self, m: Any) -> Any:
        if isinstance(m, messages.AskJobs):
            every = [job.info(m.request) for job in self.jobs.values()]
            return messages.Jobs(m.request, tuple(every[m.offset : m.offset + 2]), m.offset + 2 < len(every))
        if isinstance(m, messages.AskWorkers):
            return messages.Workers(m.request, self.workers)
        if isinstance(m, messages.Submit):
            job = self.jobs.setdefault(m.job, ScriptedJob(m))
            if job.order.sha256 != m.sha256:
                return messages.Failure(m.request, "other_input", "this job id has another input; choose another", 4)
            return messages.Need(m.request, m.job, len(job.data))
        job = self.jobs.get(m.job)
        if job is None:
            return messages.Failure(m.request, "unknown_job", f"no job {m.job}; see haulier jobs", 2)
        return getattr(self, "_" + type(m).__name__.lower())(m, job)

    def _chunk(self, m: messages.Chunk, job: ScriptedJob) -> Any:
        if m.offset == len(job.data):
            job.data += m.data
        return messages.Need(m.request, m.job, len(job.data))

    def _seal(self, m: messages.Seal, job: ScriptedJob) -> Any:
        if len(job.data) < job.order.size:
            return messages.Need(m.request, m.job, len(job.data))
        if hashlib.sha256(job.data).hexdigest() != job.order.sha256:
            return messages.Failure(m.request, "other_input", "the input is not what was announced", 4)
        job.sealed = True
        return job.info(m.request)

    def _askstatus(self, m: messages.AskStatus, job: ScriptedJob) -> Any:
        job.asked += 1
        self.on_status(job)
        return job.info(m.request)

    def _askproblems(self, m: messages.AskProblems, job: ScriptedJob) -> Any:
        page = job.problems[m.offset : m.offset + 2]
        return messages.Problems(m.request, m.job, page, m.offset + 2 < len(job.problems))

    def _canceljob(self, m: messages.CancelJob, job: ScriptedJob) -> Any:
        job.status = "cancelled"
        return job.info(m.request)

    def _deletejob(self, m: messages.DeleteJob, job: ScriptedJob) -> Any:
        return messages.Deleted(m.request, m.job, job.info(0).total)

    def _askaudit(self, m: messages.AskAudit, job: ScriptedJob) -> Any:
        info = job.info(0)
        missing = info.total - info.completed - info.failed
        return messages.Audit(
            m.request, m.job, not missing, info.total, info.completed, info.failed, 0, missing, 0, info.total, (),
            info.ended_at > 0,
        )  # fmt: skip

    def _fetch(self, m: messages.Fetch, job: ScriptedJob) -> Any:
        """Offsets are bytes of the file, so a long line can be asked for from its middle."""
        lines = getattr(job, m.which)
        start, page, at = 0, [], m.offset
        closed = job.status in ("completed", "failed", "cancelled", "expired")
        for index, line in enumerate(lines):
            end = start + len(line) + 1
            if start <= m.offset < end:
                rest = line[m.offset - start :]
                if len(rest) > self.piece:
                    return messages.Lines(m.request, m.job, (rest[: self.piece],), m.offset + self.piece, False, True)
                page = [rest]
                if m.offset == start:
                    page += [one for one in lines[index + 1 : index + self.page] if len(one) <= self.piece]
                    stop = next((i for i, one in enumerate(lines[index:]) if i and len(one) > self.piece), len(lines))
                    page = page[:stop]
                at = m.offset + sum(len(one) + 1 for one in page)
                break
            start = end
        everything = sum(len(line) + 1 for line in lines)
        return messages.Lines(m.request, m.job, tuple(page), at, closed and at >= everything)


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    """A scripted broker without keys, running."""
    broker = ScriptedBroker(KeySettings(insecure=True)).start()
    yield broker
    broker.stop()


@pytest.fixture
def scripted_with_keys(tmp_path: Path) -> Iterator[ScriptedBroker]:
    """The same with keys, in ``keys`` of the test's folder."""
    from common import keys

    keys.init(tmp_path / "keys")
    broker = ScriptedBroker(KeySettings(tmp_path / "keys")).start()
    yield broker
    broker.stop()
