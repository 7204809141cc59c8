"""The fleet from Python: what people do in a notebook, over a scripted broker that can be killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker import api
from common import messages
from common.errors import RefusedError, UsageError

LINES = [api.chat(name, f"say {name}", "m") for name in ("a", "b", "c")]


@pytest.fixture
def fleet(scripted: Any) -> Any:
    with api.connect(scripted.endpoint, insecure=True) as made:
        yield made


def answer(name: str, words: str) -> bytes:
    body = {"choices": [{"message": {"content": words}}]}
    return json.dumps({"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}).encode()


def test_three_lines_from_questions_to_answers(scripted: Any, fleet: Any) -> None:
    """Lines as values or in a file; answers as they come, a broker killed in the middle included."""

    def runs(job: Any) -> None:
        job.status = "in_progress"
        job.asked += 1

    scripted.on_status = runs
    job = fleet.submit(LINES, "mine", priority=2, window="1h")
    kept = scripted.jobs[job.id]
    assert [json.loads(line)["custom_id"] for line in bytes(kept.data).splitlines()] == ["a", "b", "c"]
    assert (kept.order.name, kept.order.priority, kept.order.window_s) == ("mine", 2, 3600)
    kept.output = [answer("b", "B")]
    coming = job.output()
    assert api.text(next(coming)) == "B"
    scripted.kill_at(1)
    kept.output += [answer("a", "A"), answer("c", "C")]
    kept.status, scripted.on_status = "completed", lambda job: None
    assert [line["custom_id"] for line in coming] == ["a", "c"]
    assert list(job.errors()) == []
    assert job.wait().status == "completed"
    assert "completed" in repr(job)
    assert fleet.job(job.id.upper()).info().job == job.id
    assert [one.job for one in fleet.jobs()] == [job.id]


def test_a_file_with_bad_lines_says_which(scripted: Any, fleet: Any, tmp_path: Path) -> None:
    """The first of them, in the error itself. Control: none is raised for good ones."""
    (tmp_path / "in.jsonl").write_text("{}\n" * 9)
    problems = tuple(messages.Problem(n, "missing_custom_id", "no custom_id") for n in range(1, 10))

    def fails(job: Any) -> None:
        job.status, job.problems = "failed", problems

    scripted.on_status = fails
    with pytest.raises(RefusedError, match=r"line 1: missing_custom_id.*line 5") as refused:
        fleet.submit(tmp_path / "in.jsonl")
    assert "line 6" not in str(refused.value)
    scripted.on_status = lambda job: setattr(job, "status", "completed")
    assert fleet.submit(str(tmp_path / "in.jsonl")).info().status == "completed"


def test_where_it_is_comes_from_the_environment_too(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the command line; without either it says which."""
    with pytest.raises(UsageError, match="HAULIER_BROKER"):
        api.connect(insecure=True)
    with pytest.raises(UsageError, match="HAULIER_KEYS"):
        api.connect(scripted.endpoint)
    monkeypatch.setenv("HAULIER_BROKER", scripted.endpoint)
    with api.connect(insecure=True) as fleet:
        assert fleet.workers() == ()


def test_a_line_that_failed_has_no_text() -> None:
    """Its error is what is raised. Control: completions have one too."""
    assert api.text({"response": {"body": {"choices": [{"text": "t"}]}}}) == "t"
    died = {"code": "worker_died"}
    for fields in ({"response": None, "error": died}, {"response": {"body": {"error": died}}, "error": None}):
        line = {"custom_id": "x", **fields}
        with pytest.raises(ValueError, match=r"x has no answer.*worker_died"):
            api.text(line)
