"""shell: counts executions where they cannot be hidden: the work itself writes a line each time it runs.

Used by the peers' workers in the kill rows alone (``PEERS_WITNESS`` names the file), never while speed is measured.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

VARIABLE = "PEERS_WITNESS"
_file: list[int] = []


def work(body: str) -> str:
    """The no-op: its input is its output. The first word of a body is its number."""
    path = os.environ.get(VARIABLE, "")
    if path:
        if not _file:
            _file.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        os.write(_file[0], body.split(" ", 1)[0].encode() + b"\n")
    return body


def runs(path: Path) -> Counter[str]:
    """How often each body ran."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


def total(path: Path) -> int:
    """How many runs there were, without reading them one by one."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def bodies(count: int, size: int) -> list[str]:
    """``count`` bodies of ``size`` bytes, each with its number first."""
    return [f"{index} ".ljust(size, "x") for index in range(count)]
