"""OpenAI's objects: every status a batch may have, its timestamps, and pages of lists."""

from __future__ import annotations

import dataclasses

import pytest
from openai.types import Batch, FileObject

from broker.http import objects
from broker.http.records import BATCH, FILE, BatchRecord, FileRecord, is_id, new_id, read, written
from common.messages import JobInfo

NAME = new_id(BATCH, 1_700_000_000_000, 1)
RECORD = BatchRecord(NAME, 100.5, new_id(FILE, 1, 1), "/v1/completions", "24h", 86400, {"a": "b"}, handed_over=True)


def info(status: str) -> JobInfo:
    ended = 300.0 if status in ("completed", "failed", "expired", "cancelled") else 0.0
    return JobInfo(0, RECORD.job, "n", status, 9, 4, 2, 1, 2, 0, 11, 22, 100.0, 200.0, ended, 0, "", 9, 86500.0)


@pytest.mark.parametrize(
    ("job", "changes", "shown"),
    [
        (None, {"handed_over": False}, "validating"),
        (None, {"handed_over": False, "cancelling_at": 1.0}, "cancelling"),
        ("validating", {}, "validating"),
        ("in_progress", {}, "in_progress"),
        ("in_progress", {"cancelling_at": 1.0}, "cancelling"),
        ("cancelling", {}, "cancelling"),
        ("finalizing", {}, "finalizing"),
        ("completed", {}, "finalizing"),
        ("expired", {}, "finalizing"),
        ("cancelled", {}, "cancelling"),
        ("failed", {}, "validating"),
        ("completed", {"status": "completed"}, "completed"),
        ("failed", {"status": "failed"}, "failed"),
        ("expired", {"status": "expired"}, "expired"),
        ("cancelled", {"status": "cancelled"}, "cancelled"),
    ],
)
def test_every_status(job: str | None, changes: dict[str, object], shown: str) -> None:
    """No ended status before its files have ids; the client's own type takes every one."""
    record = dataclasses.replace(RECORD, output_file_id="file-o", **changes)  # type: ignore[arg-type]
    if record.status:
        record = dataclasses.replace(record, ended_at=300.0)
    batch = Batch.model_validate(objects.batch_object(record, info(job) if job else None) | {"usage": None})
    assert batch.status == shown
    assert (batch.output_file_id is not None) == bool(record.status)
    for name in ("completed", "failed", "expired", "cancelled"):
        assert (getattr(batch, f"{name}_at") is not None) == (shown == name)


def test_figures() -> None:
    """Counts, tokens and the window are the broker's."""
    record = dataclasses.replace(RECORD, status="completed", ended_at=300.9, finalizing_at=301.0)
    found = objects.batch_object(record, info("completed"))
    assert found["request_counts"] == {"total": 9, "completed": 4, "failed": 2}
    assert found["usage"] == {"input_tokens": 11, "output_tokens": 22, "total_tokens": 33}
    assert (found["created_at"], found["in_progress_at"], found["completed_at"], found["expires_at"]) == (
        100, 200, 300, 86500,
    )  # fmt: skip


def test_a_file() -> None:
    record = FileRecord(new_id(FILE, 1, 1), 7, 1.9, "a.jsonl", "batch", "00")
    assert FileObject.model_validate(objects.file_object(record)).created_at == 1


def test_pages_cover_a_list_once_either_way() -> None:
    names = [new_id(FILE, number, 1 << 70) for number in range(7)]
    for newest_first in (True, False):
        seen: list[str] = []
        more = True
        while more:
            page, more = objects.page(names, seen[-1] if seen else "", 3, newest_first)
            seen += page
        assert seen == (names[::-1] if newest_first else names)
    assert objects.page(names[1:], names[0], 3, False)[0] == names[1:4]  # the cursor itself was deleted
    assert objects.listing([], False)["first_id"] is None


def test_records_are_read_as_they_were_written() -> None:
    record = dataclasses.replace(RECORD, errors=({"code": "x", "line": 1},), job_info={"job": "j"})
    assert read(BatchRecord, written(record)) == record
    file = FileRecord(new_id(FILE, 1, 1), 7, 1.5, "ä", "batch")
    assert read(FileRecord, written(file)) == file


def test_ids_sort_by_time_and_name_no_place() -> None:
    """A batch's id is its job's; what is no id never becomes a path."""
    assert new_id(FILE, 1, 2**74 - 1) < new_id(FILE, 2, 0)
    assert RECORD.job.replace("-", "") == NAME.removeprefix(BATCH)
    assert is_id(BATCH, NAME)
    for text in ("", "..", "batch_../../x", NAME.upper(), NAME + "0", NAME + "\n", "file-" + NAME[6:]):
        assert not is_id(BATCH, text)
