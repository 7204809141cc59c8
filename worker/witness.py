"""shell: a file that gets one line for each request an engine begins to run. Knows no session and no result.

What is run twice is counted here, where it cannot be hidden by any book further up. One write a line, appended.
"""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import RefusedError
from common.messages import LineRef


class Witness:
    """Writes to ``path``, or nowhere. ``saw`` belongs to the engine's thread."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor: int | None = None
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as failure:
                raise RefusedError(f"cannot write the witness {path}: {failure.strerror}") from failure

    def saw(self, ref: LineRef) -> None:
        """This request begins to run: ``JOB INDEX ATTEMPT PID``."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{ref.job} {ref.index} {ref.attempt} {os.getpid()}\n".encode())
