"""shell: the client's sub-commands: submit, jobs, status, watch, fetch, cancel, audit, workers. Decides nothing.

Results go to standard output, everything else to stderr. Exit codes: those of ``broker.client_rules`` and
``common.errors``; Ctrl-C is 130 and leaves the job running.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from broker import client as fleet
from broker import client_rules as rules
from broker.asking import Broker, Insecure, Json, Keys, Timeout, asking, print_json
from broker.outfile import commit_all, outputs
from broker.run import run_command
from broker.show import Show, show
from broker.top_commands import top
from common import messages
from common.config import seconds
from common.errors import HaulierError, NotFinishedError, RefusedError, UsageError
from common.ids import new_id
from common.printable import printable

INTERRUPTED = 130
POLL_S = 0.5
PROBLEMS_SHOWN_MAX_COUNT = 20
"""Bad lines printed when the job runs without them; all of them are in the error file and in --json."""

Job = Annotated[str, typer.Argument(metavar="JOB", envvar="HAULIER_JOB", help="The job's id, as submit printed it.")]


def register(app: typer.Typer) -> None:
    """Add the client's sub-commands to ``app``."""
    for command in (submit, jobs, status, watch, fetch, cancel, delete, audit, explain, workers, top):
        app.command()(command)
    app.command("run")(run_command)


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL file of requests, one a line.")],
    job_id: Annotated[
        str, typer.Option(envvar="HAULIER_JOB_ID", help="The job's id, a UUID of your own: submitting again is safe.")
    ] = "",
    name: Annotated[
        str, typer.Option(envvar="HAULIER_NAME", help="What people call the job; default: FILE's name.")
    ] = "",
    model: Annotated[str, typer.Option(envvar="HAULIER_MODEL", help="Refuse lines that ask for another model.")] = "",
    lenient: Annotated[
        bool,
        typer.Option("--lenient", envvar="HAULIER_LENIENT", help="Run the good lines; bad ones become error lines."),
    ] = False,
    priority: Annotated[int, typer.Option(envvar="HAULIER_PRIORITY", help="Higher runs first, also negative.")] = 0,
    window: Annotated[
        str, typer.Option(envvar="HAULIER_WINDOW", help="Time the job may take, such as 24h; 0 for no limit.")
    ] = "0",
    wait: Annotated[bool, typer.Option("--wait", envvar="HAULIER_WAIT", help="Watch it to its end.")] = False,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Submit a file of requests; print the job's id once the broker has the file, and every bad line in it."""
    job, failed = rules.checked_job(job_id) if job_id else new_id(), ""
    order = fleet.Order(
        job, rules.job_name(file.name, name), lenient, _priority(priority), seconds(window, "--window"), model
    )
    fleet.check_input(file)
    with asking(broker, keys, insecure, timeout) as client, show() as bar:
        try:
            bar.phase("hashing", unit="bytes")
            source = fleet.hash_file(file, bar.update)
            bar.phase("sending", source.size, "bytes")
            info = fleet.submit(client, source, order, bar.update)
            if not as_json:
                typer.echo(job)
            info = _validated(client, info, bar)
            found = list(fleet.problems(client, job)) if info.problems else []
            if wait and info.status != "failed":
                info = _watched(client, job, bar)
                failed = "" if as_json else _failed(client, info)
        except KeyboardInterrupt:
            bar.say(f"stopped here; what the broker has of {job} stays there: see haulier status {job}")
            raise typer.Exit(INTERRUPTED) from None
        if as_json:
            print_json({**rules.as_json(info), "bad_lines": [rules.as_json(problem) for problem in found]})
        _tell_problems(info, found, bar, as_json)
    if info.status == "failed":
        raise RefusedError(_failed_words(info, lenient))
    if wait:
        _end(info, failed, as_json)


def jobs(
    broker: Broker = "", keys: Keys = None, insecure: Insecure = False, timeout: Timeout = 30.0, as_json: Json = False
) -> None:
    """List the jobs that your key may see, newest first."""
    with asking(broker, keys, insecure, timeout) as client:
        found = list(fleet.jobs(client))
    _print_all(found, rules.jobs_table(found), "jobs", as_json)


def workers(
    broker: Broker = "", keys: Keys = None, insecure: Insecure = False, timeout: Timeout = 30.0, as_json: Json = False
) -> None:
    """List the workers that are logged in, and what each one does."""
    with asking(broker, keys, insecure, timeout) as client:
        found = client.ask(messages.AskWorkers(0), messages.Workers).workers
    _print_all(found, rules.workers_table(found), "workers", as_json)


def status(
    job: Job,
    check: Annotated[
        bool, typer.Option("--check", envvar="HAULIER_CHECK", help="End with the job's exit code; 6: not finished.")
    ] = False,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Say how far a job is, and every bad line of its input."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client:
        info = client.ask(messages.AskStatus(0, job), messages.JobInfo)
        found = list(fleet.problems(client, job)) if info.problems else []
    if as_json:
        print_json({**rules.as_json(info), "bad_lines": [rules.as_json(problem) for problem in found]})
    else:
        typer.echo(rules.sentence(info))
        for problem in found:
            typer.echo(rules.problem_text(problem))
    if check:
        raise typer.Exit(rules.job_exit_code(info))


def watch(
    job: Job,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Follow a job to its end. Ctrl-C leaves it running. With --json, one object for each change."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client, show() as bar:
        try:
            info = _watched(client, job, bar, as_json)
            failed = "" if as_json else _failed(client, info)
        except KeyboardInterrupt:
            bar.say(f"stopped watching; {job} goes on: haulier watch {job}")
            raise typer.Exit(INTERRUPTED) from None
        found = list(fleet.problems(client, job)) if info.status == "failed" and info.problems else []
        _tell_problems(info, found, bar, as_json)
    if info.status == "failed":
        raise RefusedError(_failed_words(info))
    _end(info, failed, as_json)


def fetch(
    job: Job,
    output: Annotated[
        str, typer.Option("-o", "--output", envvar="HAULIER_OUTPUT", help="File for the lines; - prints them.")
    ],
    error: Annotated[
        str | None,
        typer.Option(
            "-e", "--error", envvar="HAULIER_ERROR", help="File for failed lines; without it they are in -o too."
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            envvar="HAULIER_PARTIAL",
            help="Take what is there of a job that is not finished (still exit 6).",
        ),
    ] = False,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Write a job's finished lines, in order of completion. The file is there whole or not at all."""
    job = rules.checked_job(job)
    if as_json and output == "-":
        raise UsageError("--json and -o - both print; name a file for one of them")
    with (
        asking(broker, keys, insecure, timeout) as client,
        outputs(output, error) as (first, second),
        show(bars=output != "-") as bar,
    ):
        info = client.ask(messages.AskStatus(0, job), messages.JobInfo)
        if info.status not in rules.ENDED and not partial:
            raise NotFinishedError(
                f"{rules.sentence(info)}; wait with haulier watch, or take part of it with --partial"
            )
        done, failed = fleet.Download(client, job, "output"), fleet.Download(client, job, "error")
        bar.phase("fetching", info.completed + info.failed)
        for download, file in ((done, first), (failed, second)):
            while data := download.pull():
                file.write(data)
                bar.update(done.lines + failed.lines, info.completed + info.failed)
        if info.status in rules.ENDED and not (done.ended and failed.ended):
            raise NotFinishedError(f"{job} is {info.status}, but its files are not closed yet; fetch it again")
        commit_all(first, second)
        if as_json:
            counts = {"output_lines": done.lines, "error_lines": failed.lines}
            print_json({**rules.as_json(info), **counts, "output": output, "error": error})
        else:
            where = "standard output" if output == "-" else output
            where = where if error is None or not failed.lines else f"{where} and {error}"
            bar.say(f"{done.lines} completed and {failed.lines} failed lines written to {where}")
    raise typer.Exit(rules.job_exit_code(info))


def cancel(
    job: Job,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Stop a job. Lines that are finished stay; each of the others ends as an error line."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client:
        info = client.ask(messages.CancelJob(0, job), messages.JobInfo)
    print_json(rules.as_json(info)) if as_json else typer.echo(rules.sentence(info))


def delete(
    job: Job,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Forget an ended job with all its lines. Fetch what you want to keep first."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client:
        gone = client.ask(messages.DeleteJob(0, job), messages.Deleted)
    typer.echo(json.dumps(rules.as_json(gone)) if as_json else f"{job} deleted: {rules.plural(gone.lines, 'line')}")


def audit(
    job: Job,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Prove from the broker's store that every line of a job ended exactly once, and count wasted work."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client:
        info = client.ask(messages.AskStatus(0, job), messages.JobInfo)
        found = client.ask(messages.AskAudit(0, job), messages.Audit)
    if as_json:
        print_json({**rules.as_json(found), "status": info.status})
    else:
        typer.echo("\n".join(rules.audit_text(found)))
    if not found.holds:
        if found.sound and not found.finished:
            raise NotFinishedError(f"{job} is {info.status}: some of its lines have not ended yet")
        raise typer.Exit(HaulierError.exit_code)


def explain(
    job: Job,
    custom_id: Annotated[
        str, typer.Argument(metavar="CUSTOM_ID", envvar="HAULIER_CUSTOM_ID", help="One line of it.")
    ] = "",
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Tell what became of a job, or of one of its lines: where it ran, what it waited for, how each attempt ended."""
    job = rules.checked_job(job)
    with asking(broker, keys, insecure, timeout) as client:
        found = client.ask(messages.Explain(0, job, custom_id), messages.Explained)
    print_json(rules.as_json(found)) if as_json else typer.echo("\n".join(map(printable, found.told)))


# ----------------------------------------------------------------------------------------------------------- helpers


def _priority(value: int) -> int:
    if not -1_000_000 <= value <= 1_000_000:
        raise UsageError(f"--priority {value} must lie within a million of 0")
    return value


def _validated(client: fleet.Client, info: messages.JobInfo, bar: Show) -> messages.JobInfo:
    """The job once its input is checked."""
    if info.status != "validating":
        return info
    bar.phase("validating")
    for now in fleet.follow(client, info.job, POLL_S / 5):
        bar.update(now.lines_read)
        info = now
        if info.status != "validating":
            break
    return info


def _watched(client: fleet.Client, job: str, bar: Show, as_json: bool = False) -> messages.JobInfo:
    last: dict[str, Any] = {}
    phase = ""
    for info in fleet.follow(client, job, POLL_S):
        if as_json and (now := rules.as_json(info)) != last:
            last = now
            print_json(now)
        if phase != info.status:
            phase = info.status
            bar.phase(phase.replace("_", " "), info.total)
        if info.status == "validating":
            bar.update(info.lines_read)
        else:
            bar.update(info.completed + info.failed, info.total, rules.watch_note(info))
    return info


def _tell_problems(info: messages.JobInfo, found: list[messages.Problem], bar: Show, as_json: bool) -> None:
    """Every bad line of a job that failed for them; the first ones of a job that goes on without them."""
    shown = found if info.status == "failed" else found[:PROBLEMS_SHOWN_MAX_COUNT]
    if as_json:
        return
    for problem in shown:
        bar.say(rules.problem_text(problem))
    if info.problems > len(shown):
        bar.say(f"and {rules.plural(info.problems - len(shown), 'more bad line')}")


def _failed_words(info: messages.JobInfo, lenient: bool = False) -> str:
    if not info.problems or lenient:
        return f"{info.job} failed: {info.reason or 'none of its lines can run'}"
    return (
        f"{info.job} failed: {rules.plural(info.problems, 'bad line')}, nothing was run; mend the file or use --lenient"
    )


def _failed(client: fleet.Client, info: messages.JobInfo) -> str:
    """What went wrong with the failed lines of a job that ran, in words."""
    return rules.failure_words(info, fleet.failures(client, info.job)) if info.failed else ""


def _end(info: messages.JobInfo, failed: str, quiet: bool) -> None:
    if not quiet:
        typer.echo(rules.sentence(info), err=True)
        if failed:
            typer.echo(failed, err=True)
    raise typer.Exit(rules.job_exit_code(info))


def _print_all(found: Iterable[Any], table: Iterable[str], name: str, as_json: bool) -> None:
    if as_json:
        print_json({name: [rules.as_json(one) for one in found]})
    else:
        typer.echo("\n".join(table))
