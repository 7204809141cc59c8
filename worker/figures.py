"""shell: what a worker measures of itself: figures for the session's beats, metrics, and the ring's named finding (R6).

Decides nothing; the books of ring, engine and outbox are read here. Belongs to the session's thread.
"""

from __future__ import annotations

import dataclasses

from common import limits, log
from common.messages import EngineReport, RingReport
from common.metrics import Metrics
from worker.inputs import Snapshot
from worker.machinery import Machinery
from worker.outbox import Outbox, OutboxBlocked
from worker.session import Session
from worker.structures import HeldUp

LOOK_EVERY_S = 0.5
"""The ring's books are summed up and audited this often: beats carry figures of the last half second."""
TIDY_EVERY_S = 60.0
_REPORTED = tuple(field.name for field in dataclasses.fields(RingReport))


class Figures:
    """The last look at everything."""

    def __init__(self, metrics: Metrics, outbox: Outbox, session: Session) -> None:
        self._metrics = metrics
        self._outbox = outbox
        self._session = session
        self._log = log.get("worker")
        self._ring, self._engine = RingReport(), EngineReport()
        self._held_up: HeldUp | None = None
        self._look_at = 0.0
        self._tidy_at = 0.0

    def snapshot(self, built: Machinery | None) -> Snapshot:
        """What the session's rules see. Cheap: once a turn."""
        if built is None:
            return Snapshot()
        entries, size = built.producer.credit()
        engine = built.engine
        return Snapshot(self._ring, entries, size, engine.steps, engine.layers, engine.tokens, self._held_up,
                        self._engine)  # fmt: skip

    def look(self, built: Machinery, now: float) -> None:
        """Sum up, audit and export, if it is time."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        books = built.producer.figures()
        self._ring = RingReport(*(getattr(books, name) for name in _REPORTED))
        self._find(built, now)
        self._export(built)
        self._export_engine(built)
        self._tidy(now)

    def _find(self, built: Machinery, now: float) -> None:
        """R6: full with nothing in it, for longer than a result is on its way. An engine in a long step is not idle."""
        asleep = built.producer.handover.sleeping
        idle = asleep and self._session.watch.idle_s(now) >= limits.BEAT_S
        waiting = self._session.work.lines.waiting_for_ring
        finding = built.producer.stuck(now, engine_idle=idle, waiting_items=waiting)
        if finding is not None:
            self._metrics.ring_stuck.inc()
            self._log.error("ring_stuck", finding=finding.line(), holders=[one.by for one in finding.holders])

    def _export(self, built: Machinery) -> None:
        ring, out, counts = self._ring, self._metrics, self._session.counts
        out.advance(out.ring_taken_bytes, ring.taken)
        out.advance(out.ring_returned_bytes, ring.returned)
        out.ring_live_bytes.set(ring.live)
        out.ring_padding_live_bytes.set(ring.padding_live)
        out.ring_tokens_pending.set(ring.tokens_pending)
        out.ring_items_unresolved.set(ring.items_unresolved)
        out.advance(out.reconnects, max(0, counts["logins"] - 1))
        out.advance(out.messages_dropped.labels(reason="stale_fence"), counts["stale"])
        out.advance(out.messages_dropped.labels(reason="duplicate_line"), counts["duplicate"])
        out.sessions.labels(worker=self._session.identity.worker).set(self._session.fence is not None)
        out.outbox_lines.set(self._session.work.lines.kept)
        out.wal_bytes.labels(store="outbox").set(self._outbox.wal_bytes)

    def _export_engine(self, built: Machinery) -> None:
        out, engine = self._metrics, built.engine.figures()
        self._held_up = engine.held_up
        self._engine = EngineReport(
            engine.contexts_running, engine.contexts_waiting, engine.pages_held, engine.pages_free,
            engine.headroom_held_bytes, engine.headroom_bytes, engine.staged_bytes, engine.link_bytes_s,
        )  # fmt: skip
        out.link_bytes_per_second.set(engine.link_bytes_s)
        out.advance(out.tokens_generated, engine.tokens)
        out.advance(out.staged_bytes, engine.staged_bytes)
        out.advance(out.written_back_bytes, engine.written_back_bytes)
        out.contexts.labels(state="running").set(engine.contexts_running)
        out.contexts.labels(state="waiting").set(engine.contexts_waiting)
        out.leases_open.set(engine.leases_open)
        out.events_held.set(engine.events_held)
        for reason, count in engine.waits:
            out.advance(out.admission_waits.labels(reason=reason), count)
        out.advance(out.retained_hit_bytes, engine.hit_bytes)
        out.advance(out.headroom_hit_bytes, engine.headroom_hit_bytes)
        out.headroom_bytes.labels(state="held").set(engine.headroom_held_bytes)
        out.headroom_bytes.labels(state="free").set(engine.headroom_bytes - engine.headroom_held_bytes)
        for reason, count in engine.headroom_moved:
            out.advance(out.headroom_pages_moved.labels(reason=reason), count)
        out.advance(out.decode_seconds.labels(which="predicted"), engine.predicted_s)
        out.advance(out.decode_seconds.labels(which="measured"), engine.measured_s)
        out.shared_histories.set(engine.shared_histories)
        out.sharing.set(engine.sharing)
        out.advance(out.spared_bytes, engine.spared_bytes)
        out.advance(out.draft_stages, engine.draft_stages)
        out.advance(out.draft_tokens.labels(which="proposed"), engine.drafts_proposed)
        out.advance(out.draft_tokens.labels(which="taken"), engine.drafts_taken)
        out.device_pages.labels(state="held").set(engine.pages_held)
        out.device_pages.labels(state="free").set(engine.pages_free)
        for reason, count in engine.pages_moved:
            out.advance(out.device_pages_moved.labels(reason=reason), count)
        times = built.engine.step_seconds
        while times:
            out.step_seconds.observe(times.popleft())

    def _tidy(self, now: float) -> None:
        if now < self._tidy_at or self._session.work.lines.unfinished:
            return
        self._tidy_at = now + TIDY_EVERY_S
        try:
            self._outbox.tidy()
        except OutboxBlocked as failure:  # the next commit will say so too, and there it matters
            self._log.warning("outbox_not_tidied", reason=str(failure))
