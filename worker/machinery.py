"""shell: what the engine thread builds before it runs: the ring, the engine and the text codec, real or echoing.

Heavy imports happen inside these functions, on the engine's thread, so that the session logs in and beats long before a
model is there. Knows no session.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common import limits
from common.clock import SystemClock
from common.config import GIB, WorkerSettings
from common.errors import HaulierError, RefusedError
from common.machine import memory_bytes
from common.messages import ModelInfo
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import HostRingMemory, RingMemory
from ring.producer import Producer
from worker.lines import TOKEN_BYTES
from worker.request_rules import Serving
from worker.structures import EngineFigures, Finished, Request
from worker.tokenizer import HubCodec, Preparer, TextCodec

if TYPE_CHECKING:
    from worker.engine.model import LoadedModel

MIB = 1024 * 1024
SAMPLE_BYTES = MIB
"""Read from each end of a weights file for its fingerprint: whole files of many GiB would delay each start."""


class RunningEngine(Protocol):
    """What the worker asks of an engine; any thread. ``steps``, ``layers`` and ``tokens`` only grow."""

    steps: int
    tokens: int

    @property
    def layers(self) -> int:
        """Attended so far, over all steps."""
        ...

    @property
    def step_seconds(self) -> deque[float]:
        """What each step took, oldest first; the reader takes them out."""
        ...

    def figures(self) -> EngineFigures: ...

    def run(self, stop: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Machinery:
    """All of it, ready to run. ``producer`` is the session thread's from here on, ``engine`` its builder's."""

    model: ModelInfo
    concurrency: int
    ring_bytes: int
    producer: Producer
    engine: RunningEngine
    preparer: Preparer


Finish = Callable[[Finished], None]
Admit = Callable[[Request], None]
Lost = Callable[[HaulierError], None]
"""Hears, on a thread of its own, that another rank of the engine ended, and why."""


def _unheard(failure: HaulierError) -> None:
    """For ``Lost`` where nobody serves: the engine's own thread raises it too."""


def build(
    settings: WorkerSettings, finish: Finish, admit: Admit, tell: Callable[[str], None], lost: Lost = _unheard
) -> Machinery:
    """Load the model and make ring and engine. Blocks for as long as that takes. Raises ``RefusedError``."""
    check_memory(settings, memory_bytes())
    return _echo(settings, finish, admit) if settings.echo else _real(settings, finish, admit, tell, lost)


def check_memory(settings: WorkerSettings, there: int) -> None:
    """Raise ``RefusedError`` when host pool and ring together, of all ranks, are more than ``there``, bytes of memory;
    0: not known.

    The system would promise them all the same, and end this process, or another, once they are written to.
    """
    ranks = settings.engine.tensor_parallel
    ring = settings.ring_mib * MIB * ranks
    staged = settings.engine.residency == "staged" and not settings.echo
    pool = int(settings.engine.host_pool_gib * GIB) * ranks if staged else 0
    if not there or ring + pool <= there:
        return
    asked = f"--ring-mib {settings.ring_mib}"
    asked = f"--host-pool-gib {settings.engine.host_pool_gib} and {asked}" if pool else asked
    asked += f", each for {ranks} ranks," if ranks > 1 else ""
    raise RefusedError(
        f"{asked} ask for {(ring + pool) / GIB:.3f} GiB of memory, this machine (or container) has "
        f"{there / GIB:.3f} GiB: lower {'--host-pool-gib' if pool > ring else '--ring-mib'}"
    )


def _echo(settings: WorkerSettings, finish: Finish, admit: Admit) -> Machinery:
    from worker.echo_engine import EchoCodec, EchoEngine

    producer = _ring(settings, None)
    wanted = settings.engine
    engine = EchoEngine(Consumer(producer), wanted.concurrency, settings.echo_delay_ms / 1000, finish, admit)
    return _machinery(settings, producer, engine, EchoCodec(), "echo", wanted.concurrency, ())


def _real(settings: WorkerSettings, finish: Finish, admit: Admit, tell: Callable[[str], None], lost: Lost) -> Machinery:
    from worker import model_store

    source = model_store.ensure(settings.engine.model, tell)
    from transformers.utils import logging as their_logging

    from worker.engine.runner import Engine, load

    quiet: Callable[[], None] = their_logging.disable_progress_bar  # bars would stand between our log lines
    quiet()

    folder = source if isinstance(source, Path) else None
    codec = HubCodec(source)
    engine: Engine
    if settings.engine.tensor_parallel > 1:
        from worker.engine.rank_group import LeadingEngine, RankGroup

        group = RankGroup(settings.engine, folder, settings.ring_mib * MIB, lost)
        with group.blamed():
            loaded = load(group.settings, folder, group.join)
            producer = _ring(settings, loaded)
            engine = LeadingEngine(loaded, producer, group, finish, admit)
    else:
        loaded = load(settings.engine, folder)
        producer = _ring(settings, loaded)
        engine = Engine(loaded, Consumer(producer), settings.engine, finish, admit)
    codec.make_guides(loaded.stop_ids)
    how = f"{loaded.dtype} {settings.engine.residency} {loaded.device.kind}"
    print_ = fingerprint(source, how + (f" x{loaded.ranks}" if loaded.ranks > 1 else ""))
    sharing = (settings.engine.page_tokens, engine.fit.short_rows) if engine.fit.longs else (0, 0)
    return _machinery(settings, producer, engine, codec, print_, engine.fit.concurrency, loaded.stop_ids, sharing)


def _machinery(
    settings: WorkerSettings,
    producer: Producer,
    engine: RunningEngine,
    codec: TextCodec,
    print_: str,
    concurrency: int,
    stop_ids: tuple[int, ...],
    sharing: tuple[int, int] = (0, 0),
) -> Machinery:
    """``sharing``: tokens of a page, and of each request's own part, as the engine has room for them."""
    name, context = settings.engine.model, settings.engine.context_tokens
    drafting, spread = settings.engine.draft_tokens > 0, settings.engine.tensor_parallel > 1
    ring_tokens = producer.memory.capacity_bytes // TOKEN_BYTES
    serving = Serving(name, context, codec.vocabulary, stop_ids, drafting, spread, ring_tokens)
    model = ModelInfo(name, print_, context)
    page, own_rows = sharing
    preparer = Preparer(
        codec, serving, f"fp_{print_[:16]}", SystemClock(), page, own_rows=own_rows, keeping=drafting or spread
    )
    return Machinery(model, concurrency, producer.memory.capacity_bytes, producer, engine, preparer)


def _ring(settings: WorkerSettings, loaded: LoadedModel | None) -> Producer:
    """A ring whose pages ``loaded``'s device reads; None without a model."""
    size = settings.ring_mib * MIB
    need = settings.engine.context_tokens * 4
    if need > size:
        raise RefusedError(
            f"a prompt of --context-tokens {settings.engine.context_tokens} takes {need} bytes of the ring, "
            f"--ring-mib {settings.ring_mib} holds {size}: set --ring-mib to {-(-need // MIB)} or more"
        )
    memory: RingMemory
    if loaded is None:
        memory = HostRingMemory(size, limits.RING_ENTRIES_COUNT)
    else:
        from worker.engine.local import ring_memory

        memory = ring_memory(loaded, size, limits.RING_ENTRIES_COUNT)
    return Producer(memory, Accounting(size, limits.RING_ENTRIES_COUNT), identity=_ref)


def _ref(item: Any) -> Any:
    return getattr(item, "ref", item)


def fingerprint(source: Path | str, how: str) -> str:
    """What decides an answer's bits: configuration, tokenizer and template whole, each weights file's size and ends,
    and ``how`` they are run. Of a hub id that is no folder here, its name.
    """
    digest = hashlib.sha256(how.encode())
    folder = Path(source)
    if not folder.is_dir():
        digest.update(str(source).encode())
        return digest.hexdigest()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if path.suffix in (".json", ".jinja", ".txt", ".model"):
                digest.update(file.read())
                continue
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
