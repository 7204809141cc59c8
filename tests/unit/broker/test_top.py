"""``haulier top``: one frame of 80 columns that says what a fleet does and why lines wait; nothing in it is made up."""

from __future__ import annotations

import dataclasses
import json

import pytest

from broker import top
from common import messages

GIB = 1 << 30
JOB = messages.JobInfo(
    1, "3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a77", "contracts.jsonl", "in_progress", 4_000, 990, 10, 24, 2_976, 0, 10, 20,
    1.0, 2.0, 0.0, 0, "all workers are busy", 4_000, 0.0, 2.5,
)  # fmt: skip
WORKER = messages.WorkerInfo(
    "gpu-1-0", 2, 7, "ready", (messages.ModelInfo("llama", "f", 131_072),), 8, 4, 8, 12, 300, 9_000, 0.4,
    messages.RingReport(64 << 20, 5, 4, 1 << 20), 63 << 20,
    messages.EngineReport(8, 4, 120, 8, 2 * GIB, 4 * GIB, 10**12, 50e9), 210.4, 43e9, "segments",
)  # fmt: skip
SEEN = top.Seen((JOB,), (WORKER,))


def test_a_frame_says_it_all_in_80_columns() -> None:
    """Progress, rate, time left; state, session, ring, pages, headroom, link and its use; and why lines wait."""
    assert top.frame(SEEN, 80) == [
        "1 open job, 1 worker, 210.4 tokens/s",
        "",
        "JOB       STATUS       DONE       FAILED  RUN  WAIT  RATE   LEFT   NAME",
        "3f0c1c1e  in_progress  1000/4000      10   24  2976  2.5/s  20:00  contracts.js…",
        "",
        "WORKER   STATE  EPOCH  RUN  HELD  OF  CREDIT  TOKENS/S  BEAT   MODEL",
        "gpu-1-0  ready      7    8    12   8       4  210.4     0.4 s  llama",
        "  ring 1.0 MiB of 64.0 MiB used, pages 120 of 128 used,",
        "  headroom 2.0 GiB of 4.0 GiB used, link 43.00 GB/s (86% of it)",
        "",
        "WAIT  WHERE    WHY",
        "2976  broker   all workers are busy",
        "   4  gpu-1-0  segments",
    ]


def test_what_is_not_known_is_not_shown() -> None:
    """A CPU has no measured link, a loading worker no ring, a job seen once no rate. Control: the above."""
    bare = dataclasses.replace(WORKER, engine=messages.EngineReport(), ring=messages.RingReport(), staged_bytes_s=0.0)
    still = dataclasses.replace(JOB, lines_s=0.0, reason="", waiting=3)
    text = "\n".join(top.frame(top.Seen((still,), (bare,)), 80))
    assert "%" not in text
    assert "pages" not in text
    assert "headroom" not in text
    assert top.seconds_left(still) is None
    assert top.link_use(bare) is None
    assert "their turn" in text
    assert top.frame(top.Seen((), ()), 80) == ["0 open jobs, 0 workers, 0.0 tokens/s", "", "no job", "",
                                               "no worker is logged in"]  # fmt: skip


def test_reasons_are_added_up_over_jobs_and_ended_jobs_wait_for_nothing() -> None:
    """By reason, most first."""
    jobs = (JOB, dataclasses.replace(JOB, waiting=24), dataclasses.replace(JOB, reason="no worker serves 'x'"),
            dataclasses.replace(JOB, status="cancelled"))  # fmt: skip
    found = top.waiting(top.Seen(jobs, (WORKER,)))
    assert [(one.lines, one.reason) for one in found] == [
        (3_000, "all workers are busy"), (2_976, "no worker serves 'x'"), (4, "segments"),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_line_is_wider_than_the_screen_or_commands_it(width: int) -> None:
    """Names of others are shown, not obeyed."""
    evil = "\x1b[2J\n" + "x" * 300
    seen = top.Seen((dataclasses.replace(JOB, name=evil, reason=evil),), (dataclasses.replace(WORKER, worker=evil),))
    for line in top.frame(seen, width):
        assert len(line) <= width
        assert line.isprintable()


def test_json_has_every_field_and_what_follows_from_them() -> None:
    """One object a frame, for scripts."""
    found = json.loads(json.dumps(top.plain(SEEN)))
    assert found["jobs"][0]["seconds_left"] == pytest.approx(1200.0)
    assert found["jobs"][0]["job"] == JOB.job
    assert found["workers"][0]["link_use"] == pytest.approx(0.86)
    assert found["workers"][0]["ring"]["live"] == 1 << 20
    assert found["workers"][0]["engine"]["pages_held"] == 120
    assert found["waiting"][0] == {"lines": 2976, "where": "broker", "reason": "all workers are busy"}


def test_what_does_not_fit_the_screen_is_counted() -> None:
    """A small terminal and many workers: the first lines stay put, and one says what is below."""
    lines = [str(number) for number in range(40)]
    assert top.screenful(lines, 41) == lines
    shown = top.screenful(lines, 24)
    assert shown[:22] == lines[:22]
    assert shown[22:] == ["18 more lines: haulier top --once prints them all"]
