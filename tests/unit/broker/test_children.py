"""Children that crash, refuse, hang or lose their parent: each ends the way it should, and none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import children as module
from broker.children import Children, free_endpoint
from broker.state_folder import StateFolder, state_folder
from common import wire
from common.config import KeySettings
from common.errors import HaulierError, RefusedError

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    with state_folder(tmp_path / "state", time.sleep, print) as made:
        yield made


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come true")
        time.sleep(0.01)


def said_up(folder: StateFolder, name: str) -> bool:
    path = folder.log(name)
    return path.exists() and "up" in path.read_text()


def start(children: Children, name: str, code: str, room: str = "worker") -> subprocess.Popen[bytes]:
    children._command = (sys.executable, "-c", code)
    children.start(name, room, [])
    return children._children[-1].process


def test_a_killed_child_is_started_again(folder: StateFolder) -> None:
    """The kernel's kill: the same child, a new process, and people are told."""
    said: list[str] = []
    with Children(folder, said.append) as children:
        process = start(children, "worker", SLEEPS)
        process.kill()
        process.wait()
        children.check()
        again = children._children[0].process
        assert again.pid != process.pid
        assert again.poll() is None
    assert said == ["the worker ended (-9); starting it again"]
    assert again.poll() is not None


def test_a_child_that_refuses_ends_the_run_in_its_own_words(folder: StateFolder) -> None:
    """Exit 4 for a fit that is refused, with the child's line."""
    with Children(folder, print) as children:
        start(
            children, "worker", "import sys; print('haulier: 8 histories do not fit', file=sys.stderr); sys.exit(4)"
        ).wait()
        with pytest.raises(RefusedError, match="8 histories do not fit"):
            children.check()


def test_a_child_that_fails_without_words_shows_its_last_lines(folder: StateFolder) -> None:
    """A traceback at its start: the log's end is shown, and the exit code is that of a bug."""
    said: list[str] = []
    with Children(folder, said.append) as children:
        start(children, "worker", "raise ValueError('odd')").wait()
        with pytest.raises(HaulierError) as told:
            children.check()
    assert told.value.exit_code == 70
    assert said[-1] == "worker: ValueError: odd"


def test_a_deaf_child_is_killed_in_the_end(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores SIGTERM does not keep the run from ending."""
    monkeypatch.setattr(module, "STOP_S", 0.2)
    monkeypatch.setattr(module, "LEAVE_S", 0.2)
    with Children(folder, print) as children:
        process = start(children, "worker", DEAF)
        until(lambda: said_up(folder, "worker"))
    assert process.returncode == -signal.SIGKILL


PARENT = """
import os, signal, sys, time
from pathlib import Path
from broker.children import Children
from broker.state_folder import state_folder
with state_folder(Path(sys.argv[1]), time.sleep, print) as folder:
    children = Children(folder, print, (sys.executable, "-c"))
    children.start("broker", sys.argv[2], [])
    while "up" not in folder.log("broker").read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
FOLLOWS = "from common.parent import follow_parent; assert follow_parent(); " + SLEEPS
STRAYS = SLEEPS
CHILD_ENDS_S = 30


@pytest.mark.parametrize(("child", "left"), [(FOLLOWS, False), (STRAYS, True)], ids=["follows", "control"])
def test_a_child_ends_with_its_killed_parent(tmp_path: Path, child: str, left: bool) -> None:
    """SIGKILL of the run: nothing is left running. Control: a child that does not follow stays."""
    done = subprocess.run([sys.executable, "-c", PARENT, str(tmp_path / "s"), child], check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "s" / "children.pids").read_text())
    if left:
        os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)
    with state_folder(tmp_path / "s", time.sleep, print):  # waits until the child is gone
        pass
    with contextlib.suppress(ProcessLookupError):
        until(lambda: _is_zombie_or_gone(pid))


def _is_zombie_or_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_kept_endpoint_can_be_bound_by_a_broker(tmp_path: Path) -> None:
    """Between choosing a port and the broker's start, or its second start, nobody else gets it."""
    import zmq

    kept, endpoint = free_endpoint()
    with kept:
        for _ in range(2):
            context: zmq.Context[Any] = zmq.Context()
            wire.router(context, endpoint, KeySettings(insecure=True)).close(0)
            context.term()  # a listener is gone for sure only now
        other, another = free_endpoint()
        other.close()
        assert another != endpoint
