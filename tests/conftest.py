"""What all tests share: no test sees this machine's settings, and none leaves a thread or a bound name behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import structlog

KEPT = {"HAULIER_CACHE"}
"""Where the default model lies is no setting under test; fetching it for each test would be."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job inherits that; Ctrl-C is under test
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's HAULIER_BROKER or HAULIER_LOG must not decide whether a test passes."""
    for name in list(os.environ):
        if name.startswith("HAULIER_") and name not in KEPT:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A thread that outlives its test would fail another one; names bound to log lines would lie in it."""
    before = set(threading.enumerate())
    yield
    structlog.contextvars.clear_contextvars()
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(timeout=10)
    alive = [thread.name for thread in left if thread.is_alive()]
    if alive:
        pytest.fail(f"threads outlived the test: {', '.join(alive)}")
