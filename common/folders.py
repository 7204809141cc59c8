"""shell: folders that a setting names: made, synced, told a word; what stands in the way is said. Knows no content."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import HaulierError, RefusedError, disk_failure


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


def sync(path: Path) -> None:
    """What a folder lists, or a file holds, is on the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def announce(folder: Path, name: str, word: str) -> None:
    """The file ``name`` of a state folder says ``word``, whole from the first look on. Raises what ``disk_failure``
    makes of a disk that fails."""
    fresh = folder / f".{name}.new"
    try:
        fresh.write_text(word + "\n")
        fresh.rename(folder / name)
    except OSError as error:
        words = f"{fresh} cannot be written: {error.strerror}; look after the disk of --state"
        raise disk_failure(error)(words) from error
