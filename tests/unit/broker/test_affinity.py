"""Lines that begin alike go to one worker, nobody idles for it, and nothing waits for ever because of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from broker import affinity, scheduler
from broker.effects import SendBatch
from broker.inputs import Loaded, Tick
from broker.state import HAS_IT, HELPS, NOT_SAID, PASSED_OVER, UNOWNED, Line, Session, State
from common import limits
from common.messages import HeldLine, LineRef
from tests.unit.broker.kit import JOB, NOW, beat, came, done, feed, fresh, give, later, log_in, result, running_job

DISK = Tick(10**12)
A, B = 7, 9


def two_workers(state: State, lines: int) -> tuple[Session, Session]:
    """Both ready, each with credit for ``lines``; nothing given out yet."""
    first, second = log_in(state), log_in(state, b"q", worker="v")
    feed(state, came(beat(first, lines, 10**6)))
    feed(state, came(beat(second, lines, 10**6), b"q"))
    return first, second


def keys_of(session: Session) -> list[int]:
    return sorted(line.prefix for line in session.lines.values())


def test_each_of_two_documents_goes_to_a_worker_of_its_own() -> None:
    """Ten questions about each of two documents, in turns in the file: five at a time, and each worker keeps to one."""
    state = fresh()
    running_job(state, 20, keys=(A, B))
    first, second = two_workers(state, 5)
    feed(state, DISK)
    assert sorted((keys_of(first), keys_of(second))) == [[A] * 5, [B] * 5]
    mine = keys_of(first)[0]
    feed(state, came(done(first, *[result(LineRef(*ref, 1)) for ref in list(first.lines)])))
    assert not first.lines
    give(state, first, lines=5, size=10**6, assignment=10)
    assert keys_of(first) == [mine] * 5


def test_control_without_the_preference_both_documents_are_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the window's head to whoever asks."""
    monkeypatch.setattr(affinity, "choose", lambda state, session, window, stack: (window.head, UNOWNED))
    state = fresh()
    running_job(state, 20, keys=(A, B))
    first, second = two_workers(state, 5)
    feed(state, DISK)
    assert set(keys_of(first)) == set(keys_of(second)) == {A, B}


def test_what_nobody_has_comes_before_what_others_have() -> None:
    """The first line is another worker's by its beginning, the second is anybody's."""
    state = fresh()
    running_job(state, 3, keys=(A, A, 0))
    first, second = two_workers(state, 0)
    affinity.own(state, first, A)
    assert [ref.index for ref in give(state, second, lines=1)] == [2]
    assert second.lines[JOB, 2].why == UNOWNED
    assert [ref.index for ref in give(state, first, lines=1)] == [0]
    assert first.lines[JOB, 0].why == HAS_IT


def test_nobody_idles_for_a_document() -> None:
    """Only another's document is left: who has nothing else helps, with the longest queue, and goes on with it."""
    state = fresh()
    running_job(state, 7, keys=(A, B, B, A, B, B, B))
    first, second = two_workers(state, 0)
    affinity.own(state, first, A)
    affinity.own(state, first, B)
    assert [ref.index for ref in give(state, second, lines=7)] == [1, 2, 4, 5, 6, 0, 3]
    assert [second.lines[JOB, index].why for index in (1, 2, 0, 3)] == [HELPS, HAS_IT, HELPS, HAS_IT]
    assert set(second.keys) == {A, B}


def test_a_document_is_anybodys_once_its_worker_is_gone() -> None:
    """Ownership ends with the session, and its lines wait again under their keys."""
    state = fresh()
    running_job(state, 6, keys=(A, 0))
    first, _ = two_workers(state, 0)
    give(state, first, lines=2)
    assert dict(state.owners) == {A: 1}
    feed(state, DISK, later(limits.LIVENESS_S + 1))
    assert not state.owners
    third = log_in(state, b"r", later(6), worker="u")
    assert [ref.index for ref in give(state, third, lines=4)] == [0, 2, 4, 1]


def test_a_claimed_line_brings_its_document_along() -> None:
    """After a restart of the broker the workers' claims say who has what."""
    state = fresh(grace_until=NOW.mono + 30)
    job = running_job(state, 4, keys=(A, B))
    line = job.windows["m"].lines[0]
    job.windows["m"].drop(0)
    line.attempt = line.held = 1
    line.worker = "w"
    job.assigned[0] = line
    state.absent.add("w")
    session = log_in(state, held=(HeldLine(LineRef(JOB, 0, 1), "running"),))
    assert (line.session, line.why, list(session.keys)) == (session, NOT_SAID, [A])
    assert [ref.index for ref in give(state, session, lines=1)] == [2]


def test_of_equals_the_one_who_has_the_head_is_asked() -> None:
    """Requests that come one at a time to an idle fleet: the second finds the first one's worker."""
    for owner in (0, 1):
        state = fresh()
        running_job(state, 1, keys=(A,))
        sessions = two_workers(state, 4)
        affinity.own(state, sessions[owner], A)
        feed(state, DISK)
        assert len(sessions[owner].lines) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million documents, one question each: a worker is known by its newest, and the books agree."""
    monkeypatch.setattr(limits, "KEYS_A_SESSION_MAX_COUNT", 3)
    state = fresh()
    running_job(state, 20, keys=range(1, 21))
    session = log_in(state)
    give(state, session, lines=20)
    assert list(session.keys) == [18, 19, 20]
    assert dict(state.owners) == {18: 1, 19: 1, 20: 1}


def test_the_search_for_one_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window full of others' documents is not read to its end for each line: then somebody is helped."""
    monkeypatch.setattr(limits, "KEYS_SEARCHED_MAX_COUNT", 2)
    state = fresh()
    running_job(state, 4, keys=(1, 2, 3, 0))
    first, second = two_workers(state, 0)
    for key in (1, 2, 3):
        affinity.own(state, first, key)
    refs = give(state, second, lines=1)
    assert [(ref.index, second.lines[JOB, ref.index].why) for ref in refs] == [(0, HELPS)]


def endless(count: int, passed_max: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """One worker with document A, a line of B at the head, and A's lines coming for ever: how many go before B's."""
    if passed_max is not None:
        monkeypatch.setattr(limits, "PASSED_OVER_MAX_COUNT", passed_max)
    state = fresh()
    job = running_job(state, 3, keys=(B, A, A))
    session = log_in(state)
    affinity.own(state, session, A)
    for number in range(count):
        refs = give(state, session, lines=1, assignment=number)
        if refs[0].index == 0:
            return number
        feed(state, came(done(session, *[result(ref) for ref in refs])))
        job.good += 1
        feed(state, Loaded(JOB, "m", (Line(number + 3, "u", "m", 0, 10, prefix=A),), 0, True))
    return count


def test_no_line_is_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document with endless questions: another one's turn comes all the same, after a bounded number of them."""
    assert endless(100, 16, monkeypatch) == 16


def test_control_without_the_bound_a_line_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the preference alone never takes it."""
    assert endless(100, 10**9, monkeypatch) == 100


def test_who_is_given_an_overdue_line_does_not_keep_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line whose time has come is no reason for two workers to have one document for good."""
    monkeypatch.setattr(limits, "PASSED_OVER_MAX_COUNT", 2)
    state = fresh()
    running_job(state, 8, keys=(B, B, B, B, A, A, A, A))
    first, second = two_workers(state, 0)
    affinity.own(state, first, B)
    affinity.own(state, second, A)
    assert [ref.index for ref in give(state, second, lines=3)] == [4, 5, 0]
    assert second.lines[JOB, 0].why == PASSED_OVER
    assert list(second.keys) == [A]


def test_a_quantum_is_no_longer_for_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of another job is looked at after as many lines as before."""
    monkeypatch.setattr(scheduler, "QUANTUM_LINES", 4)
    state = fresh()
    other = "00000000-0000-4000-8000-000000000002"
    running_job(state, 20, keys=(A,), owner="one")
    running_job(state, 20, other, keys=(B,), owner="two")
    session = log_in(state)
    feed(state, came(beat(session, 16, 10**6)))
    step = feed(state, DISK)
    order = [line.ref.job for send in step.sends if isinstance(send, SendBatch) for line in send.lines]
    assert Counter(order) == {JOB: 8, other: 8}
    assert order == [JOB] * 4 + [other] * 4 + [JOB] * 4 + [other] * 4


@pytest.mark.parametrize("keys", [(0,), (A, B), (0, A, 0, B), range(1, 9)])
def test_a_lone_worker_gets_each_documents_lines_in_order(keys: Sequence[int]) -> None:
    """First come, first served, within a key."""
    state = fresh()
    running_job(state, 24, keys=keys)
    refs = give(state, log_in(state), lines=24)
    for key in set(keys):
        assert (mine := [ref.index for ref in refs if keys[ref.index % len(keys)] == key]) == sorted(mine)
    assert len(refs) == 24
