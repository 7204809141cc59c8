"""shell: ``python -m worker`` is ``haulier worker``, and loads no other command: a worker that restarts is awaited."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

from common.cli import GROUP, main

ROOM = EntryPoint("worker", "worker.commands:register", GROUP)

if __name__ == "__main__":
    sys.exit(main(["worker", *sys.argv[1:]], rooms=(ROOM,)))
