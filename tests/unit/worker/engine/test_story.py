"""Stories: notes in order, bounded, of waits and of pages; and those that a small engine's requests come back with."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common import limits
from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_scheduler import offer, scheduler
from tests.unit.worker.engine.test_turns import FOUR, InTurn, taking_turns
from worker.engine.admission import Decision, PagePool, Reason
from worker.engine.retention import Retention
from worker.engine.story import Story, moves
from worker.structures import Sampling


def test_what_goes_on_is_one_note() -> None:
    """A wait of many steps is one row with its first and last step; another reason is another row."""
    story = Story(10.0, 3)
    story.reached_head(5)
    for step in range(5, 9):
        story.add(step, 10.0 + step / 10, "waited for segments: all 3 are owned")
    story.add(9, 10.9, "admitted")
    story.add(9, 10.9, "took: free page", 1)
    story.add(11, 11.1, "took: free page", 2)
    assert story.told(12.5).splitlines() == [
        "0.00 s, steps 3-4: waited behind other requests",
        "0.50 s, steps 5-8: waited for segments: all 3 are owned",
        "0.90 s, step 9: admitted",
        "0.90 s, steps 9-11: took: free page, 3 device pages",
        "2.50 s: ended",
    ]


@given(st.lists(st.tuples(st.sampled_from(["a", "b" * 300, "c"]), st.integers(0, 9)), max_size=200))
def test_a_story_is_bounded_and_keeps_its_oldest(told: list[tuple[str, int]]) -> None:
    """In life: a context whose pages come and go all night: its result stays small, what is missing is counted."""
    story = Story()
    for step, (words, pages) in enumerate(told):
        story.add(step, 0.0, words, pages)
    lines = story.told(1.0, "history: from pages", "drafts: none").splitlines()
    assert len(lines) <= limits.NOTES_MAX_COUNT
    assert sum(len(line) + 1 for line in lines) <= limits.NOTES_MAX_CHARS
    assert lines[-3:-1] == ["history: from pages", "drafts: none"]
    assert lines[-1] == "1.00 s: ended"
    if told:
        assert told[0][0][:80] in lines[0]
    changes = sum(one[0] != two[0] for one, two in pairwise(told)) + bool(told)
    assert any("left out" in line for line in lines) == (changes > limits.NOTES_MAX_COUNT - 4)


def test_a_note_that_is_too_long_ends_behind_a_word() -> None:
    """In life: words with long numbers: what a reader sees is not torn."""
    story = Story()
    story.add(0, 0.0, "waited " * 60)
    line = story.told(0.0).splitlines()[0]
    assert len(line) <= limits.NOTE_MAX_CHARS
    assert line.endswith(" waited ...")
    story.add(1, 0.0, "x" * 500)
    assert len(story.told(0.0).splitlines()[1]) <= limits.NOTE_MAX_CHARS


def test_a_movement_is_told_to_both_sides_and_names_nobody() -> None:
    """Another request may be another user's."""
    assert list(moves(Decision(0, 1, Reason.FREE, (1,), None, 7))) == [(7, "took: free page")]
    assert [one for one, _ in moves(Decision(0, 1, Reason.BORROWED, (1,), 4, 7))] == [4, 7]
    assert list(moves(Decision(0, 1, Reason.OWN, (1,), 4, 4))) == [(4, "used again: own page outside the window")]
    assert [one for one, _ in moves(Decision(0, 1, Reason.MOVED, (1,), 4, None))] == [4]
    for reason in Reason:
        assert not any(re.search(r"\d", words) for _, words in moves(Decision(9, 9, reason, (1,), 4, 7)))


def test_the_scheduler_tells_who_waited_for_what_and_whose_pages_moved() -> None:
    """A7 and A4, in life: one segment, two requests; then pages that a newcomer's floor takes from a borrower."""
    rules = scheduler(segments=1)
    first, second = offer(rules, 3, 1), offer(rules, 3, 1)
    plan, _ = rules.plan(0, 1.0)
    assert plan is not None
    rules.end(first)
    rules.landed(plan)
    rules.plan(1, 2.0)
    assert "waited" not in first.story.told(3.0)
    notes = second.story.told(3.0).splitlines()
    assert notes[0] == "1.00 s, step 0: waited for segments: all 1 segments of the host pool are owned"
    assert notes[1] == "2.00 s, step 1: admitted"
    rules = scheduler()
    rules.kept.retention = Retention(PagePool(6, target=2), 4)
    borrower = offer(rules, 8, 16)
    rules.plan(0, 1.0)
    newcomer = offer(rules, 8, 16)
    rules.plan(1, 2.0)
    lost = re.findall(r"gave to another request: borrowed page reclaimed, (\d)", borrower.story.told(3.0))
    got = re.findall(r"got from another request: borrowed page reclaimed, (\d)", newcomer.story.told(3.0))
    assert sum(map(int, lost)) == sum(map(int, got)) == 2
    assert newcomer.story.told(3.0).count("took: floor of an admitted context") == 2


def test_requests_behind_the_head_say_so() -> None:
    """In life: a long queue; only its head is looked at, the others waited behind it."""
    rules = scheduler(segments=1)
    first, _, third = offer(rules, 3, 1), offer(rules, 3, 1), offer(rules, 3, 1)
    for step in range(3):
        plan, admitted = rules.plan(step, float(step))
        assert plan is not None
        assert len(admitted) == 1
        rules.end(admitted[0])
        rules.landed(plan)
    assert first.story.told(9.0).startswith("0.00 s, step 0: admitted")
    assert third.story.told(9.0).splitlines()[0] == "0.00 s, step 0: waited behind other requests"


def test_an_engines_answers_come_with_their_stories() -> None:
    """In life: four requests on two segments, turns in pages for less than all: waits, turns and pages are told, once
    each result; the streamed route moves no page."""
    turns = rigs.run(rigs.model(), FOUR, taking_turns(28, InTurn(4, 7)), concurrency=4, retain="on")
    notes = [one.notes for one in turns.finished.values()]
    assert all(re.search(r"s, step 0: admitted\n", one) and one.endswith("s: ended") for one in notes)
    assert all("device page" in one for one in notes)
    assert sum("waited for its turn" in one for one in notes) >= 3
    streamed = rigs.run(rigs.model(), rigs.together(9, 9, 9, 9), concurrency=2)
    notes = [one.notes for one in streamed.finished.values()]
    assert not any("device page" in one for one in notes)
    assert sum("waited for segments" in one for one in notes) >= 1


def test_a_cancelled_request_that_never_ran_tells_its_wait() -> None:
    """In life: a job is cancelled in the queue."""
    script = rigs.Scenario(((9, Sampling(9)), (5, Sampling(2))), {0: (0, 1)}, {3: (1,)})
    outcome = rigs.run(rigs.model(), script, concurrency=1)
    assert outcome.finished[1].reason == "cancelled"
    assert "waited for segments" in outcome.finished[1].notes
    assert "admitted" not in outcome.finished[1].notes
