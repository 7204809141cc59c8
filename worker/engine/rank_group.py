"""shell: the further ranks of an engine as processes, and rank 0's engine, which leads them.

Rank 0 is the worker's own process. The others are children that end with it (``common.parent``): each has a socket to
rank 0's engine, and one for its last words, whose end says that it ended. Whichever rank ends, all do, with the first
one's reason; nobody is left waiting in a collective. Knows no request.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from common import limits, log, parent
from common.config import EngineSettings
from common.errors import HaulierError, RefusedError, UsageError
from ring.producer import Producer
from worker.engine.callbacks import Stop, Watch
from worker.engine.collectives import RankStore, join, refuse_missing
from worker.engine.device import Device
from worker.engine.engine import Engine
from worker.engine.lockstep import Leader, LeadingConsumer, LeadingStop, RankLink, RankLostError
from worker.engine.model import LoadedModel
from worker.engine.ranks import RankPlan, as_fields, settings_of
from worker.structures import Finished, Request

MODULE = "worker.engine.rank_process"
_ERRORS: dict[int, type[HaulierError]] = {2: UsageError, 4: RefusedError}
"""A rank's exit codes that are its refusal: the worker's own, then."""


class RankGroup:
    """Starts the ranks from 1 on when made. ``lost`` hears, on a thread of this group's, that one ended, and why."""

    def __init__(
        self, settings: EngineSettings, folder: Path | None, ring_bytes: int, lost: Callable[[HaulierError], None]
    ) -> None:
        self.ranks = settings.tensor_parallel
        refuse_missing(settings.device, self.ranks)
        threads = settings.threads or max(1, (os.cpu_count() or 1) // 2 // self.ranks)
        self.settings = settings_of(settings, 0, threads)
        self._store = RankStore(self.ranks)
        self._lost = lost
        self._failure: HaulierError | None = None
        self._failed = threading.Event()
        self._over = False
        self._read_end, self._write_end = os.pipe()  # the write end is kept: its end is ours
        self.links: list[RankLink] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.ranks):
            self._start(settings_of(settings, rank, threads), rank, folder, ring_bytes)

    def _start(self, settings: EngineSettings, rank: int, folder: Path | None, ring_bytes: int) -> None:
        name = f"rank {rank} ({settings.device})"
        link, theirs = socket.socketpair()
        words, last = socket.socketpair()
        plan = RankPlan(
            rank, self._store.port, theirs.fileno(), last.fileno(), ring_bytes, limits.RING_ENTRIES_COUNT,
            "" if folder is None else str(folder), as_fields(settings),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, json.dumps(asdict(plan))], stdin=subprocess.DEVNULL,
            env={**os.environ, parent.VARIABLE: str(self._read_end)}, start_new_session=True,
            pass_fds=(self._read_end, theirs.fileno(), last.fileno()),
        )  # fmt: skip
        theirs.close()
        last.close()
        self.links.append(RankLink(link, name))
        self.processes.append(process)
        log.get("ranks").info("rank_started", rank=rank, device=settings.device, process=process.pid)
        watching = threading.Thread(target=self._watch, args=(process, words, name), name=name, daemon=True)
        watching.start()

    def join(self, device: Device) -> None:
        """Be rank 0 on ``device``; waits for the others."""
        join(self._store.store, 0, self.ranks, device)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What fails in here because another rank ended fails with that one's reason; then all end."""
        try:
            yield
        except Exception as error:
            # what a rank's end breaks here is seen here first: a collective, a socket
            if self._failed.wait(limits.RANK_WORDS_S) and self._failure is not None:
                raise self._failure from error
            raise
        finally:
            if sys.exc_info()[0] is not None:
                self.close()

    def close(self) -> None:
        """Nothing is said to the other ranks any more: those that were not told to end fail, and end; those that are
        stuck end soon, as if this process had ended. May be called again."""
        if self._over:
            return
        self._over = True
        for link in self.links:
            link.close()
        os.close(self._write_end)
        os.close(self._read_end)

    def _watch(self, process: subprocess.Popen[bytes], words: socket.socket, name: str) -> None:
        """One rank's whole life. On a thread of its own."""
        said = b""
        with words:
            while part := words.recv(4096):
                said += part
        code = process.wait()
        if code == 0 or self._over:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = said.decode(errors="replace")
        failure = _ERRORS.get(code, RankLostError)(text if code in _ERRORS else f"{name} {how}: {text or 'no reason'}")
        self._failure = self._failure or failure
        self._failed.set()
        self._lost(failure)


class LeadingEngine(Engine):
    """Rank 0's engine: says what enters, answers for all, and ends with the reason of whichever rank ended first."""

    def __init__(
        self,
        loaded: LoadedModel,
        producer: Producer,
        group: RankGroup,
        on_finished: Callable[[Finished], None],
        on_admitted: Callable[[Request], None],
        *,
        watch: Watch | None = None,
    ) -> None:
        self._group = group
        self._leader = Leader(group.links)
        self._leading = LeadingConsumer(producer, self._leader)
        super().__init__(
            loaded, self._leading, group.settings, on_finished, on_admitted, watch=watch, agree=self._leader.agree
        )

    def run(self, stop: Stop) -> None:
        """See ``Engine``."""
        with self._group.blamed():
            super().run(LeadingStop(stop, self._leading, self._leader))
