"""The official ``openai`` client, unmodified, against a real broker: everything it does with files and batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from common import messages
from tests.integration.fleet_kit import DEADLINE_S, Fleet, chat
from tests.integration.http_kit import KEYS, Web, answers, create, jsonl, last_line, lines_of, root, said, upload


@pytest.fixture
def web(fleet: Fleet) -> Iterator[Web]:
    made = Web(fleet)
    yield made
    made.close()


def test_upload_create_poll_download(web: Web) -> None:
    """A script for the public service, with another base URL. The job is the fleet's: haulier status knows it."""
    web.broker()
    web.fleet.worker(delay_ms=1)
    alice = web.client()
    file = upload(alice, jsonl([*(chat(number) for number in range(30)), chat(30, n=7)]))
    batch = create(alice, file, metadata={"run": "7"})
    assert (batch.status, batch.input_file_id, batch.metadata) == ("validating", file, {"run": "7"})
    batch = web.ended(alice, batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed + counts.failed) == ("completed", 31, 31)
    good, failed = lines_of(alice, batch.output_file_id), lines_of(alice, batch.error_file_id)
    assert (len(good), len(failed)) == (counts.completed, counts.failed)
    assert answers(good).items() >= said(30).items()
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert all(times)
    assert batch.expires_at == pytest.approx(batch.created_at + 24 * 3600, abs=2)
    assert (batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at, batch.errors) == (None,) * 5
    output = alice.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.bytes) == ("batch_output", len(alice.files.content(output.id).content))
    assert alice.files.content(file).content == jsonl([*(chat(number) for number in range(30)), chat(30, n=7)])
    job = web.fleet.status(f"{batch.id[6:14]}-{batch.id[14:18]}-{batch.id[18:22]}-{batch.id[22:26]}-{batch.id[26:]}")
    assert (job.status, job.name, job.completed) == ("completed", "in.jsonl", counts.completed)
    assert [model.id for model in alice.models.list()] == ["echo"]


def test_the_example_ends_as_haulier_run_does(web: Web) -> None:
    """docs/examples/openai_client.py: the same last line, and the same answers."""
    source, folder = web.fleet.folder / "in.jsonl", web.fleet.folder
    source.write_bytes(jsonl(12))
    web.broker()
    web.fleet.worker(delay_ms=1)
    environment = {**os.environ, "OPENAI_API_KEY": KEYS["alice"], "PYTHONPATH": str(root())}
    over_http = subprocess.run(
        [sys.executable, str(root() / "docs/examples/openai_client.py"), str(source), str(folder / "http.jsonl"),
         f"http://{web.address}/v1"],
        capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert over_http.returncode == 0, over_http.stderr
    run = subprocess.run(
        [sys.executable, "-m", "common.cli", "run", "-i", str(source), "-o", str(folder / "run.jsonl"), "--model",
         "echo", "--echo"],
        capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False, cwd=folder,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert last_line(over_http.stderr) == last_line(run.stderr)
    both = [
        answers([json.loads(line) for line in (folder / name).read_bytes().splitlines()])
        for name in ("http.jsonl", "run.jsonl")
    ]
    assert both[0] == both[1] == said(12)


def test_bad_lines_fail_the_batch_and_are_listed(web: Web) -> None:
    """Not JSONL, a line of another endpoint: every one by number and code, nothing runs."""
    web.broker()
    alice = web.client()
    batch = create(alice, upload(alice, jsonl(1) + b"not json\n" + jsonl([{**chat(2), "url": "/v1/completions"}])))
    batch = web.ended(alice, batch.id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.line, one.code) for one in batch.errors.data] == [(2, "invalid_json_line"), (3, "url_mismatch")]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert web.fleet.runs().total() == 0


def test_lists_go_page_by_page(web: Web) -> None:
    """``after``, ``limit``, ``has_more``, ``first_id``, ``last_id``; the client's own iteration sees each once."""
    web.broker()
    alice = web.client()
    files = [upload(alice, jsonl(1), f"f{number}.jsonl") for number in range(5)]
    batches = [create(alice, files[0]).id for _ in range(5)]
    assert [one.id for one in alice.batches.list(limit=2)] == batches[::-1]
    assert [one.id for one in alice.files.list(limit=2)] == files[::-1]
    assert [one.id for one in alice.files.list(limit=2, order="asc", purpose="batch")] == files
    assert [one.id for one in alice.files.list(purpose="batch_output")] == []
    first = alice.batches.list(limit=2)
    raw = json.loads(alice.batches.with_raw_response.list(limit=2, after=first.data[-1].id).content)
    assert (raw["first_id"], raw["last_id"], raw["has_more"]) == (batches[2], batches[1], True)
    raw = json.loads(alice.batches.with_raw_response.list(limit=2, after=batches[1]).content)
    assert (raw["first_id"], raw["last_id"], raw["has_more"]) == (batches[0], batches[0], False)
    with pytest.raises(openai.BadRequestError) as caught:
        alice.batches.list(limit=101)
    assert caught.value.param == "limit"


def test_cancel(web: Web) -> None:
    """What ran is output, what did not is an error line; an ended batch is not cancelled again."""
    web.broker()
    web.fleet.worker(delay_ms=50)
    alice = web.client()
    batch = create(alice, upload(alice, jsonl(400)))
    web.fleet.until(lambda: _completed(alice, batch.id) > 0, "something is finished")
    assert alice.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = web.ended(alice, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    good, failed = lines_of(alice, batch.output_file_id), lines_of(alice, batch.error_file_id)
    assert good
    assert len(good) + len(failed) == 400
    assert {line["error"]["code"] for line in failed} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
        alice.batches.cancel(batch.id)


def test_deleting_both_files_of_an_ended_batch_deletes_its_job(web: Web) -> None:
    """What it takes on the broker's disk is free again; the batch itself still tells how it ended."""
    web.broker()
    web.fleet.worker(delay_ms=1)
    alice = web.client()
    file = upload(alice, jsonl(3))
    batch = web.ended(alice, create(alice, file).id)
    assert alice.files.delete(file).deleted
    assert lines_of(alice, batch.output_file_id)  # control: the input alone takes nothing of it
    assert alice.files.delete(batch.output_file_id or "").deleted
    with pytest.raises(openai.NotFoundError):
        alice.files.content(batch.output_file_id or "")
    assert alice.batches.retrieve(batch.id).status == "completed"
    assert web.fleet.client.ask(messages.AskJobs(0, 0), messages.Jobs).jobs == ()


def test_errors_are_openais(web: Web) -> None:
    """Each refusal has its status, type, code and, where a field is at fault, its name."""
    web.broker()
    alice = web.client()
    file = upload(alice, jsonl(1))
    nothing = "file-" + "0" * 32
    with pytest.raises(openai.NotFoundError) as gone:
        alice.files.retrieve(nothing)
    assert (gone.value.type, gone.value.code) == ("invalid_request_error", "file_not_found")
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve("file-..")
    with pytest.raises(openai.NotFoundError):
        alice.batches.retrieve("batch_" + "0" * 32)
    with pytest.raises(openai.NotFoundError):
        create(alice, nothing)
    for fields, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}}, "output_expires_after"),
        ({"extra_body": {"completion_window": "soon"}}, "completion_window"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            create(alice, file, **fields)  # type: ignore[arg-type]
        assert bad.value.param == param
    with pytest.raises(openai.BadRequestError) as bad:
        alice.files.create(file=("a", b"x"), purpose="fine-tune")
    assert bad.value.param == "purpose"
    with pytest.raises(openai.NotFoundError) as unknown:
        alice.chat.completions.create(model="echo", messages=[])
    assert unknown.value.code == "unknown_url"
    with urllib.request.urlopen(f"http://{web.address}/healthz", timeout=DEADLINE_S) as answer:
        assert json.load(answer) == {"status": "ok"}


def _completed(client: openai.OpenAI, name: str) -> int:
    counts = client.batches.retrieve(name).request_counts
    return counts.completed if counts is not None else 0
