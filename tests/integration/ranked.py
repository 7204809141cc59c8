"""A scenario on an engine over two ranks, in a process of its own: ``python -m tests.integration.ranked PLAN``.

PLAN is JSON: ``folder`` of the model, ``out``, ``settings`` of the engine, ``company`` and ``length`` of a cell,
``pages`` to retain (0: as the settings have it) and ``module``, what rank 1 runs. Writes each step's schedule and
logits, and the answers, to ``out``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch

from common.config import EngineSettings
from common.errors import HaulierError
from ring.accounting import Accounting
from ring.producer import Producer
from worker.engine import cells, engine, rank_group
from worker.engine.admission import PagePool
from worker.engine.callbacks import Watch
from worker.engine.local import RING_ENTRIES_COUNT, LocalEngine, ring_memory
from worker.engine.model import LoadedModel
from worker.engine.rank_group import LeadingEngine, RankGroup
from worker.engine.rank_messages import Begin
from worker.engine.retention import Retention
from worker.engine.runner import load
from worker.engine.transport import Quarantine

RING_BYTES = 1 << 20
PAGES = "HAULIER_TEST_PAGES"
REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 180.0


class RankedLocal(LocalEngine):
    """A local engine that is rank 0 of ``group``, stepped by hand: it says itself when a step begins."""

    def __init__(self, loaded: LoadedModel, group: RankGroup, watch: Watch | None) -> None:
        self.memory = ring_memory(loaded, RING_BYTES, RING_ENTRIES_COUNT)
        self.producer = Producer(
            self.memory, Accounting(RING_BYTES, RING_ENTRIES_COUNT), identity=lambda item: getattr(item, "ref", item)
        )
        self.finished, self.admitted = {}, []
        self.group = group
        self.engine = LeadingEngine(loaded, self.producer, group, self._finish, self.admitted.append, watch=watch)
        self._numbers, self._keeping = count(), True

    def step(self) -> bool:
        for link in self.group.links:
            link.send(Begin(False))
        return super().step()

    def close(self) -> Quarantine:
        for link in self.group.links:
            link.send(Begin(True))
        return super().close()


def in_part(pages: int, page_rows: int) -> None:
    """Engines made from here on keep history in so few device pages: what settings can say is never so little."""
    engine.retention_of = lambda fit, settings: Retention(PagePool(pages), page_rows)


def ranked(
    asked: EngineSettings, out: Path, company: str, pages: int = 0, **odd: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Play a long cell in a process of its own, ``odd`` in the environment of an odd rank 1: that process, and what it
    wrote, None if nothing."""
    plan = {
        "folder": asked.model, "out": str(out), "settings": asdict(asked), "company": company, "length": "long",
        "pages": pages,
    }  # fmt: skip
    if odd:
        plan["module"] = "tests.integration.odd_rank"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.ranked", json.dumps(plan)], cwd=REPOSITORY, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **odd}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return ended, torch.load(out, weights_only=True) if out.exists() else None


def main(plan: dict[str, Any]) -> None:
    rank_group.MODULE = plan.get("module", rank_group.MODULE)
    settings, folder = EngineSettings(**plan["settings"]), Path(plan["folder"])
    if plan["pages"]:
        os.environ[PAGES], rank_group.MODULE = str(plan["pages"]), "tests.integration.odd_rank"
        in_part(plan["pages"], settings.page_tokens)
    group = RankGroup(settings, folder, RING_BYTES, lambda failure: None)
    with group.blamed():
        loaded = load(group.settings, folder, group.join)
        cells.LocalEngine = lambda loaded, settings, ring_bytes, watch: RankedLocal(loaded, group, watch)  # type: ignore[assignment, misc]
        script = cells.scenario(plan["company"], plan["length"], settings.page_tokens)
        outcome = cells.play(loaded, settings, script)
    codes = [process.wait(60) for process in group.processes]
    ran = outcome.local.engine
    figures = outcome.local.producer.figures()
    told = {
        "steps": outcome.steps,
        "answers": {number: list(one.token_ids) for number, one in outcome.finished.items()},
        "reasons": {number: one.reason for number, one in outcome.finished.items()},
        "hit_bytes": ran.hit_bytes,
        "staged_bytes": ran.transport.bytes_in,
        "spared_bytes": ran.spared_bytes,
        "codes": codes,
        "ring": (figures.taken, figures.returned),
    }
    torch.save(told, plan["out"])


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except HaulierError as failure:
        print(f"haulier: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
