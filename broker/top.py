"""rules: one frame of ``haulier top``: jobs, workers, and why lines wait, as the broker answered. Knows no socket.

Every figure is the broker's or a worker's own; what nobody measured is left out or shown as ``-``. Lines are text that
fits the width, nothing in them a terminal obeys.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.client_rules import ENDED, aligned, amount, as_json, duration, plural
from common import messages

ID_CHARS = 8
"""Of a job's id: enough to tell jobs apart on one screen; ``--json`` and ``haulier jobs`` have all of it."""
ENDED_SHOWN_COUNT = 5
"""Jobs that have ended are shown so far, behind those that have not."""


HEADINGS = ("JOB", "WORKER", "WAIT")
"""First words of the lines that name columns."""
_KEPT = "\N{NO-BREAK SPACE}"
"""Where a line must not be broken."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """So many lines wait for one reason; ``where`` is ``broker``, or the worker in whose engine they wait."""

    lines: int
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to see at one moment: open jobs first, then those that ended last."""

    jobs: tuple[messages.JobInfo, ...]
    workers: tuple[messages.WorkerInfo, ...]


def seconds_left(job: messages.JobInfo) -> float | None:
    """At the rate of late; None where there is none to go by."""
    left = job.total - job.completed - job.failed
    return left / job.lines_s if job.status == "in_progress" and job.lines_s > 0 else None


def link_use(worker: messages.WorkerInfo) -> float | None:
    """What of the link the staged bytes take, from 0; None where the link was not measured."""
    carries = worker.engine.link_bytes_s
    return worker.staged_bytes_s / carries if carries else None


def waiting(seen: Seen) -> list[Waiting]:
    """Why lines wait, most first: at the broker as each job has it, in an engine as its first waiting line has it."""
    found: Counter[tuple[str, str]] = Counter()
    for job in seen.jobs:
        if job.waiting and job.status not in ENDED:
            found["broker", job.reason or "their turn: other lines go first"] += job.waiting
    for worker in seen.workers:
        if worker.engine.contexts_waiting:
            found[worker.worker, worker.waits or "the next plan of its engine"] += worker.engine.contexts_waiting
    rows = [Waiting(lines, where, reason) for (where, reason), lines in found.items()]
    return sorted(rows, key=lambda one: (-one.lines, one.where, one.reason))


def plain(seen: Seen) -> dict[str, Any]:
    """The frame for ``--json``: messages' fields by name, and what is worked out from them."""
    return {
        "jobs": [{**as_json(job), "seconds_left": seconds_left(job)} for job in seen.jobs],
        "workers": [{**as_json(one), "link_use": link_use(one)} for one in seen.workers],
        "waiting": [{"lines": one.lines, "where": one.where, "reason": one.reason} for one in waiting(seen)],
    }


def frame(seen: Seen, width: int) -> list[str]:
    """The frame as lines of at most ``width`` characters."""
    open_jobs = sum(job.status not in ENDED for job in seen.jobs)
    tokens_s = sum(worker.tokens_s for worker in seen.workers)
    told = [f"{plural(open_jobs, 'open job')}, {plural(len(seen.workers), 'worker')}, {tokens_s:.1f} tokens/s", ""]
    told += _jobs(seen.jobs, width) if seen.jobs else ["no job"]
    told += ["", *_workers(seen.workers, width)] if seen.workers else ["", "no worker is logged in"]
    why = waiting(seen)
    if why:
        told += ["", *aligned([("WAIT", "WHERE", "WHY"), *((str(one.lines), one.where, one.reason) for one in why)])]
    return [cut(line, width) for line in told]


def cut(line: str, width: int) -> str:
    """``line``, shortened with an ellipsis where it is too long."""
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def screenful(lines: list[str], height: int) -> list[str]:
    """As many of the lines as a screen of ``height`` lines has room for, and how many are below it."""
    if len(lines) < height:
        return lines
    shown = max(0, height - 2)
    return [*lines[:shown], f"{len(lines) - shown} more lines: haulier top --once prints them all"]


def _jobs(jobs: Sequence[messages.JobInfo], width: int) -> list[str]:
    rows = [("JOB", "STATUS", "DONE", "FAILED", "RUN", "WAIT", "RATE", "LEFT", "NAME")]
    for job in jobs:
        left = seconds_left(job)
        done = f"{job.completed + job.failed}/{job.total}"
        rows.append((
            job.job[:ID_CHARS], job.status, done, str(job.failed), str(job.running), str(job.waiting),
            short_rate(job), "-" if left is None else duration(left),
            job.name,
        ))  # fmt: skip
    return aligned(rows)


def short_rate(job: messages.JobInfo) -> str:
    """Lines a second or a minute; ``-`` where none end."""
    if not job.lines_s:
        return "-"
    return f"{job.lines_s:.1f}/s" if job.lines_s >= 1 else f"{job.lines_s * 60:.1f}/min"


def _workers(workers: Sequence[messages.WorkerInfo], width: int) -> list[str]:
    rows = [("WORKER", "STATE", "EPOCH", "RUN", "HELD", "OF", "CREDIT", "TOKENS/S", "BEAT", "MODEL")]
    for one in workers:
        models = ",".join(model.name for model in one.models) or "-"
        rows.append((
            one.worker, one.phase, str(one.epoch), str(one.running), str(one.assigned), str(one.concurrency),
            str(one.credit_lines), f"{one.tokens_s:.1f}", f"{one.last_beat_s:.1f} s", models,
        ))  # fmt: skip
    named = aligned(rows)
    lines = named[:1]
    for one, line in zip(workers, named[1:], strict=True):
        parts = ", ".join(part.replace(" ", _KEPT) for part in _memory(one))
        below = textwrap.wrap(parts, width, initial_indent="  ", subsequent_indent="  ")
        lines += [line, *(text.replace(_KEPT, " ") for text in below)]
    return lines


def _memory(worker: messages.WorkerInfo) -> list[str]:
    """What a worker's ring, pages, headroom and link do."""
    ring, engine = worker.ring, worker.engine
    live, all_of = amount(ring.live, "bytes"), amount(ring.capacity, "bytes")
    parts = [f"ring {live} of {all_of} used" if ring.capacity else "no ring yet"]
    if pages := engine.pages_held + engine.pages_free:
        parts.append(f"pages {engine.pages_held} of {pages} used")
    if engine.headroom_bytes:
        held, most = amount(engine.headroom_held_bytes, "bytes"), amount(engine.headroom_bytes, "bytes")
        parts.append(f"headroom {held} of {most} used")
    use = link_use(worker)
    parts.append(f"link {worker.staged_bytes_s / 1e9:.2f} GB/s" + ("" if use is None else f" ({use:.0%} of it)"))
    return parts
