"""The end of a worker's process: nothing that a library or a socket still waits for keeps it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import zmq

from worker.leaving import end_context

PATIENCE_S = 20.0
"""Far more than an end takes: only a hang uses it up."""
BLOCKED = """
import atexit, sys, threading
from worker.leaving import leave
atexit.register(lambda: (print("finalised", flush=True), threading.Event().wait()))
sys.stdout.write("said")
{end}(7)
"""


def ended(end: str) -> subprocess.Popen[str]:
    """A process in which some library's finaliser waits for ever, ending by ``end``."""
    return subprocess.Popen([sys.executable, "-c", BLOCKED.format(end=end)], stdout=subprocess.PIPE, text=True)


def test_a_finaliser_that_never_returns_keeps_no_process() -> None:
    """In life: all is closed, and a library's threads do not end: the exit code is there, and what was printed."""
    process = ended("leave")
    assert process.communicate(timeout=PATIENCE_S)[0] == "said"
    assert process.returncode == 7


def test_the_control_waits_for_it() -> None:
    """The interpreter's own end."""
    process = ended("sys.exit")
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "saidfinalised\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.communicate()


def test_a_socket_left_behind_is_closed() -> None:
    """In life: a link failed half made; the context would wait for its socket for ever, as the control shows."""
    context: zmq.Context[Any] = zmq.Context()
    left = context.socket(zmq.DEALER)
    control = threading.Thread(target=context.term, daemon=True)
    control.start()
    control.join(0.5)
    assert control.is_alive()
    left.close(0)
    control.join(PATIENCE_S)
    context = zmq.Context()
    left = context.socket(zmq.DEALER)
    assert not end_context(context, PATIENCE_S).is_alive()
    assert left.closed
    assert context.closed


def test_a_context_that_does_not_end_is_waited_for_no_longer_than_was_said() -> None:
    """In life: a name is being looked up; whoever ends the process hears of the thread that waits."""
    over = threading.Event()

    class Stuck:
        def destroy(self) -> None:
            over.wait()

    stuck: Any = Stuck()
    waiting = end_context(stuck, 0.1)
    assert waiting.is_alive()
    over.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
