"""One model over two real ranks on the CPU (gloo): the text of one rank, the bits of its own reference, and no hang
when a rank is killed or goes astray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from common import messages
from common.config import EngineSettings
from tests.integration import test_failing_device as small
from tests.integration.odd_rank import STEP
from tests.integration.ranked import ranked
from tests.integration.test_worker_process import DEADLINE_S, Fleet
from tests.unit.worker.engine import rigs
from worker.engine import cells
from worker.engine.model import from_folder
from worker.engine.virtual_device import VirtualDevice

CHURN, SHARING = cells.COMPANIES[2:]
PAGES = {CHURN: cells.PART_PAGES, SHARING: cells.SHARED_PART_PAGES}
"""Of the route in part: what ``cells.in_part`` keeps."""


def model(folder: Path, model_type: str) -> Path:
    """A random model that two ranks can share; qwen3 has norms of each head, and here its head is its embedding."""
    tied = model_type == "qwen3"
    return rigs.saved(folder / "model", model_type, vocab_size=rigs.VOCABULARY + 1, tie_word_embeddings=tied)


def settings(folder: Path, route: str | None) -> EngineSettings:
    """As the cells have them; pools that hold a whole model's history hold a rank's."""
    whole = from_folder(folder, VirtualDevice(), "float32", rigs.CONTEXT).geometry
    return cells.cell_settings(whole, rigs.settings(model=str(folder)), route)


def alone(folder: Path, company: str) -> cells.Outcome:
    """The same cell on one rank, streamed."""
    loaded = from_folder(folder, VirtualDevice(), "float32", rigs.CONTEXT)
    asked = settings(folder, "streamed")
    return cells.play(loaded, asked, cells.scenario(company, "long", asked.page_tokens))


@pytest.mark.parametrize(("model_type", "company"), [("llama", CHURN), ("qwen3", SHARING)])
def test_two_ranks_give_the_text_of_one_and_the_bits_of_their_reference(
    tmp_path: Path, model_type: str, company: str
) -> None:
    """Staged history, each rank its heads': every schedule is one rank's, every token too, logits up to the order of a
    sum; against two ranks with everything resident every bit. All of the ring is given back, both ranks end well."""
    folder = model(tmp_path, model_type)
    one = alone(folder, company)
    found = {}
    for route in ("streamed", "retained in part", None):
        asked = replace(settings(folder, route), tensor_parallel=2)
        pages = PAGES[company] if route == "retained in part" else 0
        ended, found[route] = ranked(asked, tmp_path / f"{route}.pt", company, pages)
        assert ended.returncode == 0, ended.stderr[-2000:]
    reference = found[None]
    assert reference["staged_bytes"] == 0 < found["streamed"]["staged_bytes"]
    assert found["retained in part"]["hit_bytes"] > 0 < found["retained in part"]["staged_bytes"]
    assert (found["streamed"]["spared_bytes"] > 0) == (company == SHARING)
    for told in found.values():
        assert told["codes"] == [0]
        assert told["ring"][0] == told["ring"][1]
        assert [plan for plan, _ in told["steps"]] == [plan for plan, _ in one.steps]
        assert told["answers"] == {number: list(said.token_ids) for number, said in one.finished.items()}
        assert told["reasons"] == {number: said.reason for number, said in one.finished.items()}
        for (_, logits), (_, theirs), (_, resident) in zip(told["steps"], one.steps, reference["steps"], strict=True):
            assert torch.allclose(logits, theirs, rtol=1e-4, atol=1e-4)
            assert torch.equal(logits, resident)


def test_a_rank_that_samples_another_token_ends_the_engine_before_any_answer_has_it(tmp_path: Path) -> None:
    """Each step's rows and tokens are compared before anything is made of them: which rank was right nobody knows."""
    asked = replace(settings(model(tmp_path, "llama"), "streamed"), tensor_parallel=2)
    ended, told = ranked(asked, tmp_path / "out.pt", CHURN, **{STEP: "6"})
    assert (ended.returncode, told) == (70, None)
    assert "rank 1 (cpu) has Landed(step=" in ended.stderr
    assert "neither can be trusted" in ended.stderr
    ended, told = ranked(asked, tmp_path / "out.pt", CHURN, **{STEP: "1000"})  # control: the same, and right
    assert (ended.returncode, told["codes"]) == (0, [0]), ended.stderr[-2000:]


# -- a fleet ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    context: zmq.Context[Any] = zmq.Context()
    made = Fleet(tmp_path, context)
    yield made
    made.close()
    context.destroy(0)


def worker(fleet: Fleet, name: str, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return small.spawn(fleet, name, folder, "-m", "worker", *more)


def logged(fleet: Fleet, name: str, event: str) -> list[dict[str, Any]]:
    """Lines of a worker's log, its ranks' among them, that tell of one event."""
    lines = [json.loads(line) for line in fleet.log(name).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def texts(fleet: Fleet, job: str) -> dict[str, str]:
    page = fleet.ask(messages.Fetch(5, job, "output", 0), messages.Lines)
    lines = [json.loads(line) for line in page.lines]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


def test_a_killed_rank_ends_its_worker_with_the_reason_and_the_next_one_finishes_the_job(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it in a collective: the process ends, and its session with it. A worker of two ranks that is
    started again answers every line once, with the words of a worker of one. Neither leaves a rank behind, killed or
    drained."""
    monkeypatch.setattr(small, "LINES", 36)
    monkeypatch.setattr(small, "TOKENS", 24)
    folder = small.model_folder(fleet.folder / "model")
    fleet.broker()
    spread = ("--tensor-parallel", "2")
    first = worker(fleet, "first", folder, *spread)
    job = small.submit(fleet, folder)
    fleet.until(lambda: fleet.status(job).completed >= 1, "a line is answered", 2 * DEADLINE_S)
    (rank,) = logged(fleet, "first", "rank_started")
    os.kill(rank["process"], signal.SIGKILL)
    assert first.wait(DEADLINE_S) == 70
    assert "rank 1 (cpu) was killed by signal 9" in fleet.log("first")
    assert fleet.status(job).completed < small.LINES

    second = worker(fleet, "second", folder, *spread)
    fleet.until(lambda: fleet.status(job).status == "completed", "the job ends", 2 * DEADLINE_S)
    assert fleet.status(job).completed == small.LINES
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE_S) == 0
    (rank,) = logged(fleet, "second", "rank_started")
    fleet.until(lambda: not alive(rank["process"]), "rank 1 is gone")

    worker(fleet, "third", folder)
    control = small.submit(fleet, folder)
    fleet.until(lambda: fleet.status(control).status == "completed", "the other job ends", 2 * DEADLINE_S)
    assert texts(fleet, job) == texts(fleet, control)
    assert len(texts(fleet, job)) == small.LINES


def test_a_worker_that_is_killed_takes_its_ranks_with_it(fleet: Fleet) -> None:
    """Rank 1 has nobody to serve: it ends by itself, soon."""
    folder = small.model_folder(fleet.folder / "model")
    fleet.broker()
    process = worker(fleet, "worker", folder, "--tensor-parallel", "2")
    fleet.until(lambda: bool(logged(fleet, "worker", "model_ready")), "the model is loaded", 2 * DEADLINE_S)
    (rank,) = logged(fleet, "worker", "rank_started")
    assert alive(rank["process"])
    process.kill()
    fleet.until(lambda: not alive(rank["process"]), "rank 1 is gone")


def test_what_cannot_be_spread_is_refused_by_name(fleet: Fleet) -> None:
    """Both ranks say so, the worker ends with it, and no rank stays."""
    folder = small.model_folder(fleet.folder / "model")
    fleet.broker()
    process = worker(fleet, "worker", folder, "--tensor-parallel", "3")
    assert process.wait(2 * DEADLINE_S) == 4
    assert "--tensor-parallel 3: the model's 4 query heads cannot be split evenly over 3 ranks" in fleet.log("worker")
    for rank in logged(fleet, "worker", "rank_started"):
        fleet.until(lambda process=rank["process"]: not alive(process), "the rank is gone")  # type: ignore[misc]
