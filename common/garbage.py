"""shell: how often the interpreter looks for reference cycles: seldom, and never among what is there for good.

By default it looks after every 700 new containers, and a line is dozens of them on its way: a fifth of a process's time
went into finding that none is garbage. Our values hold no cycles; what libraries leave is still collected. A look at
everything a loaded model consists of would also hold the interpreter lock for longer than a beat may wait (S3).
"""

from __future__ import annotations

import gc

from common import limits


def calm() -> None:
    """Leave out of every later look what is there now, and look seldom. Call when a process is set up. Any thread."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(limits.GARBAGE_YOUNG_COUNT, 20, 20)
