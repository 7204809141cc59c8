"""shell: the processes of one peer, started here and ended here by their own ids. Knows no peer. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

READY_S = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One process in a group of its own. It dies with this one, however this one ends."""

    def __init__(self, command: list[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **(extra or {})},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._log = log

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``; raises ``RuntimeError`` with the end of its log if that does not come."""
        until = time.monotonic() + READY_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > until:
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-1500:]
                raise RuntimeError(f"{self._process.args!r} did not come up:\n{tail}")
            time.sleep(0.01)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody does."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
