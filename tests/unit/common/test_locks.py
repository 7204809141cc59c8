"""A state folder has one process at a time; a lock dies with its holder, however it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import RefusedError
from common.locks import Lock

HOLD = """
import sys, time
from pathlib import Path
from common.locks import Lock
held = Lock(Path(sys.argv[1]))
print(held.try_take(), flush=True)
time.sleep(60)
"""


def test_a_second_taker_is_told_who_holds_it(tmp_path: Path) -> None:
    """Two workers on one state folder."""
    one, two = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert one.try_take()
    assert not two.try_take()
    assert two.holder() == str(os.getpid())
    one.release()
    assert two.try_take()
    two.release()


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    """kill -9, same folder, same host name and even the same process number: the lock is free at once."""
    path = tmp_path / "lock"

    child = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "True"
    lock = Lock(path)
    assert not lock.try_take(), "control: while it lives, the lock is held"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert lock.try_take()
    lock.release()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """--state below a file."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="writable"):
        Lock(tmp_path / "file" / "lock").try_take()
