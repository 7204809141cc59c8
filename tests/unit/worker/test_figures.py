"""A worker's figures: the ring's books in every beat, the metrics by name, and the stuck ring named (R4, R6, S3)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import limits
from common import messages as wire
from common.config import EngineSettings, KeySettings, WorkerSettings
from common.messages import EngineReport, LineRef
from common.metrics import Metrics
from worker import machinery
from worker.figures import LOOK_EVERY_S, Figures
from worker.outbox import Outbox
from worker.structures import EngineFigures, HeldUp, Request, Sampling


class Table:
    def __init__(self, folder: Path, rig: Any) -> None:
        engine = EngineSettings("m", context_tokens=100)
        how = WorkerSettings(("tcp://a:1",), folder, KeySettings(insecure=True), engine, ring_mib=1, echo=True)
        self.built = machinery.build(how, lambda _: None, lambda _: None, lambda _: None)
        self.metrics = Metrics()
        self.outbox = Outbox(folder)
        self.rig = rig
        self.figures = Figures(self.metrics, self.outbox, rig.session)

    def publish(self) -> None:
        request = Request(LineRef("job", 0, 1), "/v1/completions", "m", 3, Sampling(1))
        assert self.built.producer.publish("b", [(request, array("i", [1, 2, 3]))]) is not None

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"haulier_{name}", labels)
        assert found is not None, name
        return found


@pytest.fixture
def table(tmp_path: Path, rig: Any) -> Iterator[Table]:
    made = Table(tmp_path, rig)
    yield made
    made.outbox.close()


def test_beats_and_metrics_show_the_rings_books(table: Table) -> None:
    """R4: what is taken, live and pending, as an operator and the broker see it."""
    table.publish()
    table.figures.look(table.built, 100.0)
    ring = table.figures.snapshot(table.built).ring
    assert (ring.capacity, ring.live, ring.tokens_pending, ring.items_unresolved) == (1 << 20, 64, 3, 1)
    assert table.value("ring_taken_bytes_total") == 64
    assert table.value("ring_items_unresolved") == 1
    assert table.value("sessions", worker="w") == 0
    table.rig.up()
    table.figures.look(table.built, 100.0 + LOOK_EVERY_S)
    assert table.value("sessions", worker="w") == 1


def test_a_worker_without_a_model_has_nothing_to_give() -> None:
    """While it loads."""
    assert Figures(Metrics(), None, None).snapshot(None).free_entries == 0  # type: ignore[arg-type]


def test_the_engines_own_figures_are_metrics(table: Table) -> None:
    """In life: bytes over the link, leases and events in use, waits by reason, step times: what says why it is slow."""
    engine = table.built.engine
    engine.step_seconds.extend([0.004, 0.02])
    engine.figures = lambda: EngineFigures(  # type: ignore[method-assign]
        5, 7, 1_000, 10, 3, 2, 4, 6, (("segments", 9),), 70, 6, 2, (("free page", 5),), 1.5, 1.25,
        90, 30, 100, (("page kept in headroom", 8),), held_up=HeldUp(LineRef("job", 1, 1), "segments: all owned"),
        link_bytes_s=2e9,
    )  # fmt: skip
    assert table.figures.snapshot(table.built).held_up is None
    for now in (100.0, 100.0 + LOOK_EVERY_S):
        table.figures.look(table.built, now)
    assert table.figures.snapshot(table.built).held_up == (LineRef("job", 1, 1), "segments: all owned")
    assert table.figures.snapshot(table.built).engine == EngineReport(4, 6, 6, 2, 30, 100, 1_000, 2e9)
    assert table.value("link_bytes_per_second") == 2e9
    found = [
        table.value(name)
        for name in ("tokens_generated_total", "staged_bytes_total", "written_back_bytes_total", "step_seconds_count")
    ]
    assert found == [7, 1_000, 10, 2]
    assert (table.value("leases_open"), table.value("events_held")) == (2, 3)
    assert (table.value("contexts", state="running"), table.value("contexts", state="waiting")) == (4, 6)
    assert table.value("admission_waits_total", reason="segments") == 9
    assert table.value("decode_seconds_total", which="predicted") == 1.5
    assert table.value("decode_seconds_total", which="measured") == 1.25
    assert table.value("retained_hit_bytes_total") == 70
    assert table.value("headroom_hit_bytes_total") == 90
    assert (table.value("headroom_bytes", state="held"), table.value("headroom_bytes", state="free")) == (30, 70)
    assert table.value("headroom_pages_moved_total", reason="page kept in headroom") == 8
    assert (table.value("device_pages", state="held"), table.value("device_pages", state="free")) == (6, 2)
    assert table.value("device_pages_moved_total", reason="free page") == 5


def test_a_ring_full_of_nothing_is_named_once(table: Table, line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: items unresolved, no tokens pending, engine idle, for longer than any result is on its way."""
    rig = table.rig
    rig.up()
    rig.batch(line(0))
    rig.run(line(0))
    table.built.producer.accounting.take(0, tokens=0, items=1)
    now = rig.now
    for asleep, found in ((False, 0), (True, 1)):  # an engine in a long step, then one that sleeps on the ring
        table.built.producer.handover.sleeping = asleep
        for _ in range(int(limits.RING_STUCK_S + limits.BEAT_S) + 3):
            rig.tick(1.0, steps=5)
            if rig.session.fence is not None:
                rig.hear(wire.BrokerBeat(rig.fence))
            now += 1.0
            table.figures.look(table.built, now)
        assert table.value("ring_stuck_total") == found
    said = capsys.readouterr()
    assert "held by #1 0+0 B by the ring: published, not taken by the engine" in said.out + said.err
    rig.tick(1.0, steps=6)
    table.figures.look(table.built, now + 1)
    assert table.value("ring_stuck_total") == 1
