"""shell: folders that a setting names, made at a start; what stands in the way is said in words. Knows no content."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import HaulierError, RefusedError


def made(path: Path, what: str, flag: str = "--state", kind: type[HaulierError] = RefusedError) -> Path:
    """``path``, a folder from now on if it was none. Raises ``kind``; ``what`` names what it is for."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise kind(f"cannot make the folder {path} for {what}: {why_not(path, error)}; see {flag}") from error
    return path


def why_not(path: Path, error: OSError) -> str:
    """Why there can be no folder at ``path``: the file in its way by name, or the system's own word."""
    file = next((one for one in (path, *path.parents) if os.path.exists(one) and not os.path.isdir(one)), None)
    return f"{file} is a file, not a folder" if file is not None else error.strerror or str(error)
