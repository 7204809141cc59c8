"""What a worker says of itself when it logs in: pages that follow each other, and the record of its former run (D5)."""

from __future__ import annotations

from common import codec, limits
from common.messages import HeldLine, LineRef, ModelInfo
from worker.greeting import hellos
from worker.states import Identity

SERVES = ((ModelInfo("m", "fp", 100),), 4, 1000)


def held(count: int) -> list[HeldLine]:
    return [HeldLine(LineRef("j", index, 1), "finished") for index in range(count)]


def test_pages_follow_each_other_and_hold_every_line_once() -> None:
    """A worker that finished 5,000 lines while the broker was away."""
    pages = hellos(Identity("w", 3, ()), 7, "store", SERVES, held(2 * limits.PAGE_MAX_COUNT + 1))
    assert [(page.page, page.more) for page in pages] == [(0, True), (1, True), (2, False)]
    assert [one for page in pages for one in page.held] == held(2 * limits.PAGE_MAX_COUNT + 1)
    assert {(page.worker, page.incarnation, page.login, page.store_id) for page in pages} == {("w", 3, 7, "store")}


def test_who_holds_nothing_still_greets_and_names_no_store() -> None:
    """A worker's first start: one page, of no store's rows."""
    (page,) = hellos(Identity("w", 1, ()), 1, "store", SERVES, [])
    assert (page.store_id, page.held, page.more, page.ran) == ("", (), False, ())


def test_the_former_runs_record_stands_in_the_first_page_and_crosses_the_wire() -> None:
    """The engine ran two lines when the process was killed; a login of many pages tells it once."""
    ran = (LineRef("j", 1, 1), LineRef("j", 2, 1))
    pages = hellos(Identity("w", 2, (), "", ran), 1, "store", SERVES, held(limits.PAGE_MAX_COUNT + 1))
    assert [page.ran for page in pages] == [ran, None]
    assert [codec.decode(codec.encode(page)) for page in pages] == pages
