"""shell: what an engine tells about itself, read as it stands. Changes nothing; any thread may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.engine.admission import PagePool
from worker.structures import EngineFigures

if TYPE_CHECKING:
    from worker.engine.engine import Engine


def figures_of(engine: Engine) -> EngineFigures:
    """Counts since the start, and what is held now; bytes, pages, seconds."""
    transport, scheduler = engine.transport, engine.scheduler
    pool = scheduler.kept.retention.pool if scheduler.kept.retention is not None else PagePool(0)
    return EngineFigures(
        engine.steps, engine.tokens, transport.bytes_in, transport.bytes_back, engine.device.events_held,
        transport.book.began - transport.book.retired, len(scheduler.running), len(scheduler.waiting),
        tuple(scheduler.waits.copy().items()), engine.hit_bytes, pool.capacity - pool.free, pool.free,
        tuple((reason.value, pages) for reason, pages in pool.moved.copy().items()),
        engine.turns.predicted_s, engine.turns.measured_s, engine.headroom_bytes, *engine.headroom.figures(),
        len(scheduler.shared), scheduler.shared.members, engine.spared_bytes,
        *(engine.drafts.counts if engine.drafts is not None else (0, 0, 0)), scheduler.held_up,
        engine.turns.rates.link_bytes_s if engine.device.kind == "cuda" and engine.host is not None else 0.0,
    )  # fmt: skip
