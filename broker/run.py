"""shell: ``haulier run``: a whole fleet on this machine, for one input file; resumes from its state folder.

A client like any other, which also starts the broker and the workers it talks to, each in a process of its own. What
is decided stands in ``run_rules``. Killed at any point and run again it goes on: the job is the same one (its id comes
from the input), finished lines are in the broker's store, and OUT appears whole, at the end.

Without ``--state`` the state lies in ``.OUT.haulier`` beside OUT, and goes away once OUT is written; a named state
folder stays, so that a second run does no work.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from broker import client as fleet
from broker import client_rules, run_rules
from broker.children import Children, free_endpoint
from broker.outfile import OutFile, commit_all, outputs
from broker.show import Show, show
from broker.state_folder import StateFolder, beside, state_folder
from common import keys, messages
from common.config import ClientSettings, EngineSettings, KeySettings
from common.engine_options import (
    DEFAULTS,
    BurstPages,
    DraftTokens,
    Graphs,
    HeadroomGib,
    HeadroomReserveGib,
    OwnTokens,
    Retain,
    SharedHistories,
    TargetPages,
)
from common.errors import HaulierError, InvariantError, RefusedError, UsageError

INTERRUPTED = 130
POLL_S = 0.2
TIMEOUT_S = 120.0
"""Our own broker is on this machine: if it says nothing for so long, it hangs."""


class TerminatedError(HaulierError):
    """The run itself was told to end by SIGTERM; the shell's own code for it."""

    exit_code = 128 + signal.SIGTERM


class BadInputError(RefusedError):
    """The input has bad lines, and nothing was run: its state is worth nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is asked for. ``state`` None: beside the output, until it is written."""

    source: Path
    output: str
    error: str | None
    engine: EngineSettings
    state: Path | None = None
    workers: int = 1
    lenient: bool = False
    echo: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} must be 1 or more")
        if self.output == "-" and self.state is None:
            raise UsageError("-o - leaves no place for the state of the run; name a folder by --state")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: the job, lines finished by earlier runs, seconds taken; of failed lines, in words, why."""

    info: messages.JobInfo
    before: int
    seconds: float
    failed: str = ""


def run_command(
    source: Annotated[Path, typer.Option("-i", "--input", envvar="HAULIER_INPUT", help="JSONL file of requests.")],
    output: Annotated[str, typer.Option("-o", "--output", envvar="HAULIER_OUTPUT", help="File for the answers.")],
    model: Annotated[str, typer.Option(envvar="HAULIER_MODEL", help="Model to serve: a name, a folder or a hub id.")],
    error: Annotated[
        str | None,
        typer.Option(
            "-e", "--error", envvar="HAULIER_ERROR", help="File for failed lines; without it they are in -o too."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(envvar="HAULIER_STATE", help="Folder to resume from; default: beside OUT until OUT is written."),
    ] = None,
    workers: Annotated[int, typer.Option(envvar="HAULIER_WORKERS", help="Worker processes to start.")] = 1,
    lenient: Annotated[
        bool,
        typer.Option("--lenient", envvar="HAULIER_LENIENT", help="Run the good lines; bad ones become error lines."),
    ] = False,
    device: Annotated[str, typer.Option(envvar="HAULIER_DEVICE", help="cpu or cuda:N.")] = DEFAULTS.device,
    device_pages_gib: Annotated[
        int, typer.Option(envvar="HAULIER_DEVICE_PAGES_GIB", help="Device memory for pages, whole GiB.")
    ] = DEFAULTS.device_pages_gib,
    host_pool_gib: Annotated[
        float, typer.Option(envvar="HAULIER_HOST_POOL_GIB", help="Host memory for histories, GiB.")
    ] = DEFAULTS.host_pool_gib,
    concurrency: Annotated[
        int, typer.Option(envvar="HAULIER_CONCURRENCY", help="Requests at once in each worker.")
    ] = DEFAULTS.concurrency,
    context_tokens: Annotated[
        int, typer.Option(envvar="HAULIER_CONTEXT_TOKENS", help="Longest prompt with its answer, tokens.")
    ] = DEFAULTS.context_tokens,
    fit: Annotated[
        str, typer.Option(envvar="HAULIER_FIT", help="What does not fit is refused, or concurrency shrinks.")
    ] = DEFAULTS.fit,
    residency: Annotated[
        str, typer.Option(envvar="HAULIER_RESIDENCY", help="staged, or full: the reference route.")
    ] = DEFAULTS.residency,
    page_tokens: Annotated[
        int, typer.Option(envvar="HAULIER_PAGE_TOKENS", help="Tokens of one page.")
    ] = DEFAULTS.page_tokens,
    chunk_tokens: Annotated[
        int, typer.Option(envvar="HAULIER_CHUNK_TOKENS", help="New prompt tokens of one step.")
    ] = DEFAULTS.chunk_tokens,
    slot_gib: Annotated[
        float, typer.Option(envvar="HAULIER_SLOT_GIB", help="One staging slot, GiB; 0: what the histories need.")
    ] = DEFAULTS.slot_gib,
    dtype: Annotated[
        str, typer.Option(envvar="HAULIER_DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = DEFAULTS.dtype,
    threads: Annotated[
        int, typer.Option(envvar="HAULIER_THREADS", help="Processor threads with --device cpu; 0: half the cores.")
    ] = DEFAULTS.threads,
    retain: Retain = DEFAULTS.retain,
    target_pages: TargetPages = DEFAULTS.target_pages,
    burst_pages: BurstPages = DEFAULTS.burst_pages,
    headroom_gib: HeadroomGib = DEFAULTS.headroom_gib,
    headroom_reserve_gib: HeadroomReserveGib = DEFAULTS.headroom_reserve_gib,
    own_tokens: OwnTokens = DEFAULTS.own_tokens,
    shared_histories: SharedHistories = DEFAULTS.shared_histories,
    graphs: Graphs = DEFAULTS.graphs,
    draft_tokens: DraftTokens = DEFAULTS.draft_tokens,
    echo: Annotated[
        bool, typer.Option("--echo", envvar="HAULIER_ECHO", help="No model: each answer is its request's own text.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="HAULIER_JSON", help="Print what became of it as JSON.")
    ] = False,
) -> None:
    """Answer a file of requests with a fleet of its own on this machine: start, run, stop. Run again, it resumes."""
    engine = EngineSettings(
        model=model, device=device, device_pages_gib=device_pages_gib, host_pool_gib=host_pool_gib,
        concurrency=concurrency, context_tokens=context_tokens, fit=fit, residency=residency, page_tokens=page_tokens,
        chunk_tokens=chunk_tokens, slot_gib=slot_gib, dtype=dtype, threads=threads, retain=retain,
        target_pages=target_pages, burst_pages=burst_pages, headroom_gib=headroom_gib,
        headroom_reserve_gib=headroom_reserve_gib, own_tokens=own_tokens, shared_histories=shared_histories,
        graphs=graphs, draft_tokens=draft_tokens,
    )  # fmt: skip
    plan = Plan(source, output, error, engine, state, workers, lenient, echo)
    if as_json and output == "-":
        raise UsageError("--json and -o - both print; name a file for one of them")
    with show(announce=True, bars=output != "-") as bar, _sigterm_raises():
        try:
            outcome = run(plan, bar)
        except KeyboardInterrupt:
            again = f" with the same --state {state}" if state is not None else ""
            bar.say(f"stopped; run it again{again} to go on where it was")
            raise typer.Exit(INTERRUPTED) from None
        bar.say(run_rules.summary(outcome.info, outcome.seconds, outcome.before, output, error))
        if outcome.failed:
            bar.say(outcome.failed)
    if as_json:
        typer.echo(json.dumps(_as_json(outcome, plan)))
    raise typer.Exit(client_rules.job_exit_code(outcome.info))


def _as_json(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    return {
        **client_rules.as_json(outcome.info),
        "finished_before": outcome.before,
        "seconds": round(outcome.seconds, 3),
        "output": plan.output,
        "error": plan.error,
    }


def run(plan: Plan, bar: Show) -> Outcome:
    """Do it all; this is the flow of a run. Main thread. Raises what the command line turns into its exit code."""
    began = time.monotonic()
    fleet.check_input(plan.source)
    with outputs(plan.output, plan.error, plan.source) as (first, second), _state_of(plan, bar) as folder:
        bar.phase("hashing", unit="bytes")
        source = fleet.hash_file(plan.source, bar.update)
        keys.init(folder.keys, if_absent=True)
        try:
            with Children(folder, bar.say) as children:
                info, before, failed = _interruptible(Run(plan, bar, folder, children), bar, source, first, second)
                commit_all(first, second)
        except BadInputError:
            if plan.state is None:
                folder.remove()
            raise
        if plan.state is None:
            folder.remove()
    return Outcome(info, before, time.monotonic() - began, failed)


def _interruptible(
    one: Run, bar: Show, source: fleet.InputFile, first: OutFile, second: OutFile
) -> tuple[messages.JobInfo, int, str]:
    try:
        return one.finish(source, first, second)
    except KeyboardInterrupt:
        bar.say("stopping; what runs may finish for some seconds, Ctrl-C again ends it now")
        raise


class Run:
    """One run with its folder locked and its children to start: they live no longer than it."""

    def __init__(self, plan: Plan, bar: Show, folder: StateFolder, children: Children) -> None:
        self._plan = plan
        self._bar = bar
        self._folder = folder
        self._children = children
        self._kept, self._endpoint = free_endpoint()
        self._loaded = False
        self._phase = ""

    def finish(self, source: fleet.InputFile, first: OutFile, second: OutFile) -> tuple[messages.JobInfo, int, str]:
        """Bring the job to its end, its lines into the two files.

        Returns it, how many lines earlier runs had finished, and in words why lines failed.
        """
        settings = ClientSettings((self._endpoint,), KeySettings(self._folder.keys), TIMEOUT_S)
        with self._kept, fleet.Client(settings, self._children.check) as client:
            self._start("starting", "broker", run_rules.broker_arguments(
                self._endpoint, str(self._folder.broker), str(self._folder.keys)))  # fmt: skip
            job = run_rules.job_id(source.sha256, self._plan.engine.model, self._plan.lenient)
            info = client.answer_to(messages.AskStatus(0, job))
            self._children.mark_ready("broker")
            before = 0
            if isinstance(info, messages.JobInfo):
                before = info.completed + info.failed
            if not isinstance(info, messages.JobInfo) or info.status not in client_rules.ENDED:
                self._start_workers()
                info = self._submit(client, job, source)
            lines = self._receive(client, info, first, second)
            info = client.ask(messages.AskStatus(0, job), messages.JobInfo)
            self._prove(client, info, *lines)
            failed = fleet.failures(client, job) if info.failed else []
            return info, before, client_rules.failure_words(info, failed)

    def _start(self, phase: str, name: str, arguments: list[str]) -> None:
        self._show(phase)
        self._children.start(name, "broker" if name == "broker" else "worker", arguments)

    def _start_workers(self) -> None:
        for number in range(self._plan.workers):
            name = "worker" if self._plan.workers == 1 else f"worker {number}"
            self._start(self._phase, name, run_rules.worker_arguments(
                self._endpoint, str(self._folder.worker), str(self._folder.keys), self._plan.engine, self._plan.echo,
            ))  # fmt: skip

    def _submit(self, client: fleet.Client, job: str, source: fleet.InputFile) -> messages.JobInfo:
        self._show("sending", source.size, "bytes")
        name = client_rules.job_name(self._plan.source.name)
        # an unfinished job of another input lies in this folder too? it may resume another day, behind this one
        newest_first = min(sum(1 for _ in fleet.jobs(client)), 1_000_000)
        order = fleet.Order(job, name, self._plan.lenient, newest_first, model=self._plan.engine.model)
        return fleet.submit(client, source, order, self._bar.update)

    def _receive(
        self, client: fleet.Client, info: messages.JobInfo, first: OutFile, second: OutFile
    ) -> tuple[int, int]:
        """Follow the job to its end, writing lines as they are finished; how many of each kind."""
        done, failed = fleet.Download(client, info.job, "output"), fleet.Download(client, info.job, "error")
        finished = info.completed + info.failed
        for now in fleet.follow(client, info.job, POLL_S):
            info = now
            self._refuse_failed(client, info)
            self._look_for_workers(client, info)
            self._tell(info)
            if info.completed + info.failed > finished:
                finished = info.completed + info.failed
                self._children.progressed()
            if info.status != "validating":
                fleet.drain(done, first.write)
                fleet.drain(failed, second.write)
        self._children.stop("worker")
        while not (done.ended and failed.ended):
            moved = fleet.drain(done, first.write) | fleet.drain(failed, second.write)
            if not moved and not (done.ended and failed.ended):
                client.sleep(POLL_S)
        return done.lines, failed.lines

    def _refuse_failed(self, client: fleet.Client, info: messages.JobInfo) -> None:
        """Raises, after listing every bad line, when the input did not pass."""
        if info.status != "failed":
            return
        for problem in fleet.problems(client, info.job):
            self._bar.say(client_rules.problem_text(problem))
        if not info.problems:
            raise BadInputError(f"{self._plan.source} failed: {info.reason or 'none of its lines can run'}")
        bad = client_rules.plural(info.problems, "bad line")
        raise BadInputError(f"{self._plan.source} has {bad}, nothing was run; mend the file or use --lenient")

    def _look_for_workers(self, client: fleet.Client, info: messages.JobInfo) -> None:
        if self._loaded or info.status in client_rules.ENDED:
            return
        found = client.ask(messages.AskWorkers(0), messages.Workers).workers
        if sum(worker.phase != "loading" for worker in found) >= self._plan.workers:
            self._loaded = True
            self._children.mark_ready("worker")

    def _tell(self, info: messages.JobInfo) -> None:
        name = run_rules.phase(info, self._loaded)
        self._show(name, 0 if name in ("loading model", "validating") else info.total)
        if name == "validating":
            self._bar.update(info.lines_read)
        elif name != "loading model":
            self._bar.update(info.completed + info.failed, info.total, client_rules.watch_note(info))

    def _show(self, name: str, total: float = 0, unit: str = "lines") -> None:
        if name != self._phase:
            self._phase = name
            self._bar.phase(name, total, unit)

    def _prove(self, client: fleet.Client, info: messages.JobInfo, done: int, failed: int) -> None:
        """D4, before OUT appears: what is in the files is what the store says, each line once."""
        audit = client.ask(messages.AskAudit(0, info.job), messages.Audit)
        if not audit.holds or (audit.output_lines, audit.error_lines) != (done, failed):
            raise InvariantError(
                f"{done} output and {failed} error lines came, but the store says {audit.output_lines} and "
                f"{audit.error_lines}: {'; '.join(audit.findings) or 'no finding'}"
            )


def _state_of(plan: Plan, bar: Show) -> contextlib.AbstractContextManager[StateFolder]:
    return state_folder(plan.state if plan.state is not None else beside(plan.output), time.sleep, bar.say)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Told to end, the run ends its children first, as after Ctrl-C."""

    def told(number: int, frame: Any) -> None:
        raise TerminatedError("told to end by SIGTERM; run it again with the same state folder to go on")

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
