"""shell: clients' long questions (audits), put to a ``Reader`` and answered by a later turn. Knows no rule.

One question about one job is asked once, however many clients, or tries of one client, wait for it.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.audit import audit
from broker.effects import Query
from broker.reader import Reader
from broker.state import Job
from broker.store import damaged
from common import limits, messages


class Questions:
    """What is asked and not answered. One thread."""

    def __init__(self, reader: Reader, path: Path) -> None:
        self._reader, self._path = reader, path
        self._waiting: dict[str, list[tuple[bytes, int]]] = {}

    def ask(self, query: Query, job: Job) -> messages.Failure | None:
        """Have the audit that ``query`` asks for made; a ``Failure`` when too many wait."""
        waiting = self._waiting.get(job.id)
        if waiting is None:
            if len(self._waiting) >= limits.QUESTIONS_MAX_COUNT:
                words = f"{len(self._waiting)} audits wait already; ask again in a moment"
                return messages.Failure(query.message.request, "busy", words, 3)
            waiting = self._waiting[job.id] = []
            self._reader.ask(job.id, lambda connection: audit(connection, job.id, 0))
        if len(waiting) < limits.QUESTIONS_MAX_COUNT:
            waiting.append((query.peer, query.message.request))
        return None

    def answers(self) -> Iterator[tuple[bytes, Any]]:
        """Who is to hear what. Raises ``RefusedError`` when the store turns out to be damaged."""
        for job, found in self._reader.answers():
            if isinstance(found, sqlite3.DatabaseError) and not isinstance(found, sqlite3.OperationalError):
                raise damaged(self._path, str(found))
            for peer, request in self._waiting.pop(job):
                if isinstance(found, messages.Audit):
                    yield peer, dataclasses.replace(found, request=request)
                elif found is None:
                    yield peer, messages.Failure(request, "no_job", f"job {job} is deleted", 4)
                else:
                    yield peer, messages.Failure(request, "busy", f"the store could not be read: {found}; ask again", 3)
