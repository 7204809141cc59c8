"""rules: the page that shows the fleet, as HTML: jobs, workers, why lines wait. No script, nothing from elsewhere.

Home of what a stranger's name may do on it: nothing. Every text goes through ``_text``, and the policy sent with it
(``POLICY``) lets a browser run no script, load nothing and send forms nowhere else, whatever the text says.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any

from broker import top
from broker.client_rules import ENDED, amount, duration, plural
from common import limits, messages
from common.printable import printable

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #2b6cb0; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
header { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; align-items: baseline; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
header form { margin-left: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; font-size: .85rem; opacity: .75; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.id { display: block; font: .8rem ui-monospace, monospace; opacity: .7; overflow-wrap: anywhere; }
.name { overflow-wrap: anywhere; }
.whole { white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
progress { width: 7rem; height: .7rem; vertical-align: middle; accent-color: var(--accent); }
.none, .note { opacity: .75; }
.problem { border: 1px solid #c53030; border-radius: .4rem; padding: .6rem .8rem; overflow-wrap: anywhere; }
form.login { max-width: 24rem; display: grid; gap: .6rem; margin-top: 1.5rem; }
input, button { font: inherit; padding: .45rem .7rem; }
@media (max-width: 46rem) {
  thead { position: absolute; left: -99rem; }
  tr { display: block; border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .7rem;
    margin-bottom: .7rem; }
  td, td.n { display: flex; justify-content: space-between; gap: 1rem; text-align: right; border: 0; padding: .2rem 0;
    white-space: normal; }
  td > span { min-width: 0; }
  td::before { content: attr(data-name); font-weight: 600; font-size: .85rem; opacity: .75; flex: none; }
}
"""
POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "same-origin",
    "cache-control": "no-store", "x-frame-options": "DENY",
}  # fmt: skip


def fleet(seen: top.Seen, tenant: str, at: str) -> str:
    """The page. ``tenant`` is whose jobs they are, empty where everybody sees all; ``at`` is when it was asked for."""
    open_jobs = sum(job.status not in ENDED for job in seen.jobs)
    tokens_s = sum(worker.tokens_s for worker in seen.workers)
    facts = [plural(open_jobs, "open job"), plural(len(seen.workers), "worker"), f"{tokens_s:.1f} tokens/s", at]
    leave = (
        f'<form method="post" action="/fleet/logout"><button>Log out {_text(tenant)}</button></form>' if tenant else ""
    )
    body = [
        f"<header><h1>haulier</h1>{''.join(f'<span>{_text(one)}</span>' for one in facts)}{leave}</header>",
        "<h2>Jobs</h2>", _jobs(seen.jobs), "<h2>Workers</h2>", _workers(seen.workers),
        "<h2>Why lines wait</h2>", _waiting(top.waiting(seen)),
    ]  # fmt: skip
    return _document("haulier", "\n".join(body), refresh=True)


def login(problem: str = "") -> str:
    """The form that takes a bearer key."""
    said = f'<p class="problem">{_text(problem)}</p>' if problem else ""
    return _document(
        "haulier: log in",
        f'<h1>haulier</h1>{said}<form class="login" method="post" action="/fleet/login">'
        '<label for="key">Your bearer key, the one that programs send</label>'
        f'<input id="key" name="key" type="password" autocomplete="current-password" '
        f'maxlength="{limits.HTTP_KEY_MAX_CHARS}" required autofocus>'
        "<button>Look at the fleet</button></form>",
    )


def problem(words: str) -> str:
    """A page that says why there is nothing to see just now, and looks again."""
    return _document("haulier", f'<h1>haulier</h1><p class="problem">{_text(words)}</p>', refresh=True)


# ------------------------------------------------------------------------------------------------------------ tables


def _jobs(jobs: Sequence[messages.JobInfo]) -> str:
    rows = []
    for job in jobs:
        ended, left = job.completed + job.failed, top.seconds_left(job)
        share = f'<progress max="{max(1, job.total)}" value="{min(ended, max(1, job.total))}"></progress> '
        rows.append([
            f'<span class="name">{_text(job.name)}</span><span class="id">{_text(job.job)}</span>',
            _whole(_text(job.status.replace("_", " "))), _whole(f"{share}{ended:,} of {job.total:,}"),
            f"{job.failed:,}", f"{job.running:,}", f"{job.waiting:,}", _text(top.short_rate(job)),
            "-" if left is None else _text(duration(left)),
        ])  # fmt: skip
    names = ("Job", "Status", "Done", "Failed", "Running", "Waiting", "Rate", "Left")
    return _table(names, rows, right=range(3, 8)) if rows else '<p class="none">No job.</p>'


def _workers(workers: Sequence[messages.WorkerInfo]) -> str:
    rows = []
    for one in workers:
        models = ", ".join(model.name for model in one.models) or "-"
        engine, use = one.engine, top.link_use(one)
        pages = engine.pages_held + engine.pages_free
        rows.append([
            f'<span class="name">{_text(one.worker)}</span><span class="id">{_text(models)}</span>',
            _whole(f"{_text(one.phase)}, epoch {one.epoch}"), f"{one.running:,} of {one.concurrency:,}",
            f"{one.assigned:,}", f"{one.tokens_s:.1f}", _of(one.ring.live, one.ring.capacity),
            f"{engine.pages_held:,} of {pages:,}" if pages else "-",
            _of(engine.headroom_held_bytes, engine.headroom_bytes),
            f"{one.staged_bytes_s / 1e9:.2f} GB/s" + ("" if use is None else f" ({use:.0%})"),
            f"{one.last_beat_s:.1f} s",
        ])  # fmt: skip
    names = ("Worker", "State", "Running", "Held", "Tokens/s", "Ring", "Pages", "Headroom", "Link", "Last beat")
    return _table(names, rows, right=range(2, 10)) if rows else '<p class="none">No worker is logged in.</p>'


def _waiting(waiting: Sequence[top.Waiting]) -> str:
    rows = [[f"{one.lines:,}", _text(one.where), f'<span class="name">{_text(one.reason)}</span>'] for one in waiting]
    return _table(("Lines", "Where", "Why"), rows, right=()) if rows else '<p class="none">None waits.</p>'


def _whole(cell: str) -> str:
    """HTML that is not broken over lines."""
    return f'<span class="whole">{cell}</span>'


def _of(part: float, whole: float) -> str:
    return f"{_text(amount(part, 'bytes'))} of {_text(amount(whole, 'bytes'))}" if whole else "-"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Any) -> str:
    """``rows`` are HTML already; the name of its column goes with each cell, for narrow screens."""
    kinds = [' class="n"' if at in right else "" for at in range(len(names))]
    head = "".join(f"<th{kind}>{name}</th>" for name, kind in zip(names, kinds, strict=True))
    lines = []
    for row in rows:
        cells = zip(names, kinds, row, strict=True)
        lines.append("".join(f'<td{kind} data-name="{name}"><span>{cell}</span></td>' for name, kind, cell in cells))
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def _document(title: str, body: str, refresh: bool = False) -> str:
    again = f'<meta http-equiv="refresh" content="{limits.HTTP_REFRESH_S}">' if refresh else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}<title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>"
    )


def _text(text: str) -> str:
    """Text that stays text, wherever it came from, between tags and inside a quoted attribute."""
    return escape(printable(text), quote=True)
