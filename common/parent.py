"""shell: lets a process end with the one that started it, so that ``haulier run`` leaves nothing. Knows no rule.

The parent keeps the write end of a pipe and hands the read end down, its number in ``HAULIER_PARENT_PIPE``. However the
parent ends, SIGKILL included, the kernel closes its end and the child reads the end of the file. A pipe, and not a
death signal, because it also works where the child is started by a thread or runs on another system than Linux.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping

from common import limits

VARIABLE = "HAULIER_PARENT_PIPE"
ENDED_WITH_PARENT = 128 + signal.SIGTERM


def follow_parent(environment: MutableMapping[str, str] | None = None) -> bool:
    """End this process soon after its parent: SIGTERM to itself, and the hard end ``PARENT_GRACE_S`` later.

    To be called by a child's main thread at its start. Returns whether there is a parent to follow; False where the
    variable is unset, as in a process started by hand. The variable is taken out, so that no grandchild reads it.
    """
    environment = os.environ if environment is None else environment
    text = environment.pop(VARIABLE, "")
    if not text.isdigit():
        return False
    pipe = int(text)
    try:
        os.set_inheritable(pipe, False)
    except OSError:  # the number outlived the pipe: started through something that closed it
        return False
    threading.Thread(target=_wait, args=(pipe,), name="follow-parent", daemon=True).start()
    return True


def _wait(pipe: int) -> None:
    while os.read(pipe, 1):  # nobody writes: this returns when the last write end is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # a drain may take a minute, but the next run of the same state folder is already waiting for it
    threading.Event().wait(limits.PARENT_GRACE_S)
    os._exit(ENDED_WITH_PARENT)
