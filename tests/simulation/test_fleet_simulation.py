"""Ten thousand seeded schedules of the whole fleet: both ends' real rules, bad link, kills, jumps (D1-D5, S2-S4).

A failure names its seed: HAULIER_SEED=n replays that schedule alone, in any of these tests' worlds. Each promise has a
control that must fail without the rule it rests on; a sample is played on SQLite too and must leave the same rows.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from broker import recovery, sessions, suspects
from common import limits
from tests.simulation.fleet_world import PROFILES, Faults, FleetWorld, SimServer
from tests.simulation.memory_store import MemoryStore
from tests.simulation.world import Broken

SCHEDULES = 10_000
CHUNK = 250
SEED = os.environ.get("HAULIER_SEED")
"""Read before a test's settings are cleared."""
ROUGH, LINKS, BROKERS, CANCEL, EXPIRY, RECREATED, POISON, CALM = range(len(PROFILES))


def quiet() -> None:
    """Millions of log lines are no use here; the seed replays them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quiet()
    yield
    structlog.reset_defaults()


def played(first: int, count: int) -> Counter[str]:
    """In a process of its own: what happened in ``count`` schedules from seed ``first`` on."""
    quiet()
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        found.update(FleetWorld(seed).play().counts)
    return found


STALE = Faults(link=0.05, cut=0.2, stale=1.0, kill_broker=0, crash_broker=0, takeover=0)
"""Links that end all the time, and whatever was on them comes out of the next ones."""


def fails(schedule: Callable[[int], FleetWorld], kind: int, tries: int = 60) -> str:
    """The first failure among ``tries`` schedules of one kind; empty if all hold."""
    for seed in range(kind, tries * len(PROFILES), len(PROFILES)):
        try:
            schedule(seed)
        except Broken as broken:
            return str(broken)
    return ""


@pytest.mark.skipif(SEED is None, reason="HAULIER_SEED names no schedule to replay")
def test_replay_of_the_named_seed() -> None:
    """Whoever gets a seed from another machine: HAULIER_SEED=n."""
    FleetWorld(int(SEED or 0)).play()


@pytest.mark.skipif(SEED is not None, reason="one schedule is replayed instead")
def test_ten_thousand_schedules_hold_every_promise() -> None:
    """Whatever is lost, killed, cut, recreated or asked for: no line lost, none ends twice, nothing stale obeyed."""
    found: Counter[str] = Counter()
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for counts in pool.map(played, range(0, SCHEDULES, CHUNK), [CHUNK] * (SCHEDULES // CHUNK)):
            found.update(counts)
    happened = (
        "link_faults", "stale", "kill_worker", "left", "kill_broker", "takeover", "recreated", "poisoned", "set_aside",
        "crash_broker.before_commit", "crash_broker.after_commit", "crash_broker.between_sends",
        "crash_worker.before_commit", "crash_worker.after_commit", "crash_worker.between_sends", "gone_silence",
        "gone_unsendable", "gone_superseded", "gone_bye", "job_completed", "job_cancelled", "job_expired", "wasted",
    )  # fmt: skip
    assert {name: found[name] for name in happened if found[name] < 20} == {}, found


def test_a_seed_replays_its_schedule() -> None:
    """The same story, to the last row and second."""
    for seed in range(2 * len(PROFILES)):
        first, second = (FleetWorld(seed).play() for _ in range(2))
        assert first.runs == second.runs
        assert first.counts == second.counts
        assert first.clock.mono == second.clock.mono


def test_sqlite_and_the_dicts_tell_the_same_story() -> None:
    """What makes the simulator's store worth believing: the real one leaves the same rows after the same schedule."""
    for seed in range(12 * len(PROFILES)):
        dicts, real = FleetWorld(seed).play(), FleetWorld(seed, sqlite=True).play()
        assert dicts._broker().store.dump() == real._broker().store.dump(), seed  # type: ignore[attr-defined]
        assert dicts.counts == real.counts, seed
        assert dicts.clock.mono == real.clock.mono, seed


# ---------------------------------------------------------------------------------------------------------- controls


def test_control_a_broker_that_ignores_epochs_obeys_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: what was said in a session that is over moves lines of the one that stands."""
    monkeypatch.setattr(sessions, "fenced", lambda *_: True)
    assert "S4" in fails(lambda seed: FleetWorld(seed, STALE).play(), LINKS)


def test_control_a_worker_that_ignores_epochs_obeys_the_dead() -> None:
    """S4: a batch of the session before is taken in this one, though its lines are another's by now."""
    assert "S4" in fails(lambda seed: FleetWorld(seed, STALE, unfenced=True).play(), LINKS)


def test_control_an_outbox_that_is_not_synced_loses_what_was_finished() -> None:
    """D1: the last commits before a crash never reached the disk."""
    assert "D1" in fails(lambda seed: FleetWorld(seed, unsynced=True).play(), ROUGH)


def test_control_without_the_grace_lines_run_twice() -> None:
    """D3: what was assigned before a restart is given away before its worker could claim it."""
    assert "D3" in fails(lambda seed: FleetWorld(seed, grace_s=0.0).play(), BROKERS)


def test_control_without_the_store_id_a_lost_stores_answers_count() -> None:
    """D4: a recreated store takes what was the answer to another prompt."""
    assert fails(lambda seed: FleetWorld(seed, one_store_id=True).play(), RECREATED)


def test_control_without_the_incarnation_row_a_hung_broker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: it wakes up after another one took its store over, writes to it and speaks for it."""
    monkeypatch.setattr(MemoryStore, "check_incarnation", lambda self: None)
    assert "taken over" in fails(lambda seed: FleetWorld(seed).play(), BROKERS)


def test_control_without_claims_lines_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: a broker that does not read what workers list as held has it run again."""
    real = recovery.claim
    monkeypatch.setattr(recovery, "claim", lambda state, session, held, *rest: real(state, session, [], *rest))
    assert "D3" in fails(lambda seed: FleetWorld(seed).play(), BROKERS)


class SpeaksFirst(SimServer):
    """Says what a turn decided before the turn is committed."""

    def _feed(self, input: Any) -> None:
        super()._feed(input)
        self._speak()


def test_control_speaking_before_the_commit_acks_what_is_lost() -> None:
    """D1: the ack is out, the process ends, the commit never was."""
    assert "D1" in fails(lambda seed: FleetWorld(seed, server=SpeaksFirst, sqlite=True).play(), BROKERS)


def test_control_without_returning_lines_of_dead_sessions_a_job_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: lines of a session that is gone must wait again, or the job hangs at 99 % beside idle workers."""
    real = recovery.release

    def forget(job: Any, line: Any, how: str, now: Any, step: Any) -> None:
        if how != "lost":
            real(job, line, how, now, step)
        else:
            recovery.drop(job, line)

    monkeypatch.setattr(recovery, "release", forget)
    assert "does not end" in fails(lambda seed: FleetWorld(seed).play(most=300), ROUGH)


def test_control_without_suspicion_a_poisoned_line_kills_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: given out again and again among others, it takes worker after worker down."""
    monkeypatch.setattr(suspects, "died", lambda *_: None)
    monkeypatch.setattr(suspects, "testify", lambda *_: None)
    assert "does not end" in fails(lambda seed: FleetWorld(seed).play(most=300), POISON, tries=3)


def test_control_blame_for_a_lost_link_condemns_a_good_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: a broker that counts every lost session against what ran in it sets good lines aside."""
    real = suspects.died

    def blame(state: Any, session: Any, step: Any) -> None:
        real(state, session, step)
        for ref in session.running:
            line = state.find(ref.line)
            if line is not None:
                line.deaths += limits.DEATHS_ALONE_MAX_COUNT

    monkeypatch.setattr(suspects, "died", blame)
    faults = Faults(cut=0.05, dark=0.2, stale=0, kill_worker=0, crash_worker=0, leave=0)
    assert "D5" in fails(lambda seed: FleetWorld(seed, faults).play(rough=60), ROUGH)
