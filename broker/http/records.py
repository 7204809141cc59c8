"""values: what is kept of a file and of a batch that came over HTTP, and how it is written. Times are wall seconds.

A batch's id and its job's id are one UUID, so that ``haulier status`` and HTTP speak of the same thing. Ids begin with
their time: sorted by name is sorted by age.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T", "FileRecord", "BatchRecord")
FILE, BATCH = "file-", "batch_"
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: uploaded, with its bytes beside this record, or one of a job's two, which the broker's store holds."""

    id: str
    bytes: int
    created_at: float
    filename: str
    purpose: str
    """``batch`` for an input, ``batch_output`` for a job's ``output`` and ``error`` alike."""
    sha256: str = ""
    """Of an input, in hexadecimal."""
    job: str = ""
    which: str = ""
    """Of a job's file: ``output`` or ``error``."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. What the broker knows of its job is asked there while it is open, and kept here once it has ended."""

    id: str
    created_at: float
    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    handed_over: bool = False
    """Whether the broker has the whole input."""
    cancelling_at: float = 0.0
    finalizing_at: float = 0.0
    output_file_id: str = ""
    error_file_id: str = ""
    status: str = ""
    """``completed``, ``failed``, ``expired`` or ``cancelled`` once it has ended; empty before."""
    job_info: dict[str, Any] = field(default_factory=dict)
    """``JobInfo`` as plain values, as it was at the end; empty for a job the broker never had, or has no more."""
    errors: tuple[dict[str, Any], ...] = ()
    ended_at: float = 0.0

    @property
    def job(self) -> str:
        return str(uuid.UUID(self.id.removeprefix(BATCH)))


def new_id(kind: str, milliseconds: int, chance: int) -> str:
    """``kind`` and a UUID (version 7): ``milliseconds`` of wall time, then 74 bits of ``chance``."""
    high, low = (chance >> 62) & 0xFFF, chance & ((1 << 62) - 1)
    return f"{kind}{uuid.UUID(int=milliseconds << 80 | 7 << 76 | high << 64 | 2 << 62 | low).hex}"


def is_id(kind: str, text: str) -> bool:
    """Whether ``text`` can be an id of ``kind``: then it is also a safe name of a file."""
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def written(record: FileRecord | BatchRecord) -> bytes:
    """The record as it is kept."""
    return json.dumps(dataclasses.asdict(record)).encode()


def read(kind: type[T], data: bytes) -> T:
    """A kept record. Raises ``ValueError`` or ``TypeError`` for what ``written`` did not write."""
    found: dict[str, Any] = json.loads(data)
    if kind is BatchRecord:
        found["errors"] = tuple(found.get("errors", ()))
    return kind(**found)
