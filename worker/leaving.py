"""shell: how a worker's process ends once all that is durable is closed: at once, whatever a library still waits for.

A ZeroMQ context waits for each of its sockets, for last frames, and for a name that is being looked up; an interpreter
that ends waits for threads and finalisers of every library that was loaded. Nothing of a worker depends on either.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any, NoReturn

import zmq


def end_context(context: zmq.Context[Any], patience_s: float) -> threading.Thread:
    """Close what is left open and wait for the last frames, as long as closed sockets linger, but not longer than
    ``patience_s``: the thread that waits, alive if that was too short. No other thread uses a socket any more."""
    waiting = threading.Thread(target=context.destroy, daemon=True, name="connections")
    waiting.start()
    waiting.join(patience_s)
    return waiting


def leave(code: int) -> NoReturn:
    """End the process with ``code``. What was printed is printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
