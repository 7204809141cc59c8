"""shell: ``python -m broker`` is ``haulier broker``."""

from __future__ import annotations

import sys

from common.cli import main

if __name__ == "__main__":
    sys.exit(main(["broker", *sys.argv[1:]]))
