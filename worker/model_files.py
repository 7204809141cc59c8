"""shell: whether a model folder's weights are whole: every file that its index names is there, as long as it says.

Looks at the ends of files alone, so that it costs nothing beside loading. Knows no torch and no model.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from common.errors import RefusedError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_HEADER_MAX_BYTES = 100_000_000
"""As the format has it."""


def check(folder: Path) -> None:
    """Raise ``RefusedError`` naming the file that is missing, cut short or no weights at all, and what to do."""
    for path in _weights(folder):
        problem = _problem(path)
        if problem:
            raise RefusedError(f"{path.name} {problem}; {_remedy(folder)}")


def _weights(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [path for path in (folder / WEIGHTS,) if path.is_file()]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as failure:
        raise RefusedError(f"{INDEX} cannot be read ({failure}); {_remedy(folder)}") from failure
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise RefusedError(
            f"{absent[0]} is missing: {len(names) - len(absent)} of the {len(names)} weight files that {INDEX} names "
            f"are there; {_remedy(folder)}"
        )
    return [folder / name for name in names]


def _problem(path: Path) -> str:
    """What is wrong with a safetensors file: its header's length, the header, then the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LENGTH_BYTES)
        length = struct.unpack("<Q", head)[0] if len(head) == _LENGTH_BYTES else 0
        if not 0 < length <= min(size - _LENGTH_BYTES, _HEADER_MAX_BYTES):
            return f"is no safetensors file, or cut short: {size} bytes" + _pointer(path, size)
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has a header that cannot be read"
    wanted = _LENGTH_BYTES + length + max(ends, default=0)
    return "" if size == wanted else f"has {size} bytes, its header promises {wanted}"


def _pointer(path: Path, size: int) -> str:
    """A clone without its large files has a line of text in their place."""
    if size > 1024 or not path.read_bytes().startswith(b"version https://git-lfs"):
        return ""
    return " (a pointer of Git LFS: git lfs pull fetches the file)"


def _remedy(folder: Path) -> str:
    origin = folder / "haulier.json"
    if origin.is_file():
        return f"remove {folder} and run haulier model pull again"
    return f"copy or download that file into {folder} again"
