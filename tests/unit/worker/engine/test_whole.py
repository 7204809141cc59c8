"""``--retain whole``: a request runs only with its whole history in device pages, or waits; slots hold nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import EngineSettings
from common.errors import InvariantError, RefusedError, UsageError
from tests.unit.worker.engine import rigs
from worker.engine.admission import PagePool
from worker.engine.fit import fit
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.long_bench import LongWork, long_bench
from worker.engine.retention import Retention
from worker.structures import Sampling

SCRIPT = rigs.Scenario(
    prompts=((20, Sampling(6)), (33, Sampling(8)), (9, Sampling(12)), (30, Sampling(5)), (12, Sampling(7))),
    arrive={0: (0, 1, 2), 3: (3, 4)},
    cancel={6: (1,)},
)
PAGES = 12
"""One history of 48 rows in pages of four; or two short ones."""


def _few_pages(local: LocalEngine) -> None:
    """A pool of one whole history, where GiB are too coarse."""
    local.engine.scheduler.kept.retention = Retention(PagePool(PAGES, whole=True), rigs.PAGE)


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("temperament", list(Temperament))
def test_requests_run_in_place_one_after_another(temperament: Temperament, graphs: str) -> None:
    """In life: device pages for one long history, four requests. Text as transformers writes it; nothing is staged."""
    loaded = rigs.model(temperament)
    outcome = rigs.run(loaded, SCRIPT, _few_pages, retain="whole", graphs=graphs)
    assert outcome.local.engine.transport.bytes_in == 0
    for number, (length, sampling) in enumerate(SCRIPT.prompts):
        if outcome.finished[number].reason == "length":
            wanted = rigs.expected(loaded, rigs.prompt(length, number), sampling.max_tokens)
            assert list(outcome.tokens[number]) == wanted
    assert outcome.local.engine.scheduler.waits["device pages"] > 0


def test_drafts_run_in_place_too() -> None:
    """In life: refuted rows are written again, where they are."""
    loaded = rigs.model()
    outcome = rigs.run(loaded, SCRIPT, _few_pages, retain="whole", draft_tokens=3)
    for number in (0, 2, 3, 4):
        length, sampling = SCRIPT.prompts[number]
        assert list(outcome.tokens[number]) == rigs.expected(loaded, rigs.prompt(length, number), sampling.max_tokens)


def test_requests_that_share_a_history_wait_for_both_pieces() -> None:
    """H5, in life: the document's piece is one, each question's is another; or the request runs alone, or waits."""
    documents = tuple((0, 16) for _ in range(4))
    script = rigs.Scenario(tuple((20 + n, Sampling(4 + n)) for n in range(4)), {0: (0, 1), 2: (2, 3)}, shared=documents)
    loaded = rigs.model()
    outcome = rigs.run(loaded, script, _few_pages, retain="whole")
    assert outcome.local.engine.transport.bytes_in == 0
    for number in range(4):
        wanted = rigs.expected(loaded, script.prompt(number, rigs.VOCABULARY), 4 + number)
        assert list(outcome.tokens[number]) == wanted


def test_a_piece_that_a_step_still_reads_is_waited_for() -> None:
    """In life: a request ends and its pages are the next one's. Where nothing waits for a whole cool piece, and only
    then, the newcomer has pages that it may not write yet, and would be staged."""
    for whole in (True, False):
        pool = PagePool(8, target=8, whole=whole)
        assert pool.admit(1, 8, 4) is None
        first = pool.account(1)
        assert first is not None
        first.last_active = 5
        pool.leave(1, 5)
        assert (pool.admit(2, 8, 5) is None) == (not whole)
        second = pool.account(2)
        assert second is None if whole else second is not None and not pool.cool(second.pages.values())
        pool.landed(5)
        assert not whole or pool.admit(2, 8, 6) is None


def test_a_plan_beyond_its_slots_is_a_fault_of_ours() -> None:
    """Without the right to whole pieces some history is put into a slot, which has no room for it: raised, not written
    over the pages behind."""

    def shared_out(local: LocalEngine) -> None:
        local.engine.scheduler.kept.retention = Retention(PagePool(PAGES), rigs.PAGE)

    with pytest.raises(InvariantError, match="rows of slots"):
        rigs.run(rigs.model(), SCRIPT, shared_out, retain="whole")


def test_a_pool_for_less_than_one_history_is_refused_by_name() -> None:
    """A6, in life: the setting to change, with its number."""
    geometry = replace(rigs.model().geometry, layers=32, kv_heads=8, head_dim=128)
    settings = EngineSettings("tiny", host_pool_gib=100.0, concurrency=2, context_tokens=8192, retain="whole")
    wanted = r"--device-pages-gib 1 holds 15 pages, one context needs 32; set --device-pages-gib to 3 or more"
    with pytest.raises(RefusedError, match=wanted):
        fit(geometry, settings)


@pytest.mark.parametrize("more", [{"slot_gib": 1.0}, {"target_pages": 4}, {"headroom_gib": "2"}])
def test_settings_that_would_do_nothing_are_refused(more: dict[str, Any]) -> None:
    """In life: a flag that is silently ignored costs an afternoon."""
    with pytest.raises(UsageError, match="--retain whole"):
        EngineSettings("tiny", retain="whole", **more)


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=40))
def test_whoever_is_admitted_is_whole_and_cool(lives: list[tuple[int, bool]]) -> None:
    """In life: requests of all lengths come and go; steps land later than they are planned."""
    pool, inside = PagePool(8, whole=True), []
    for number, (need, leave) in enumerate(lives):
        if leave and inside:
            pool.leave(inside.pop(0), number)
        if pool.admit(number, need, number) is None:
            account = pool.account(number)
            assert account is not None
            assert account.home is not None
            assert pool.cool(account.pages.values())
            account.last_active = number
            inside.append(number)
        pool.check()
        if number % 3 == 0:
            pool.landed(number - 1)


def test_the_long_workload_is_measured_cold_and_from_the_host() -> None:
    """``bench engine --geometry w3``, small: the second run computes no prompt and stages each history once."""
    settings = EngineSettings("tiny", retain="whole", page_tokens=16, chunk_tokens=64, graphs="on")
    found = long_bench(settings, LongWork(count=3, length=100, answer=8))
    assert found["cold"]["staged_gb"] == 0
    assert found["on_host"]["steps"] < found["cold"]["steps"]
    assert found["on_host"]["seconds"] > 0
