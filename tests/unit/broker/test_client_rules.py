"""What a client says about jobs: exit codes, tables, amounts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import client_rules as rules
from common import errors, messages

JOB = messages.JobInfo(
    7, "3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a77", "n", "in_progress", 9, 3, 1, 2, 3, 0, 10, 20, 1, 1, 0, 0, "", 9
)


@pytest.mark.parametrize(
    ("status", "failed", "code"),
    [
        ("completed", 0, 0), ("completed", 1, 1), ("failed", 0, 4), ("failed", 3, 4), ("cancelled", 0, 5),
        ("expired", 2, 5), ("validating", 0, 6), ("in_progress", 1, 6), ("finalizing", 0, 6), ("cancelling", 0, 6),
    ],
)  # fmt: skip
def test_every_status_has_its_exit_code(status: str, failed: int, code: int) -> None:
    """`completed` with every line failed must not read as success."""
    assert rules.job_exit_code(dataclasses.replace(JOB, status=status, failed=failed)) == code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, errors.UsageError), (3, errors.UnreachableError), (4, errors.RefusedError), (5, errors.CancelledError),
        (6, errors.NotFinishedError), (70, errors.InvariantError), (1, errors.InvariantError),
    ],
)  # fmt: skip
def test_a_code_becomes_the_error_that_carries_it(code: int, kind: type[Any]) -> None:
    """The broker's word decides the exit code; a code without a meaning is a bug of ours."""
    failure = rules.error_for(code, "words")
    assert type(failure) is kind
    assert failure.exit_code in (code, 70)


@given(st.text(max_size=40))
def test_any_text_is_a_job_id_or_a_usage_error(text: str) -> None:
    """A typing error is told before anybody is asked."""
    try:
        assert rules.checked_job(text) == text.strip().lower()
    except errors.UsageError:
        return


def test_a_job_id_may_be_pasted_in_capitals_with_blanks() -> None:
    assert rules.checked_job(f" {JOB.job.upper()} ") == JOB.job


def test_json_has_every_field_but_the_number_of_the_request() -> None:
    """Scripts depend on the names."""
    plain = rules.as_json(JOB)
    assert set(plain) == {field.name for field in dataclasses.fields(JOB)} - {"request"}


def test_a_job_in_one_line_says_what_matters_now() -> None:
    """What failed, what waits and why; nothing that is zero and means nothing."""
    text = rules.sentence(dataclasses.replace(JOB, reason="no worker is connected"))
    assert "3 of 9 lines completed, 1 failed, 2 running, 3 waiting" in text
    assert text.endswith("(no worker is connected)")
    assert "9 lines read" in rules.sentence(dataclasses.replace(JOB, status="validating"))
    assert "running" not in rules.sentence(dataclasses.replace(JOB, status="completed"))


@given(st.lists(st.tuples(st.text("ab ", max_size=5), st.integers(0, 10**6).map(str)), min_size=1, max_size=6))
def test_columns_are_aligned(rows: list[tuple[str, str]]) -> None:
    """Numbers end at one column, whatever their length."""
    lines = rules.aligned([("NAME", "COUNT"), *rows])
    assert len(lines) == len(rows) + 1
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (3, "lines", "3 lines"), (1234567, "lines", "1,234,567 lines"), (2.5, "lines", "2.5 lines"),
        (512, "bytes", "512 B"), (1536, "bytes", "1.5 KiB"), (200 * 1024**2, "bytes", "200 MiB"),
        (5 * 1024**4, "bytes", "5120 GiB"),
    ],
)  # fmt: skip
def test_amounts(count: float, unit: str, text: str) -> None:
    assert rules.amount(count, unit) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (7.4, "7 s"), (187, "3:07"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert rules.duration(seconds) == text


@pytest.mark.parametrize(
    ("speed", "unit", "text"),
    [(12.0, "lines", "12 lines/s"), (0.05, "lines", "3.0 lines/min"), (2048.0, "bytes", "2.0 KiB/s")],
)
def test_rates(speed: float, unit: str, text: str) -> None:
    """Long requests: a few a minute is a rate too."""
    assert rules.rate(speed, unit) == text


def test_a_job_is_called_after_its_file_as_far_as_that_can_be_written() -> None:
    """A file's name is bytes: what is no text arrives as lone surrogates, which no message carries."""
    assert rules.job_name("nights.jsonl") == "nights.jsonl"
    assert rules.job_name("nights.jsonl", "other") == "other"
    rules.job_name("\udcff.jsonl").encode()
    with pytest.raises(errors.UsageError, match="--name"):
        rules.job_name("nights.jsonl", "\udcff")


def test_names_of_others_cannot_command_the_terminal() -> None:
    """A job named with an escape that clears the screen: shown, not obeyed, wherever a name or a reason is printed."""
    evil = "\x1b[2J\nnext"
    job = dataclasses.replace(JOB, name=evil, reason=evil)
    audit = messages.Audit(1, "j", False, 1, 0, 0, 0, 1, 0, 0, (evil,))
    worker = messages.WorkerInfo(evil, 1, 1, evil, (), 1, 1, 1, 1, 1, 1, 0.0, messages.RingReport())
    said = [
        *rules.jobs_table([job]), *rules.workers_table([worker]), *rules.audit_text(audit), rules.sentence(job),
        rules.problem_text(messages.Problem(1, "code", evil)),
    ]  # fmt: skip
    assert all(one.isprintable() for one in said)
    assert any("\\x1b[2J\\nnext" in one for one in said)


def failed_line(number: int, code: str, **more: Any) -> bytes:
    error = {"error": {"message": f"words {number}", "code": code}}
    body = {"custom_id": f"c{number}", "response": {"status_code": 400, "body": error}, "error": None}
    return json.dumps({**body, **more}).encode()


def test_the_commonest_error_is_named_with_its_first_line() -> None:
    """37 of 40 lines failed, and nobody wants to open the error file to see that all were too long."""
    info = dataclasses.replace(JOB, total=40, failed=37)
    lines = [
        failed_line(0, "", response=None, error={"code": "worker_died", "message": "two\nworkers"}),
        *(failed_line(number, "context_length_exceeded") for number in range(1, 36)), b"no json",
    ]  # fmt: skip
    assert rules.failure_words(info, lines) == (
        "37 of 40 lines failed: 35 context_length_exceeded (first: c1: words 1), 2 other"
    )
    assert rules.failure_words(info, lines[:1]) == (
        "37 of 40 lines failed: 1 worker_died (first: c0: two\\nworkers); looked at the first 1"
    )
    assert rules.failure_words(JOB, []) == rules.failure_words(dataclasses.replace(JOB, failed=0), lines) == ""


@given(st.lists(st.binary(max_size=40) | st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(("response", "body", "error", "code", "message", "custom_id")), inner),
).map(lambda value: json.dumps(value).encode()), min_size=1, max_size=5))  # fmt: skip
def test_any_error_file_gives_one_line_of_words(lines: list[bytes]) -> None:
    """Whatever a worker put there."""
    words = rules.failure_words(JOB, lines)
    assert words.startswith("1 of 9 lines failed: ")
    assert words.isprintable()
