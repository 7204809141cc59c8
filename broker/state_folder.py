"""shell: the state folder of ``haulier run``: who uses it, what lies where, and its end. Knows no job and no message.

``run.lock`` is held by the run itself. ``children.lock`` is held by its children too, through an inherited file, so
that the next run of the folder knows when the last process of the one before is gone, however that one ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common import limits
from common.errors import RefusedError, UsageError
from common.folders import why_not

WAIT_S = limits.PARENT_GRACE_S + 5.0
"""Children follow their parent within the grace, and then some for a machine that is busy."""
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A locked folder and its rooms."""

    path: Path
    children_lock: int
    """A file descriptor for the children to inherit."""

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def broker(self) -> Path:
        return self.path / "broker"

    @property
    def worker(self) -> Path:
        return self.path / "worker"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def note_children(self, pids: list[int]) -> None:
        """Write down who the children are, for the words of a refusal."""
        (self.path / "children.pids").write_text(" ".join(map(str, pids)) + "\n")

    def remove(self) -> None:
        """Everything in it is delivered: take it away, at once as far as anybody can see."""
        doomed = self.path.with_name(f"{self.path.name}.removing.{os.getpid()}")
        self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def beside(output: str) -> Path:
    """The state folder of a run that names none: hidden, beside its output."""
    real = Path(os.path.realpath(output))
    return real.with_name(f".{real.name}.haulier")


@contextlib.contextmanager
def state_folder(path: Path, sleep: Callable[[float], None], say: Callable[[str], None]) -> Iterator[StateFolder]:
    """The folder, made if need be, for this process alone while the block runs.

    Raises ``RefusedError`` naming the process that has it, ``UsageError`` when it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            run_lock = _locked(path)
            stack.callback(os.close, run_lock)
            os.ftruncate(run_lock, 0)
            os.pwrite(run_lock, f"{os.getpid()}\n".encode(), 0)
            (path / "logs").mkdir(exist_ok=True)
            children_lock = os.open(path / "children.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as failure:
            raise UsageError(
                f"cannot keep state in {path}: {why_not(path, failure)}; name another folder by --state"
            ) from failure
        stack.callback(os.close, children_lock)
        _await_children(path, children_lock, sleep, say)
        for left in path.parent.glob(f"{path.name}.removing.*"):
            shutil.rmtree(left, ignore_errors=True)
        yield StateFolder(path, children_lock)


def _locked(path: Path) -> int:
    while True:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise RefusedError(
                f"state folder {path} is in use by process {holder}; wait for it, end it, or name another --state"
            ) from None
        # its holder may have taken the folder away between our open and our lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path / "run.lock")):
                return fd
        os.close(fd)


def _await_children(path: Path, lock: int, sleep: Callable[[float], None], say: Callable[[str], None]) -> None:
    waited, told = 0.0, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pids = _read(path / "children.pids")
            if waited >= WAIT_S:
                raise RefusedError(
                    f"processes of an earlier run still use {path} (pids {pids}); end them and run again"
                ) from None
            if not told:
                say(f"waiting for the processes of an earlier run to end (pids {pids})")
                told = True
            sleep(0.1)
            waited += 0.1


def _read(path: Path) -> str:
    try:
        return path.read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def tail(log: Path, lines: int) -> tuple[str, ...]:
    """The last ``lines`` lines of a log, at most 16 KiB of it; nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])
