"""shell: ``python tests/benchmarks/peers``: no-op work through Celery, JetStream and Dask on this machine, as JSON.

Makes their home in the cache (once), then measures in it. Everything on loopback, bounded in count and time, ended by
process id. Arguments are those of ``measure.py``, without ``--home``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import NoReturn

import home


def main() -> NoReturn:
    """Prepare, then become the measuring process."""
    try:
        found = home.prepare(home.default_cache())
    except home.CannotPrepareError as failure:
        print(f"peers: {failure}", file=sys.stderr)
        sys.exit(4)
    words = {name: str(value) for name, value in dataclasses.asdict(found).items()}
    python = str(found.python)
    os.execv(python, [python, str(home.HERE / "measure.py"), "--home", json.dumps(words), *sys.argv[1:]])


if __name__ == "__main__":
    main()
