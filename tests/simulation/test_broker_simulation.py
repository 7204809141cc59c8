"""Seeded schedules of drops, kills, restarts and takeovers against the broker's real turn, rules and store (D1-D4, S4).

A failure names its seed; ``World(seed, faults).play()`` replays it. Each promise has a control that must fail without
the rule it rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from broker import recovery, suspects
from broker.effects import Step
from broker.server import Server
from broker.store import Store
from tests.simulation.world import Broken, Faults, World

SCHEDULES = 60
ROUGH = Faults()
ONLY_BROKER = Faults(cut=0, kill_worker=0, leave=0, kill_broker=0.1, takeover=0.02, pause=0, wall_jump=0.02)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of log lines are no use here; the seed replays them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


def fails(schedule: Callable[[int], World], tries: int = 200) -> str:
    """The first failure of ``tries`` schedules; empty if all pass."""
    for seed in range(tries):
        try:
            schedule(seed)
        except Broken as broken:
            return str(broken)
    return ""


def test_every_line_ends_once_whatever_dies() -> None:
    """Links, workers and brokers die at any point: each line has its one right end, and nothing acked is lost."""
    counts: dict[str, int] = {}
    for seed in range(SCHEDULES):
        for name, count in World(seed, ROUGH).play().counts.items():
            counts[name] = counts.get(name, 0) + count
    assert counts["kill_worker"]
    assert counts["crash_before_commit"]
    assert counts["crash_between_sends"]
    assert counts["takeover"]


def test_a_job_cancelled_at_any_moment_accounts_for_every_line() -> None:
    """Cancel while lines run and brokers die: finished ids are output, the others say batch_cancelled (cases 16)."""
    cancelled = 0
    for seed in range(SCHEDULES):
        world = World(seed, Faults(cancel=0.05)).play()
        status = world.connection.execute("SELECT status FROM jobs").fetchone()[0]
        cancelled += status == "cancelled"
    assert cancelled > SCHEDULES // 2


def only_broker_dies(seed: int, **changes: Any) -> World:
    """The workers live on and reconnect: nothing may run twice (D3)."""
    world = World(seed, ONLY_BROKER, blocking=False, **changes).play()
    again = {str(line): count for line, count in world.runs.items() if count > 1}
    if again:
        raise Broken(f"seed {seed}: ran again though its worker lived: {again}")
    return world


def test_nothing_runs_twice_when_only_the_broker_dies() -> None:
    """Broker restarted while workers are busy (cases 2): claimed lines are kept, finished ones are taken."""
    crashes = sum(only_broker_dies(seed).counts.total() for seed in range(SCHEDULES))
    assert crashes > SCHEDULES


def test_control_without_the_grace_lines_run_twice() -> None:
    """Control: a broker that gives away at once what was assigned before its restart makes work run twice."""
    assert "ran again" in fails(lambda seed: only_broker_dies(seed, grace_s=0.0))


def test_control_without_claims_lines_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a broker that does not read what a worker lists as held makes work run twice."""
    real = recovery.claim
    monkeypatch.setattr(recovery, "claim", lambda state, session, held, *rest: real(state, session, [], *rest))
    assert "ran again" in fails(only_broker_dies)


def test_control_without_the_incarnation_row_a_hung_broker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a broker that does not look whether it was replaced goes on speaking for a store that is another's."""
    monkeypatch.setattr(Store, "check_incarnation", lambda self: None)
    assert "taken over" in fails(lambda seed: World(seed, ROUGH).play())


class SpeaksFirst(Server):
    """Says what a turn decided before the turn is committed."""

    def _feed(self, input: Any) -> None:
        super()._feed(input)
        self._speak()


def test_control_speaking_before_the_commit_loses_acked_results() -> None:
    """Control: an ack that leaves before its commit is a lie when the process dies in between (D1)."""
    faults = Faults(takeover=0, kill_broker=0.1)
    assert "acked and not in the store" in fails(lambda seed: World(seed, faults, server=SpeaksFirst).play())


def test_control_without_returning_lines_of_dead_sessions_a_job_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: lines of a session that is gone must wait again, or the job hangs at 99 % (cases 11)."""

    def forget(job: Any, line: Any, how: str, now: Any, step: Step) -> None:
        if how != "lost":
            real(job, line, how, now, step)
        else:
            recovery.drop(job, line)

    real = recovery.release
    monkeypatch.setattr(recovery, "release", forget)
    assert "does not end" in fails(lambda seed: World(seed, ROUGH).play(most=400), tries=30)


def test_a_line_that_kills_its_worker_is_found_and_no_other_is_blamed() -> None:
    """One poisoned line among 24, links that flap beside it: it alone is set aside (D5, cases 6)."""
    faults = Faults(cut=0.03, kill_worker=0, leave=0.01, kill_broker=0, takeover=0, poison=5)
    aside = poisoned = 0
    for seed in range(SCHEDULES // 3):
        counts = World(seed, faults).play().counts
        aside += counts["set_aside"]
        poisoned += counts["poisoned"]
    assert aside == SCHEDULES // 3
    assert poisoned < 12 * SCHEDULES // 3


def test_control_without_suspicion_a_poisoned_line_kills_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a line that is given out again and again among others takes worker after worker down."""
    monkeypatch.setattr(suspects, "died", lambda *_: None)
    faults = Faults(cut=0, kill_worker=0, leave=0, kill_broker=0, takeover=0, poison=5)
    assert "does not end" in fails(lambda seed: World(seed, faults).play(most=400), tries=3)


def test_a_seed_replays_its_schedule() -> None:
    """Whoever gets a failing seed from another machine sees the same story."""
    first, second = (World(7, ROUGH).play() for _ in range(2))
    assert first.runs == second.runs
    assert first.counts == second.counts
    assert first.clock.mono == second.clock.mono
