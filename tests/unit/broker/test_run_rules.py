"""What `haulier run` decides: the same work gets the same job, a refusal stands, a crash costs a new start."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import run_rules
from broker.run_rules import RESTARTS_MAX_COUNT, Ended
from common.config import EngineSettings
from common.ids import is_id
from common.messages import JobInfo

ENDED = Ended("worker", -9, 0, True, (), "state/logs/worker.log")
INFO = JobInfo(1, "j", "n", "in_progress", 9, 5, 1, 2, 1, 0, 10, 20, 1, 1, 0, 0, "", 9)


@given(
    st.lists(st.tuples(st.text("0a", min_size=1, max_size=3), st.text("m\n", max_size=3), st.booleans()), max_size=8)
)
def test_the_same_work_has_the_same_job_and_other_work_another(works: list[tuple[str, str, bool]]) -> None:
    """Run again with a mended input, another model or --lenient: a new job. The same command: the same job."""
    ids = {work: run_rules.job_id(*work) for work in works}
    assert len(set(ids.values())) == len(ids)
    assert all(is_id(one) for one in ids.values())
    assert ids == {work: run_rules.job_id(*work) for work in works}


@pytest.mark.parametrize(
    ("code", "ready", "goes_on"),
    [
        (-9, True, True), (-9, False, True), (-11, True, True), (70, True, True), (1, True, True), (0, True, True),
        (70, False, False), (1, False, False), (2, True, False), (3, True, False), (4, True, False), (4, False, False),
    ],
)  # fmt: skip
def test_who_is_started_again(code: int, ready: bool, goes_on: bool) -> None:
    """The kernel's kill and a crash at work: yes. A refusal (fit, keys, lock), a wrong flag, a start that fails: no."""
    assert run_rules.goes_on(dataclasses.replace(ENDED, code=code, ready=ready)) is goes_on


def test_nobody_is_started_again_for_ever() -> None:
    """Control of the one above: a worker that is killed at each start ends the run after a few."""
    assert not run_rules.goes_on(dataclasses.replace(ENDED, restarts=RESTARTS_MAX_COUNT))


def test_the_run_ends_with_the_childs_words_and_code() -> None:
    """One line that says what to change, and where the rest of the log is."""
    tail = ("loading", "haulier: --host-pool-gib 1 holds 3 histories; 8 are needed", "noise after it")
    refused = dataclasses.replace(ENDED, code=4, tail=tail)
    words = run_rules.end_words(refused)
    assert "exit code 4: --host-pool-gib 1 holds 3 histories" in words
    assert "state/logs/worker.log" in words
    assert "\n" not in words
    assert run_rules.end_code(refused) == 4
    assert [run_rules.end_code(dataclasses.replace(ENDED, code=code)) for code in (-9, 0, 1, 2, 70)] == [
        70,
        70,
        70,
        2,
        70,
    ]
    assert "4th time" in run_rules.end_words(dataclasses.replace(ENDED, restarts=3))
    assert [run_rules.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
    ]


def test_settings_are_handed_down_as_flags_and_defaults_are_not() -> None:
    """A worker gets what the user changed; the rest is its own default, said in one place."""
    plain = run_rules.worker_arguments("tcp://x:1", "s", "k", EngineSettings("m"), False)
    assert plain == ["--broker", "tcp://x:1", "--state", "s", "--keys", "k", "--model", "m"]
    changed = EngineSettings("m", "cuda:1", 2, 1.5, 4, 31744, "shrink", slot_gib=0.25, dtype="bfloat16")
    changed = dataclasses.replace(changed, retain="off", target_pages=4, burst_pages=2, headroom_gib="auto")
    changed = dataclasses.replace(changed, headroom_reserve_gib=3.5)
    more = run_rules.worker_arguments("tcp://x:1", "s", "k", changed, True)[len(plain) :]
    assert more == [
        "--device", "cuda:1", "--device-pages-gib", "2", "--host-pool-gib", "1.5", "--concurrency", "4",
        "--context-tokens", "31744", "--fit", "shrink", "--slot-gib", "0.25", "--dtype", "bfloat16",
        "--retain", "off", "--target-pages", "4", "--burst-pages", "2", "--headroom-gib", "auto",
        "--headroom-reserve-gib", "3.5", "--echo",
    ]  # fmt: skip


def test_children_do_not_see_the_users_own_fleet() -> None:
    """HAULIER_BROKER of a real fleet in the shell: the private one of a run must not join it."""
    own = {"PATH": "p", "HAULIER_BROKER": "b", "HAULIER_DEVICE": "cuda:0", "HAULIER_CACHE": "c", "HAULIER_LOG": "json"}
    assert run_rules.environment(own) == {
        "PATH": "p", "HAULIER_CACHE": "c", "HAULIER_LOG": "json", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "loaded", "phase"),
    [
        ("validating", False, "validating"), ("in_progress", False, "loading model"), ("in_progress", True, "running"),
        ("finalizing", True, "running"), ("completed", True, "writing"), ("completed", False, "writing"),
    ],
)  # fmt: skip
def test_phases(status: str, loaded: bool, phase: str) -> None:
    assert run_rules.phase(dataclasses.replace(INFO, status=status), loaded) == phase


def test_the_last_line_says_what_this_run_did() -> None:
    """Nothing, some, or all of the work; and where the lines are."""
    done = dataclasses.replace(INFO, status="completed")
    assert run_rules.summary(done, 2.0, 6, "o", None).startswith("nothing to run: 5 lines completed and 1 failed")
    assert "4 of them in an earlier run" in run_rules.summary(done, 2.0, 4, "o", "e")
    assert run_rules.summary(done, 2.0, 0, "o", "e").endswith("in 2.0 s -> o, e")


def test_a_reason_that_was_only_logged_is_found() -> None:
    """A worker's engine thread ends: its reason stands in the log's last error."""
    tail = (
        "2026-11-30T09:14:33.644396Z [warning  ] Retrying in 8s    [hub]",
        "2026-11-30T09:14:41.895960Z [error    ] thread_ended       "
        """reason="--model m can't be loaded" room=worker thread=engine""",
        "2026-11-30T09:14:42.895960Z [info     ] leaving            reason='later' room=worker",
    )
    assert run_rules.spoken(tail) == "--model m can't be loaded"
    assert run_rules.spoken((*tail, "haulier: said aloud")) == "said aloud"
    assert run_rules.spoken(tail[:1]) == ""
