"""Where a context's history came from: three sums that are never one."""

from __future__ import annotations

from worker.engine.retention import Placement
from worker.engine.served import Served


def test_rows_are_counted_by_where_they_came_from() -> None:
    """H3, in life: two steps of a context with pages of both kinds, told in MiB."""
    served = Served()
    served.add(Placement(None, ((8, 10), (12, 13)), ((0, 0, 4),), hit_rows=4, borrowed=((4, 1, 0, 4), (10, 0, 4, 2))))
    served.add(Placement(0, (), hit_rows=14))
    assert (served.link_rows, served.page_rows, served.headroom_rows) == (3, 18, 6)
    assert served.words(1 << 20) == "history: 3.0 MiB over the link, 18.0 MiB from its pages, 6.0 MiB from headroom"
