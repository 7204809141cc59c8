"""shell: ``haulier selfcheck``: what must hold on this machine before it is trusted, as a table of pass and fail.

Storage, ring, event pool, every ordering edge with its control, and bits of staged against resident attention, each on
the device asked for. A check that raises has failed; nothing is skipped silently. Knows no command line.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.database import filesystem, open_database, transaction
from common.errors import InvariantError
from common.folders import made
from common.limits import RING_ENTRIES_COUNT
from ring.accounting import Accounting
from ring.bench import stall
from ring.consumer import Consumer
from ring.memory import CONSUMED, HostRingMemory, RingMemory
from ring.producer import Producer

COMMITS_COUNT = 32
RING_BYTES, RING_ROUNDS_COUNT, BATCH_TOKENS = 64 * 1024, 500, 512


@dataclass(frozen=True, slots=True)
class Check:
    """How one check ended."""

    name: str
    passed: bool
    detail: str
    seconds: float


def run(device: str, state: Path | None = None) -> Iterator[Check]:
    """Each check as it ends. Raises ``RefusedError`` when there is no such device, or ``--state`` cannot be made."""
    from worker.engine import race_checks, self_checks
    from worker.engine.staged_program import EDGES

    make = race_checks.maker(device)
    index = int(device.partition(":")[2] or 0) if device != "cpu" else None
    yield _checked("storage", lambda: storage(state))
    yield _checked("ring without its padding field stalls, with it never", stall_control)
    yield _checked("ring doorbell and consumed word", lambda: doorbell(index))
    yield _checked("event pool", lambda: self_checks.event_pool(make))
    for edge in EDGES:
        yield _checked(f"edge: {edge.value}", lambda edge=edge: race_checks.edge(make, edge))  # type: ignore[misc]
    yield _checked("edge: copies before their host page gets a new owner", lambda: race_checks.page_reuse(make))
    yield _checked("edge: copies before their step table is written again", lambda: race_checks.table_reuse(make))
    for head_dim in self_checks.HEAD_DIMS:
        yield _checked(
            f"bits, streamed route, heads of {head_dim}",
            lambda head_dim=head_dim: self_checks.bits(make, head_dim),  # type: ignore[misc]
        )


def _checked(name: str, check: Callable[[], str]) -> Check:
    began = time.monotonic()
    try:
        passed, detail = True, check()
    except Exception as failure:  # noqa: BLE001 - whatever a check raises is its result: a fail with these words
        passed, detail = False, f"{type(failure).__name__}: {failure}"
    return Check(name, passed, detail, round(time.monotonic() - began, 2))


def storage(state: Path | None) -> str:
    """D6: SQLite as the outbox opens it, in ``state`` (or a temporary folder), and what a synced commit costs."""
    with tempfile.TemporaryDirectory(
        prefix="haulier-selfcheck-", dir=state if state is None else made(state, "the self-check")
    ) as folder:
        path = Path(folder) / "selfcheck.db"
        database = open_database(path, (), "the self-check's database")
        try:
            with transaction(database) as connection:
                connection.execute("CREATE TABLE written (number INTEGER PRIMARY KEY, body BLOB) STRICT")
            took = []
            for number in range(COMMITS_COUNT):
                began = time.perf_counter()
                with transaction(database) as connection:
                    connection.execute("INSERT INTO written VALUES (?, ?)", (number, bytes(1024)))
                took.append(1000 * (time.perf_counter() - began))
            (count,) = database.conn.execute("SELECT count(*) FROM written").fetchone()
        finally:
            database.conn.close()
        if count != COMMITS_COUNT:
            raise InvariantError(f"{count} of {COMMITS_COUNT} commits read back")
        kind = filesystem(Path(folder)) or "an unknown file system"
        note = " (memory: gone with the machine)" if kind in ("tmpfs", "ramfs") else ""
        return f"{kind}{note}, {statistics.median(took):.2f} ms a synced commit, {max(took):.2f} ms at most"


def stall_control() -> str:
    """R3, R6: without the padding field the published failure appears, after the wraps that arithmetic predicts."""
    found = stall()
    if not found["stalled"] or found["wraps"] != found["predicted_wraps"]:
        raise InvariantError(f"the control does not stall as predicted: {found}")
    if found["with_padding_stalled"]:
        raise InvariantError(f"the ring itself stalls: {found}")
    return f"stalled after {found['wraps']} wraps as predicted, {found['items_unresolved']} items unresolved"


def doorbell(index: int | None) -> str:
    """R1-R3: ids published later are read in place by what waited for their doorbell, over many wraps; every byte comes
    back through the consumed word. ``index`` is the GPU's, None for the CPU."""
    if index is None:
        return _rounds(HostRingMemory(RING_BYTES, RING_ENTRIES_COUNT), None)
    import torch

    from ring.cuda_memory import CudaRingMemory

    memory = CudaRingMemory(RING_BYTES, RING_ENTRIES_COUNT, device=index)
    try:
        with torch.cuda.device(index):
            return _rounds(memory, torch.cuda.Stream(index))  # type: ignore[no-untyped-call] # torch ships no type
    finally:
        torch.cuda.synchronize(index)
        memory.close()


def _rounds(memory: RingMemory, stream: Any) -> str:
    """On a GPU the stream waits first and the batch comes after; a processor cannot wait for what is not there."""
    import torch

    producer = Producer(memory, Accounting(memory.capacity_bytes, memory.entries))
    consumer, view = Consumer(producer), memory.payload_device_view()
    row = torch.zeros(BATCH_TOKENS, dtype=torch.int32, device=view.device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(view.device))
    for number in range(RING_ROUNDS_COUNT):
        tokens = BATCH_TOKENS - 16 * (number % 7)
        value = producer.accounting.next_sequence
        placement = producer.accounting.fit(-(-tokens * 4 // 64) * 64)
        if placement is None:
            raise InvariantError(f"round {number}: an empty ring refused a batch")
        start = placement.position % memory.capacity_bytes // 4
        if stream is not None:
            memory.wait_doorbell(stream.cuda_stream, value)
            with torch.cuda.stream(stream):
                row[:tokens].copy_(view[start : start + tokens])
            memory.write_consumed(stream.cuda_stream, value)
            if memory.words[CONSUMED] == value:
                raise InvariantError(f"round {number}: the device did not wait for the doorbell")
        if producer.publish("selfcheck", [(number, array("i", [number]) * tokens)]) is None:
            raise InvariantError(f"round {number}: an empty ring refused a batch")
        for entry in consumer.take():
            if stream is None:
                consumer.await_doorbell(None, entry)
                row[:tokens].copy_(view[start : start + tokens])
                consumer.release(entry, None)
        if stream is not None:
            stream.synchronize()
        producer.resolve(producer.poll())
        if not bool((row[:tokens] == number).all()):
            raise InvariantError(f"round {number}: the device read other ids than were published")
    figures = producer.figures()
    if figures.live or figures.items_unresolved or not figures.wraps:
        raise InvariantError(f"the ring does not end empty: {figures}")
    return f"{RING_ROUNDS_COUNT} batches read in place, {figures.wraps} wraps, every byte returned"
