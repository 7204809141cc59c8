"""Any life of a small fleet whose lines begin alike: who gets what, judged by books of the test's own (H5's routing).

Checked at every line given out: nobody has idle credit while a line waits; nobody is given another's beginning while
there is something else for them, unless a line was passed over often enough; none is passed over more often than that;
within a key the first goes first; each line ends once. Every promise has a control that must fail.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from broker import affinity, scheduler
from broker.effects import AssignLine, Step, StoreResult
from broker.inputs import Faulted, Loaded, Tick
from broker.state import UNOWNED, Line, Session, Window
from common import limits
from common.messages import LineRef
from tests.unit.broker.kit import JOB, beat, came, done, feed, fresh, log_in, result, running_job

PASSED_MAX = 4
KEYS = st.sampled_from((0, 1, 2, 3, 4))
ROOM = 10**9
SETTINGS = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    report_multiple_bugs=False,
)  # fmt: skip
ANY_FAILURE = settings(SETTINGS, phases=[Phase.generate], max_examples=5000)
"""For controls: one that fails is enough, however long and however late it is found."""


class Routing(RuleBasedStateMachine):
    """One job with a window that is refilled, and workers that come, work and go."""

    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.state = fresh()
        self.job = running_job(self.state, 0)
        self.job.good = 1  # a line that never comes: the job does not end
        self.window: Window = self.job.windows["m"]
        self.logins = 0
        # by worker: credit granted, keys had; by line: its key, how often passed over; and what waits, in order
        self.granted: dict[str, int] = {}
        self.own: dict[str, set[int]] = {}
        self.keys: dict[int, int] = {}
        self.passed: Counter[int] = Counter()
        self.waits: list[int] = []
        self.ended: Counter[int] = Counter()
        self.failed = False

    @rule(target=workers)
    def a_worker_comes(self) -> str:
        self.logins += 1
        name = f"w{self.logins}"
        log_in(self.state, name.encode(), worker=name)
        self.own[name], self.granted[name] = set(), 0
        return name

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12))
    def lines_come(self, keys: list[int]) -> None:
        first = len(self.keys)
        lines = tuple(Line(first + place, "u", "m", 0, 10, prefix=key) for place, key in enumerate(keys))
        self.job.good += len(lines)
        for line in lines:
            self.keys[line.index] = line.prefix
            self.waits.append(line.index)
        feed(self.state, Loaded(JOB, "m", lines, 0, True))

    @rule(name=workers, credit=st.integers(0, 6))
    def a_worker_beats(self, name: str, credit: int) -> None:
        session = self.session(name)
        if session is not None:
            seen = session.sent[-1][0] if session.sent else 0
            feed(self.state, came(beat(session, credit, ROOM, assignment=seen), session.peer))
            self.granted[name] = credit

    @rule(name=workers, count=st.integers(1, 4))
    def a_worker_finishes(self, name: str, count: int) -> None:
        session = self.session(name)
        if session is None or not session.lines:
            return
        refs = [LineRef(JOB, line.index, line.held) for line in list(session.lines.values())[:count]]
        step = feed(self.state, came(done(session, *[result(ref) for ref in refs]), session.peer))
        self.ended.update(write.idx for write in step.writes if isinstance(write, StoreResult))

    @rule(name=workers)
    def a_worker_goes(self, name: str) -> None:
        session = self.session(name)
        if session is None:
            return
        self.waits = [line.index for line in session.lines.values()] + self.waits
        feed(self.state, Faulted(session.peer, "x", "its link broke"))
        del self.own[name], self.granted[name]

    @rule()
    def lines_are_given_out(self) -> None:
        step = feed(self.state, Tick(10**12))
        self.failed = True
        self.judge(step)
        if self.waits:
            assert not any(self.granted.values()), f"{self.granted} idle while {len(self.waits)} lines wait"
        self.failed = False

    def session(self, name: str) -> Session | None:
        return self.state.by_worker.get(name)

    def judge(self, step: Step) -> None:
        """Each line given out, in the order of the decisions."""
        for write in step.writes:
            if not isinstance(write, AssignLine):
                continue
            index, name = write.idx, write.worker
            key, head = self.keys[index], self.waits[0]
            overdue = index == head and self.passed[head] >= PASSED_MAX
            if not overdue:
                self.judge_key(name, key)
            assert index == next(one for one in self.waits if self.keys[one] == key), "not the first of its key"
            if index != head:
                self.passed[head] += 1
                assert self.passed[head] <= PASSED_MAX, f"line {head} is passed over again and again"
            if key and not overdue:
                self.own[name].add(key)
            self.waits.remove(index)
            self.granted[name] -= 1
            assert self.granted[name] >= 0, "more than the credit"

    def judge_key(self, name: str, key: int) -> None:
        waiting = {self.keys[one] for one in self.waits}
        if key not in self.own[name]:
            assert not waiting & self.own[name], f"{name} is given key {key} and has {waiting & self.own[name]}"
            others = set().union(*self.own.values())
            assert key not in others or waiting <= others, f"{name} is given key {key}, others' own, out of {waiting}"

    def teardown(self) -> None:
        """To the end: whoever is there, or a last worker, runs all that is left."""
        if self.failed:
            return
        name = next(iter(self.own), None) or self.a_worker_comes()
        for _ in range(len(self.keys) + 2 * len(self.own) + 2):
            self.a_worker_finishes(name, 4)
            self.a_worker_beats(name, 6)
            self.lines_are_given_out()
            for other in list(self.own):
                self.a_worker_finishes(other, 4)
        assert self.ended == Counter(dict.fromkeys(self.keys, 1))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PASSED_OVER_MAX_COUNT", PASSED_MAX)
    monkeypatch.setattr(scheduler, "QUANTUM_LINES", 3)


def test_any_life_keeps_beginnings_together_and_nobody_idle() -> None:
    """Workers come, beat, finish and break; documents come in any order."""
    run_state_machine_as_test(Routing, settings=SETTINGS)


def fails(words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_state_machine_as_test(Routing, settings=ANY_FAILURE)


def test_control_the_head_to_whoever_asks_parts_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the preference."""
    monkeypatch.setattr(affinity, "choose", lambda state, session, window, stack: (window.head, UNOWNED))
    fails("is given key")


def test_control_a_preference_without_a_bound_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the bound on passing over."""
    monkeypatch.setattr(limits, "PASSED_OVER_MAX_COUNT", 10**9)
    fails("passed over again and again")


def test_control_a_worker_kept_to_its_own_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: who may not help with another's document has credit and gets nothing."""
    real = scheduler._give

    def give(state: Any, job: Any, window: Window, session: Session, *rest: Any) -> None:
        if all(key in state.owners and key not in session.keys for key in window.groups):
            session.credit_lines = 0
        else:
            real(state, job, window, session, *rest)

    monkeypatch.setattr(scheduler, "_give", give)
    fails("idle while")


def test_control_the_last_of_a_key_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the order within a key turned round."""
    monkeypatch.setattr(Window, "group_head", lambda self, key: next(reversed(self.groups[key].values())))
    fails("not the first of its key")
