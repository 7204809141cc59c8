"""H5's books: shared histories are opened, joined, cached, let go; no life of requests breaks them or stops."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from common.limits import PASSED_BY_MAX_COUNT
from common.messages import LineRef
from worker.engine.admission import PagePool
from worker.engine.contexts import Context, StepPlan
from worker.engine.fit import Fit, rounded_up
from worker.engine.page_leases import PageLeases
from worker.engine.retention import Retention
from worker.engine.scheduler import Scheduler
from worker.engine.segments import SegmentBook
from worker.structures import Request, Sampling, SharedPrefix

PAGE, CONTEXT = 4, 32


def scheduler(
    concurrency: int = 3, longs: int = 1, short: int = 0, chunk: int = 8, slot: int = 0, pages: int = 0
) -> Scheduler:
    """Segments of 32 rows; with ``short`` the contexts' own have so many."""
    own = short or CONTEXT
    most = concurrency * own + (longs * CONTEXT if short else 0)
    fit = Fit(concurrency, CONTEXT, PAGE, slot or most, 1000, 0, 0, (), longs=longs, short_rows=short)
    book = SegmentBook(PageLeases(fit.segments), concurrency, longs)
    return Scheduler(fit, chunk, book, Retention(PagePool(pages), PAGE) if pages else None)


def offer(rules: Scheduler, prompt: int, tokens: int, shared: tuple[str, int] | None = None) -> Context:
    """A request of ``prompt`` and ``tokens``, and what it shares."""
    prefix = None if shared is None else SharedPrefix(*shared)
    number = rules._numbers
    request = Request(LineRef("j", number, 1), "/v1/completions", "m", prompt, Sampling(tokens), prefix)
    return rules.offer(request, 7, 100 * number)


class Life:
    """Plans and lands one step late, as the engine does; ``check`` after each."""

    def __init__(self, rules: Scheduler) -> None:
        self.rules, self.step = rules, 0
        self.behind: StepPlan | None = None
        self.rows: Counter[int] = Counter()
        """Rows planned of each context and shared history."""
        self.ended: list[Context] = []

    def plan(self) -> StepPlan | None:
        plan, _ = self.rules.plan(self.step)
        if self.behind is not None:
            self.rules.landed(self.behind)
            for share in self.behind.shares:
                context, most = share.context, share.context.request.sampling.max_tokens
                if share.samples and share.number + 1 == most and not context.ended:
                    self.rules.end(context)
                    self.ended.append(context)
        self.rules.check()
        if plan is not None:
            self._look(plan)
        self.behind = plan
        self.step += 1
        return plan

    def _look(self, plan: StepPlan) -> None:
        """Each row is planned once, in order; who shares stands last, by history, and reads a whole one."""
        covered = 0
        for one in plan.joined:
            assert one.history.prefilled == one.history.prompt_tokens
            assert self.rows[one.history.number] == one.history.prompt_tokens, "it was whole before this step"
            members = plan.shares[one.first : one.first + one.count]
            assert all(share.context.shared is one.history for share in members)
            covered += one.count
        assert all(share.context.shared is None for share in plan.shares[: len(plan.shares) - covered])
        assert covered == sum(share.context.shared is not None for share in plan.shares)
        slot = sum(rounded_up(share.own_start + share.rows, PAGE) for share in plan.shares)
        slot += sum(one.history.prompt_tokens for one in plan.joined)
        assert slot <= self.rules._fit.slot_rows
        for share in plan.shares:
            number = share.context.number
            assert share.own_start == self.rows[number]
            self.rows[number] += share.rows

    def run(self, most: int = 400) -> None:
        for _ in range(most):
            if self.plan() is None and self.rules.idle and self.behind is None:
                return
        raise AssertionError(f"still at work after {most} steps: {[one.waits for one in self.rules.waiting]}")


def test_a_shared_history_is_prefilled_once_and_members_start_behind_it() -> None:
    """In life: three questions on a document of four pages: its rows, then each one's own, one step later."""
    life = Life(scheduler())
    first, *_ = (offer(life.rules, 16 + own, 2, ("doc", 16)) for own in (1, 2, 3))
    plans = [life.plan() for _ in range(3)]
    shares = [[(one.context.number, one.start, one.rows, one.number) for one in plan.shares] for plan in plans if plan]
    document = first.shared
    assert document is not None
    assert shares[0] == [(document.number, 0, 8, -1)]
    assert shares[1] == [(document.number, 8, 8, -1)]
    assert shares[2] == [(0, 16, 1, 0), (1, 16, 2, 0), (2, 16, 3, 0)]
    assert [(one.first, one.count) for plan in plans if plan for one in plan.joined] == [(0, 3)]
    life.run()
    assert life.rows[document.number] == 16


def test_who_waits_for_it_does_not_run_in_the_step_that_ends_it() -> None:
    """In life: a chunk has rows left behind a document: they are not its questions', whose copies would miss its last
    rows."""
    life = Life(scheduler(chunk=12))
    members = [offer(life.rules, 17, 1, ("doc", 16)) for _ in range(2)]
    document = None
    for rows in (12, 4, 2):
        plan = life.plan()
        assert plan is not None
        document = document or members[0].shared
        assert document is not None
        assert plan.rows == rows
        assert bool(plan.joined) == (rows == 2)
    first, second = (one.story.told(0.0) for one in members)
    assert first.count("steps 0-1: prefilled the 16 tokens that it shares") == 1
    assert second.count("steps 0-1: waited for another request to prefill the 16 tokens that it shares") == 1


def test_a_slot_holds_shared_rows_once() -> None:
    """A7, in life: --slot-gib: two questions and their document fit where two whole histories would not; the next one
    waits, with what is left beside the document."""
    life = Life(scheduler(slot=40))
    members = [offer(life.rules, 28, 4, ("doc", 24)), offer(life.rules, 26, 6, ("doc", 24))]
    late = offer(life.rules, 3, 3)
    life.plan()
    assert all(one.page is not None for one in members)
    assert late.waits == "needs 8 rows of a staging slot, 0 of 40 are free"
    life.run()
    assert late.ended


def test_one_that_is_whole_stays_until_its_segment_is_wanted() -> None:
    """In life: the next question on the document comes later, and then one on another document."""
    life = Life(scheduler())
    offer(life.rules, 18, 1, ("one", 16))
    life.run()
    life.rules.reclaim(life.step)
    assert (len(life.rules.shared), life.rules.shared.members) == (1, 0)
    again = offer(life.rules, 20, 1, ("one", 16))
    life.run()
    assert life.rows[again.number] == 4
    life.rules.reclaim(life.step)
    other = offer(life.rules, 18, 1, ("two", 16))
    life.run()
    assert other.shared is not None
    assert [one.request.ref.index for one in life.rules.shared] == [other.number]


def test_where_all_long_segments_are_read_a_request_runs_alone() -> None:
    """In life: two documents at once, room for one shared history: the other's questions run as they always did."""
    life = Life(scheduler())
    shares, alone = offer(life.rules, 18, 4, ("one", 16)), offer(life.rules, 18, 4, ("two", 16))
    life.run()
    assert shares.shared is not None
    assert (alone.shared, life.rows[alone.number]) == (None, 18 + 3)


def test_with_short_segments_who_fits_none_waits_with_a_reason() -> None:
    """A7, in life: --own-tokens 8: the second document waits for the long segment, with its numbers; a short request
    does not need it."""
    life = Life(scheduler(short=8))
    offer(life.rules, 20, 4, ("one", 16))
    small, late = offer(life.rules, 4, 2), offer(life.rules, 20, 4, ("two", 16))
    life.plan()
    assert small.page is not None
    assert small.page.index < 3
    assert late.waits == "the 16 tokens it shares need one; all 1 of --shared-histories are owned"
    assert life.rules.waits["whole segments"] == 1
    life.run()
    assert late.shared is not None


def test_an_own_part_that_is_too_long_says_which_setting_would_do() -> None:
    """In life: --own-tokens 8, questions of 9 tokens with answer and what is left of a page: each runs alone, and is
    told the number that decides, which is not the whole length."""
    life = Life(scheduler(short=8))
    first, second = offer(life.rules, 20, 5, ("one", 16)), offer(life.rules, 20, 5, ("one", 16))
    fits = offer(life.rules, 20, 4, ("one", 16))
    life.plan()
    assert "step 0: admitted to run alone: own part needs 9 tokens, --own-tokens holds 8" in first.story.told(0.0)
    assert second.waits == "own part needs 9 tokens, --own-tokens holds 8; all 1 of --shared-histories are owned"
    assert "own part" not in fits.story.told(0.0), "control: one token fewer fits"
    life.run()
    assert (first.shared, second.shared) == (None, None)
    assert fits.shared is not None


def test_short_requests_pass_a_head_that_waits_for_a_whole_segment() -> None:
    """In life: --own-tokens 8, all whole segments owned: a long line waits, the short ones behind it need none and run;
    one that needs slot rows that are not there waits behind it like before, and so do those behind that."""
    life = Life(scheduler(short=8, concurrency=4))
    offer(life.rules, 20, 9)
    head, short, whole, last = offer(life.rules, 20, 9), offer(life.rules, 4, 2), offer(life.rules, 9, 9), offer(
        life.rules, 3, 2
    )  # fmt: skip
    life.plan()
    assert [one.page is not None for one in (head, short, whole, last)] == [False, True, False, True]
    assert head.passed_by == 2
    life.run()
    assert [one.number for one in life.ended].index(whole.number) > [one.number for one in life.ended].index(
        head.number
    )


def test_who_waits_for_a_whole_segment_is_not_passed_for_ever() -> None:
    """In life: questions on one document keep coming, and a long line that needs its segment: after so many it goes
    first, as the readers of the document leave. Control: they did pass it."""
    life = Life(scheduler(short=8, concurrency=4))
    offer(life.rules, 20, 4, ("one", 16))
    life.plan()
    head = offer(life.rules, 20, 9)
    for number in range(4 * PASSED_BY_MAX_COUNT):
        offer(life.rules, 20, 1 + number % 4, ("one", 16))
    life.run(4000)
    ended = [one.number for one in life.ended]
    assert head.passed_by == PASSED_BY_MAX_COUNT
    assert ended.index(head.number) < 2 * PASSED_BY_MAX_COUNT


def test_a_long_request_alone_takes_a_whole_segment() -> None:
    """In life: --own-tokens 8, and a request whose own part is longer: it runs alone in the long segment."""
    life = Life(scheduler(short=8))
    big = offer(life.rules, 20, 4, ("one", 12))
    life.plan()
    assert big.page is not None
    assert (big.page.index, big.shared) == (3, None)
    life.run()


@pytest.mark.parametrize(
    ("prompt", "shared"), [(16, 16), (16, 20), (18, 15), (18, 0), (31, 36)], ids=["all", "more", "page", "0", "long"]
)
def test_what_cannot_be_shared_runs_alone(prompt: int, shared: int) -> None:
    """In life: a prefix that is the whole prompt, no whole pages, nothing: nobody is refused for it."""
    life = Life(scheduler())
    context = offer(life.rules, prompt, 1, ("doc", shared))
    life.run()
    assert context.shared is None
    assert context.ended


def test_pages_that_hold_no_two_contexts_let_one_run_alone() -> None:
    """A4, in life: a device pool with room for one context's right: sharing needs two accounts, so it runs alone."""
    rules = scheduler(concurrency=1, pages=3)
    rules.kept.retention = Retention(PagePool(3, target=3), PAGE)
    life = Life(rules)
    context = offer(rules, 18, 2, ("doc", 16))
    life.run()
    assert context.shared is None
    assert len(rules.shared) == 0


def test_one_that_is_read_is_not_let_go() -> None:
    """The books refuse it."""
    life = Life(scheduler())
    context = offer(life.rules, 18, 2, ("doc", 16))
    life.plan()
    one = life.rules.shared.of(context)
    assert one is not None
    with pytest.raises(InvariantError, match="let go while it is read"):
        life.rules.shared.let_go(one, life.rules.kept, 0)


def test_the_books_find_a_member_too_many() -> None:
    """Control: whoever forgets to leave is found."""
    life = Life(scheduler())
    context = offer(life.rules, 18, 2, ("doc", 16))
    life.plan()
    one = life.rules.shared.of(context)
    assert one is not None
    one.members[99] = context
    with pytest.raises(InvariantError, match="members are booked"):
        life.rules.check()
    del one.members[99]
    one.whole_at = 3
    with pytest.raises(InvariantError, match="whole and is not"):
        life.rules.check()


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    concurrency=st.integers(1, 4),
    longs=st.integers(1, 3),
    short=st.sampled_from([0, 0, 8, 12]),
    chunk=st.integers(1, 9),
    slot=st.integers(0, 3),
    pages=st.sampled_from([0, 0, 6, 40]),
    target=st.sampled_from([0, 2, 5]),
)
def test_any_life_of_shared_histories_ends_with_all_given_back(
    data: st.DataObject, concurrency: int, longs: int, short: int, chunk: int, slot: int, pages: int, target: int
) -> None:
    """Random arrivals on three documents and none, cancels at every point, landings one late, documents cached and let
    go: rows are planned once and in order, members are counted, slots hold what is planned, nobody waits for ever, and
    every segment and page comes back."""
    rules = scheduler(concurrency, longs, short, chunk, slot and CONTEXT + slot * PAGE)
    if pages:
        rules.kept.retention = Retention(PagePool(max(pages, 2 * concurrency), target), PAGE)
    life, alive = Life(rules), list[Context]()
    arrivals = data.draw(st.integers(1, 10))
    while arrivals or alive:
        assert life.step < 1500, [one.waits for one in rules.waiting]
        if arrivals and (life.step > 60 or data.draw(st.booleans())):
            arrivals -= 1
            prompt = data.draw(st.integers(1, 28))
            pick = data.draw(st.sampled_from([None, ("a", 4), ("b", 12), ("c", 24)]))
            alive.append(offer(rules, prompt, data.draw(st.integers(1, CONTEXT - prompt)), pick))
        if alive and life.step < 90 and data.draw(st.integers(0, 5)) == 0:
            rules.end(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        life.plan()
        alive = [one for one in alive if not one.ended]
    life.run()
    rules.reclaim(life.step)
    assert rules.shared.members == 0
    rules.shared.release(rules.kept, life.step)
    rules.check()
    assert (rules.segments.held, rules.segments.free_longs) == (0, longs)
    if rules.kept.retention is not None:
        assert rules.kept.retention.pool.free == rules.kept.retention.pool.capacity
