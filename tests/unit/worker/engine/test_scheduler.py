"""Plans: decodes first, prompts in chunks, admission in order with reasons; books over random lives of contexts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantError
from common.messages import LineRef
from worker.engine.contexts import Context, StepPlan
from worker.engine.fit import Fit
from worker.engine.page_leases import ContextSet, PageLeases
from worker.engine.scheduler import Scheduler
from worker.engine.segments import SegmentBook
from worker.structures import Request, Sampling

PAGE, CONTEXT = 4, 32


def scheduler(segments: int = 3, slot_rows: int = 3 * CONTEXT, chunk: int = 8) -> Scheduler:
    """Segments of 32 rows."""
    fit = Fit(segments, CONTEXT, PAGE, slot_rows, 1000, 0, 0, ())
    return Scheduler(fit, chunk, SegmentBook(PageLeases(segments), segments))


def offer(rules: Scheduler, prompt: int, tokens: int) -> Context:
    """A request of ``prompt`` and ``tokens``."""
    request = Request(LineRef("j", rules._numbers, 1), "/v1/completions", "m", prompt, Sampling(tokens))
    return rules.offer(request, 0, 0)


def rows_of(plan: StepPlan | None) -> dict[int, tuple[int, int, int]]:
    """Context to (start, rows, number sampled)."""
    return {} if plan is None else {s.context.number: (s.start, s.rows, s.number) for s in plan.shares}


def test_decodes_go_first_and_prompts_share_the_rest() -> None:
    """In life: a long prompt is prefilled beside a decoding request without stopping it."""
    rules = scheduler()
    offer(rules, 3, 4)
    offer(rules, 20, 2)
    assert rows_of(rules.plan(0)[0]) == {0: (0, 3, 0), 1: (0, 5, -1)}
    assert rows_of(rules.plan(1)[0]) == {0: (3, 1, 1), 1: (5, 7, -1)}
    assert rows_of(rules.plan(2)[0]) == {0: (4, 1, 2), 1: (12, 7, -1)}
    assert rows_of(rules.plan(3)[0]) == {0: (5, 1, 3), 1: (19, 1, 0)}
    assert rows_of(rules.plan(4)[0]) == {1: (20, 1, 1)}
    assert rules.plan(5)[0] is None


def test_a_prompt_moves_even_when_decodes_fill_the_chunk() -> None:
    """In life: more requests decode than a chunk has rows; nobody starves."""
    rules = scheduler(chunk=1)
    offer(rules, 1, 9)
    rules.plan(0)
    offer(rules, 2, 3)
    assert rows_of(rules.plan(1)[0]) == {0: (1, 1, 1), 1: (0, 1, -1)}


def test_a_wait_has_its_reason_with_numbers() -> None:
    """A7, in life: no segment free, or no slot rows; the reason is on record and goes when it is admitted."""
    rules = scheduler(segments=1)
    first, second = offer(rules, 3, 1), offer(rules, 3, 1)
    plan, admitted = rules.plan(0)
    assert admitted == [first]
    assert plan is not None
    assert "segments" in second.waits
    assert rules.waits["segments"] == 1
    assert rules.held_up == (second.request.ref, f"segments: {second.waits}")
    rules.end(first)
    rules.landed(plan)
    assert rules.plan(1)[1] == [second]
    assert (second.waits, rules.held_up) == ("", None)
    narrow = scheduler(slot_rows=40)
    offer(narrow, 20, 4)
    late = offer(narrow, 20, 4)
    narrow.plan(0)
    assert "needs 24 rows of a staging slot, 16 of 40 are free" in late.waits


def test_an_ended_context_keeps_its_segment_until_it_has_landed() -> None:
    """L8, in life: cancelled with two steps in flight; its segment is nobody else's before both are over."""
    rules = scheduler(segments=1)
    first = offer(rules, 3, 9)
    second = offer(rules, 3, 1)
    plans = [rules.plan(0)[0], rules.plan(1)[0]]
    rules.end(first)
    for step, plan in enumerate(plans):
        assert plan is not None
        rules.landed(plan)
        assert (rules.plan(2 + step)[1] == [second]) == (step == 1)
    rules.check()


def test_an_ended_context_keeps_its_segment_while_a_lease_touches_it() -> None:
    """L8, in life: its last step has landed, but a layer's write-back of it is not retired: nobody gets the segment."""
    leases = PageLeases(1)
    rules = Scheduler(Fit(1, CONTEXT, PAGE, CONTEXT, 1000, 0, 0, ()), 8, SegmentBook(leases, 1))
    first, second = offer(rules, 3, 9), offer(rules, 3, 1)
    plan, _ = rules.plan(0)
    assert plan is not None
    assert first.page is not None
    contexts = ContextSet((first.number,), (first.page,))
    leases.hold(contexts)
    rules.end(first)
    rules.landed(plan)
    assert rules.plan(1) == (None, [])
    leases.drop(contexts)
    assert rules.plan(2)[1] == [second]


def test_a_plan_lands_once() -> None:
    """The books find a step that lands twice."""
    rules = scheduler()
    offer(rules, 3, 3)
    plan, _ = rules.plan(0)
    assert plan is not None
    rules.landed(plan)
    try:
        rules.landed(plan)
    except InvariantError:
        return
    raise AssertionError("a step landed twice and nobody noticed")


@settings(max_examples=60)
@given(
    data=st.data(),
    segments=st.integers(1, 4),
    chunk=st.integers(1, 9),
    slot=st.integers(CONTEXT, 4 * CONTEXT),
)
def test_any_life_keeps_the_books_and_computes_each_row_once(
    data: st.DataObject, segments: int, chunk: int, slot: int
) -> None:
    """Random arrivals, cancels and one-late landings: rows of each context are planned in order, once, within what
    it asked for; nobody runs past max_tokens; all segments come back."""
    rules = scheduler(segments, slot, chunk)
    rows: dict[int, int] = {}
    tokens: dict[int, int] = {}
    alive: list[Context] = []
    behind: StepPlan | None = None
    arrivals = data.draw(st.integers(1, 8))
    for step in range(400):
        if arrivals and data.draw(st.booleans()):
            arrivals -= 1
            prompt = data.draw(st.integers(1, 20))
            alive.append(offer(rules, prompt, data.draw(st.integers(1, CONTEXT - prompt))))
        if alive and data.draw(st.integers(0, 9)) == 0:
            rules.end(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        plan, _ = rules.plan(step)
        if behind is not None:
            rules.landed(behind)
            for share in behind.shares:
                if share.number + 1 == share.context.request.sampling.max_tokens and not share.context.ended:
                    rules.end(share.context)
                    alive.remove(share.context)
        rules.check()
        if plan is not None:
            assert list(plan.shares) == sorted(plan.shares, key=lambda s: (s.prompt, s.page.index))
            assert len({s.page.index for s in plan.shares}) == len(plan.shares)
            for share in plan.shares:
                number = share.context.number
                assert share.start == rows.get(number, 0)
                rows[number] = share.start + share.rows
                assert rows[number] <= share.context.prompt_tokens + share.context.request.sampling.max_tokens
                if share.samples:
                    assert share.number == tokens.get(number, 0)
                    tokens[number] = share.number + 1
        behind = plan
        if plan is None and not arrivals and rules.idle:
            break
    rules.reclaim(step + 1)
    assert rules.idle
    assert rules.segments.held == 0
