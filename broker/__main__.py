"""shell: ``python -m broker`` is ``haulier broker``, and loads no other command: a broker that restarts is awaited."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

from common.cli import GROUP, main

ROOM = EntryPoint("fleet", "broker.commands:register", GROUP)

if __name__ == "__main__":
    # no room of the broker may import numpy, and sqlite-utils would, where it is installed: a third of the whole start
    sys.modules["numpy"] = None  # type: ignore[assignment]
    sys.exit(main(["broker", *sys.argv[1:]], rooms=(ROOM,)))
