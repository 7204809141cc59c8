"""shell: ``python -m worker``: the same as ``haulier worker``. Knows nothing else."""

from __future__ import annotations

import sys

from common.cli import main

if __name__ == "__main__":
    sys.exit(main(["worker", *sys.argv[1:]]))
