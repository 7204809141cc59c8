"""rules: files, batches, models and lists as OpenAI's objects, from what is kept here and what the broker says.

Home of what an open batch's ``status`` is: the broker's word, and ``finalizing`` until its files have ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker.client_rules import ENDED
from broker.http.records import BatchRecord, FileRecord
from common.messages import JobInfo, WorkerInfo

_UNTIL_KEPT = {"completed": "finalizing", "expired": "finalizing", "cancelled": "cancelling", "failed": "validating"}
"""An ended job's batch until its end is kept here."""


def file_object(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id, "object": "file", "bytes": record.bytes, "created_at": int(record.created_at),
        "filename": record.filename, "purpose": record.purpose, "status": "processed", "expires_at": None,
        "status_details": None,
    }  # fmt: skip


def batch_object(record: BatchRecord, info: JobInfo | None) -> dict[str, Any]:
    """``info`` is the broker's word on its job, None where it has none yet, or none any more."""
    status = record.status or _open_status(record, info)
    ended = record.ended_at if record.status else 0.0
    expires = info.expires_at if info is not None else 0.0
    started = info.started_at if info is not None else 0.0
    # a cancel that was asked for elsewhere has no time of its own here
    cancelling = record.cancelling_at or (ended if status == "cancelled" else 0.0)
    return {
        "id": record.id, "object": "batch", "endpoint": record.endpoint, "input_file_id": record.input_file_id,
        "completion_window": record.completion_window, "status": status,
        "errors": {"object": "list", "data": list(record.errors)} if record.errors else None,
        "output_file_id": (record.output_file_id or None) if record.status else None,
        "error_file_id": (record.error_file_id or None) if record.status else None,
        "created_at": int(record.created_at), "in_progress_at": _time(started),
        "expires_at": _time(expires or record.created_at + record.window_s),
        "finalizing_at": _time(record.finalizing_at),
        "completed_at": _time(ended, status == "completed"), "failed_at": _time(ended, status == "failed"),
        "expired_at": _time(ended, status == "expired"), "cancelling_at": _time(cancelling),
        "cancelled_at": _time(ended, status == "cancelled"), "request_counts": _counts(info), "usage": _usage(info),
        "metadata": record.metadata,
    }  # fmt: skip


def _open_status(record: BatchRecord, info: JobInfo | None) -> str:
    if info is None:
        return "cancelling" if record.cancelling_at else "validating"
    if info.status in ENDED:
        return _UNTIL_KEPT[info.status]
    return "cancelling" if record.cancelling_at else info.status


def _time(seconds: float, holds: bool = True) -> int | None:
    return int(seconds) if seconds and holds else None


def _counts(info: JobInfo | None) -> dict[str, int]:
    if info is None:
        return {"total": 0, "completed": 0, "failed": 0}
    return {"total": info.total, "completed": info.completed, "failed": info.failed}


def _usage(info: JobInfo | None) -> dict[str, int] | None:
    if info is None or info.status not in ENDED:
        return None
    prompt, answers = info.prompt_tokens, info.completion_tokens
    return {"input_tokens": prompt, "output_tokens": answers, "total_tokens": prompt + answers}


def listing(objects: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """One page of a list."""
    return {
        "object": "list", "data": list(objects), "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None, "has_more": more,
    }  # fmt: skip


def models(workers: Sequence[WorkerInfo], since: float) -> dict[str, Any]:
    """The models that live workers serve; ``since`` is when this server started, for nobody knows their age."""
    names = sorted({model.name for worker in workers for model in worker.models})
    found = [{"id": name, "object": "model", "created": int(since), "owned_by": "haulier"} for name in names]
    return {"object": "list", "data": found}


def deleted(name: str) -> dict[str, Any]:
    return {"id": name, "object": "file", "deleted": True}


def page(names: Sequence[str], after: str, limit: int, newest_first: bool) -> tuple[list[str], bool]:
    """The ids of one page out of ``names`` (any order), and whether more follow. ``after`` need not be there still."""
    ordered = sorted(names, reverse=newest_first)
    if after:
        ordered = [name for name in ordered if (name < after if newest_first else name > after)]
    return ordered[:limit], len(ordered) > limit
