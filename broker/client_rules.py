"""rules: what a client decides and how it words it: when a job has ended, its exit code, its tables. Knows no socket.

Home of the exit codes of a job (0 all completed, 1 some failed, 4 failed validation, 5 cancelled or expired, 6 not
finished) and of the words people read about jobs, workers and audits: on one line, nothing in them a terminal obeys.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from common import errors, limits, messages
from common.errors import HaulierError, UsageError
from common.ids import is_id
from common.printable import printable

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses that change no more."""
SOME_FAILED = 1
FIRST_MAX_CHARS = 300
"""Of the first error of the commonest kind."""
_BY_EXIT_CODE: dict[int, type[HaulierError]] = {
    2: errors.UsageError,
    3: errors.UnreachableError,
    4: errors.RefusedError,
    5: errors.CancelledError,
    6: errors.NotFinishedError,
}


def error_for(exit_code: int, message: str) -> HaulierError:
    """The failure whose exit code is ``exit_code``; a code that means nothing to us is a bug of ours (70)."""
    return _BY_EXIT_CODE.get(exit_code, errors.InvariantError)(message)


def job_name(file_name: str, name: str = "") -> str:
    """What a job is called: as was said, else after its file (whose name is bytes), as far as it is text."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--name {name!r} is not text in UTF-8") from error
    return (name or file_name.encode(errors="replace").decode())[: limits.TEXT_MAX_CHARS]


def job_exit_code(info: messages.JobInfo) -> int:
    """What a command that speaks for this job ends with. ``completed`` with failed lines never reads as success."""
    if info.status == "completed":
        return SOME_FAILED if info.failed else 0
    if info.status == "failed":
        return errors.RefusedError.exit_code
    if info.status in ENDED:
        return errors.CancelledError.exit_code
    return errors.NotFinishedError.exit_code


def checked_job(text: str) -> str:
    """``text`` if it can be a job id. Raises ``UsageError`` otherwise."""
    low = text.strip().lower()
    if not is_id(low):
        raise UsageError(
            f"{text!r} is not a job id; ids look like 3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a77: see haulier jobs"
        )
    return low


def as_json(message: Any) -> dict[str, Any]:
    """A message as plain values for ``--json``: its fields by name, without the number of the request."""
    plain: dict[str, Any] = dataclasses.asdict(message)
    plain.pop("request", None)
    return plain


def sentence(info: messages.JobInfo) -> str:
    """A job in one line."""
    parts = [f"{info.completed} of {info.total} lines completed"]
    if info.failed:
        parts.append(f"{info.failed} failed")
    if info.status not in ENDED:
        parts += [f"{info.running} running", f"{info.waiting} waiting"]
    if info.problems:
        parts.append(f"{plural(info.problems, 'bad line')} in the input")
    if info.wasted:
        parts.append(f"{plural(info.wasted, 'run')} wasted")
    parts.append(tokens(info))
    if info.status == "validating":
        parts = [f"{info.lines_read} lines read"]
    reason = f" ({info.reason})" if info.reason else ""
    return printable(f"{info.job} {info.status}: {', '.join(parts)}{reason}")


def failure_words(info: messages.JobInfo, lines: Sequence[bytes]) -> str:
    """How many lines failed, of what most of them, and the first of those; ``lines`` of the error file, from its start.

    Empty when none failed.
    """
    if not info.failed or not lines:
        return ""
    errors = [_error_of(line) for line in lines]
    counts = Counter(code for code, _, _ in errors)
    code, count = counts.most_common(1)[0]
    first = next(f"{custom_id}: {words}" for one, custom_id, words in errors if one == code)[:FIRST_MAX_CHARS]
    looked = f"; looked at the first {len(lines)}" if len(lines) < info.failed else ""
    others = f", {len(lines) - count} other" if len(lines) > count else ""
    return printable(f"{info.failed} of {info.total} lines failed: {count} {code} (first: {first}){others}{looked}")


def _error_of(line: bytes) -> tuple[str, str, str]:
    """Code, custom_id and words of a line of the error file, whatever wrote it."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return "unreadable", "?", "a line of the error file is not JSON"
    body = _in(_in(found, "response"), "body")
    error = _in(found, "error") or _in(body, "error")
    code = _in(error, "code") or _in(error, "type") or f"status {_in(_in(found, 'response'), 'status_code')}"
    return str(code), str(_in(found, "custom_id")), str(_in(error, "message") or "no message")


def _in(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def watch_note(info: messages.JobInfo) -> str:
    """What a bar cannot show: failures, what runs, and why nothing does."""
    parts = [f"{info.failed} failed"] if info.failed else []
    if info.running:
        parts.append(f"{info.running} running")
    elif info.reason:
        parts.append(info.reason)
    return ", ".join(parts)


def tokens(info: messages.JobInfo) -> str:
    """What its finished lines were made of, and gave."""
    return f"{info.prompt_tokens} prompt + {info.completion_tokens} answer tokens"


def plural(count: int, noun: str) -> str:
    """``1 line``, ``2 lines``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def problem_text(problem: messages.Problem) -> str:
    """One bad line as people read it."""
    return printable(f"line {problem.line}: {problem.code}: {problem.message}")


def jobs_table(jobs: Iterable[messages.JobInfo]) -> list[str]:
    rows = [("JOB", "STATUS", "TOTAL", "DONE", "FAILED", "RUNNING", "WAITING", "NAME")]
    rows += [
        (j.job, j.status, str(j.total), str(j.completed), str(j.failed), str(j.running), str(j.waiting), j.name)
        for j in jobs
    ]
    return aligned(rows)


def workers_table(workers: Iterable[messages.WorkerInfo]) -> list[str]:
    rows = [("WORKER", "PHASE", "MODEL", "RUNNING", "ASSIGNED", "OF", "CREDIT", "STEPS", "TOKENS", "BEAT")]
    rows += [
        (
            w.worker, w.phase, ",".join(model.name for model in w.models) or "-", str(w.running), str(w.assigned),
            str(w.concurrency), str(w.credit_lines), str(w.steps), str(w.tokens), f"{w.last_beat_s:.1f} s",
        )
        for w in workers
    ]  # fmt: skip
    return aligned(rows)


def audit_text(audit: messages.Audit) -> list[str]:
    """D4's proof for one job in words."""
    verdict = "holds" if audit.holds else "DOES NOT HOLD"
    if not audit.finished and audit.sound:
        verdict = "not yet; nothing is wrong so far"
    return [
        f"{audit.job}: every line ends exactly once: {verdict}",
        f"  {audit.output_lines} output + {audit.error_lines} error of {audit.total} lines, "
        f"{audit.duplicates} duplicate, {audit.missing} missing; {audit.runs} runs, {audit.wasted} wasted",
        *(f"  {printable(finding)}" for finding in audit.findings),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text, columns aligned: whole numbers to the right, the rest to the left, two blanks between."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [len(rows) > 1 and all(row[column].isdigit() for row in rows[1:]) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """``7 s``, ``3:07`` or ``1:02:03``: short enough for a bar."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def amount(count: float, unit: str) -> str:
    """``count`` of ``unit`` in words; bytes in the largest binary unit that keeps the number at 1 or more."""
    if unit != "bytes":
        noun = unit.removesuffix("s") if count == 1 else unit
        return f"{count:,.0f} {noun}" if count >= 10 or count == int(count) else f"{count:.1f} {noun}"
    for name in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or name == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {name}" if name == "B" or count >= 100 else f"{count:.1f} {name}"


def done_of(done: float, total: float, unit: str) -> str:
    """``3 of 10 lines``, ``1.5 MiB of 2 GiB``; ``total`` 0 for not known."""
    if not total:
        return amount(done, unit)
    return f"{amount(done, unit) if unit == 'bytes' else f'{done:,.0f}'} of {amount(total, unit)}"


def rate(a_second: float, unit: str) -> str:
    """``12 lines/s``, or a minute's where a second's would round to nothing."""
    if unit == "bytes" or a_second >= 1:
        return f"{amount(a_second, unit)}/s"
    return f"{a_second * 60:.1f} {unit}/min"
