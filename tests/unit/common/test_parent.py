"""A process follows the one that started it, and one started by hand follows nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from common import parent

CHILD = """
import signal, sys, time
from common import limits, parent
limits.PARENT_GRACE_S = 0.2
if sys.argv[1] == "obeys":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(parent.follow_parent(), flush=True)
time.sleep(600)
"""


def end_of_child(how: str) -> int:
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        env={**os.environ, parent.VARIABLE: str(read)},
        pass_fds=(read,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "True\n"
        assert child.poll() is None
        os.close(write)  # as the kernel does when the parent ends, however it ends
        return child.wait(60)


def test_it_is_told_as_by_an_operator_and_may_leave_in_good_order() -> None:
    """SIGTERM first: a worker hands over what it can."""
    assert end_of_child("obeys") == 7


def test_it_ends_even_if_it_does_not_listen() -> None:
    """A child whose main thread is stuck, or that takes a minute to drain, is gone within the grace."""
    assert end_of_child("ignores") == parent.ENDED_WITH_PARENT == 128 + signal.SIGTERM


def test_without_a_parent_there_is_nobody_to_follow() -> None:
    """Started by hand, by compose or by systemd; or with a number whose pipe is long closed."""
    assert parent.follow_parent({}) is False
    assert parent.follow_parent({parent.VARIABLE: "no"}) is False
    environment = {parent.VARIABLE: "987654"}
    assert parent.follow_parent(environment) is False
    assert environment == {}
