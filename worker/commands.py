"""shell: the worker's part of the command line: ``haulier worker``, ``model`` and ``bench``. Knows no rule.

Every flag may also come from the environment as HAULIER_<FLAG>. Without the worker extra ``worker --echo`` still runs;
whatever needs a model says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import typer

from common import keys as key_files
from common import limits, log, parent
from common.cli import not_installed
from common.config import EngineSettings, KeySettings, WorkerSettings, endpoints
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
    TensorParallel,
)
from common.errors import RefusedError

BENCHES = (("ring.commands", "register_bench"), ("worker.engine_bench_commands", "register"))
"""Rooms that add a sub-command to ``haulier bench``: module and function."""


def register(app: typer.Typer) -> None:
    """Add this room's commands to ``app``."""
    app.command("worker")(worker)
    from worker import doctor_commands, model_commands, selfcheck_commands

    model_commands.register(app)
    selfcheck_commands.register(app)
    doctor_commands.register(app)
    bench = _bench_of(app)
    for module, function in BENCHES:
        if importlib.util.find_spec(module) is None:
            continue
        try:
            getattr(importlib.import_module(module), function)(bench)
        except ModuleNotFoundError as failure:
            if not_installed(failure) is None:
                raise


def _bench_of(app: typer.Typer) -> typer.Typer:
    """The group ``bench``, which other rooms add to as well: two groups of one name would hide each other."""
    for group in app.registered_groups:
        if group.name == "bench" and group.typer_instance is not None:
            return group.typer_instance
    bench = typer.Typer(help="Measure ring and engine on this machine.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    return bench


def worker(
    broker: str = typer.Option(
        ..., "--broker", envvar="HAULIER_BROKER", help="tcp://HOST:PORT, several by commas, tried in order."
    ),
    state: Path = typer.Option(..., "--state", envvar="HAULIER_STATE", help="Folder for state; workers may share it."),
    model: str = typer.Option("", "--model", envvar="HAULIER_MODEL", help="A known name, a folder or a hub id."),
    keys: Path | None = typer.Option(None, "--keys", envvar="HAULIER_KEYS", help="Key folder (haulier keys init)."),
    insecure: bool = typer.Option(False, "--insecure", envvar="HAULIER_INSECURE", help="Speak without keys."),
    force_insecure: bool = typer.Option(
        False, "--force-insecure", envvar="HAULIER_FORCE_INSECURE", help="Allow --insecure beyond loopback."
    ),
    device: str = typer.Option("cpu", "--device", envvar="HAULIER_DEVICE", help="cpu or cuda:N."),
    device_pages_gib: int = typer.Option(
        1, "--device-pages-gib", envvar="HAULIER_DEVICE_PAGES_GIB", help="Device page pool, whole GiB."
    ),
    host_pool_gib: float = typer.Option(
        1.0, "--host-pool-gib", envvar="HAULIER_HOST_POOL_GIB", help="Pinned host pool for histories, GiB."
    ),
    concurrency: int = typer.Option(8, "--concurrency", envvar="HAULIER_CONCURRENCY", help="Requests run at once."),
    context_tokens: int = typer.Option(
        limits.CONTEXT_TOKENS,
        "--context-tokens",
        envvar="HAULIER_CONTEXT_TOKENS",
        help="Longest prompt with its answer, tokens.",
    ),
    fit: str = typer.Option("refuse", "--fit", envvar="HAULIER_FIT", help="refuse or shrink what does not fit."),
    residency: str = typer.Option(
        "staged", "--residency", envvar="HAULIER_RESIDENCY", help="staged, or full: the reference, all on the device."
    ),
    page_tokens: int = typer.Option(
        limits.PAGE_TOKENS, "--page-tokens", envvar="HAULIER_PAGE_TOKENS", help="Tokens of one page."
    ),
    chunk_tokens: int = typer.Option(
        limits.PREFILL_CHUNK_TOKENS,
        "--chunk-tokens",
        envvar="HAULIER_CHUNK_TOKENS",
        help="New prompt tokens of one step.",
    ),
    slot_gib: float = typer.Option(
        0.0, "--slot-gib", envvar="HAULIER_SLOT_GIB", help="One staging slot, GiB; 0: what the histories need."
    ),
    dtype: str = typer.Option("auto", "--dtype", envvar="HAULIER_DTYPE", help="auto, float32, bfloat16 or float16."),
    threads: int = typer.Option(
        0, "--threads", envvar="HAULIER_THREADS", help="Processor threads with --device cpu; 0: half the cores."
    ),
    retain: Retain = DEFAULTS.retain,
    target_pages: TargetPages = DEFAULTS.target_pages,
    burst_pages: BurstPages = DEFAULTS.burst_pages,
    headroom_gib: HeadroomGib = DEFAULTS.headroom_gib,
    headroom_reserve_gib: HeadroomReserveGib = DEFAULTS.headroom_reserve_gib,
    own_tokens: OwnTokens = DEFAULTS.own_tokens,
    shared_histories: SharedHistories = DEFAULTS.shared_histories,
    graphs: Graphs = DEFAULTS.graphs,
    draft_tokens: DraftTokens = DEFAULTS.draft_tokens,
    tensor_parallel: TensorParallel = DEFAULTS.tensor_parallel,
    ring_mib: int = typer.Option(64, "--ring-mib", envvar="HAULIER_RING_MIB", help="Payload of the ring, MiB."),
    metrics_port: int = typer.Option(
        0, "--metrics-port", envvar="HAULIER_METRICS_PORT", help="Serve metrics there; 0 for no port."
    ),
    echo: bool = typer.Option(False, "--echo", envvar="HAULIER_ECHO", help="No model: answer with the request's text."),
    echo_delay_ms: int = typer.Option(
        0, "--echo-delay-ms", envvar="HAULIER_ECHO_DELAY_MS", help="How long an echo takes."
    ),
    echo_witness: Path | None = typer.Option(
        None, "--echo-witness", envvar="HAULIER_WITNESS", help="Append a line here for each request that is run."
    ),
) -> None:
    """Serve a broker: run requests on one device until told to end (SIGTERM drains, a second one leaves at once)."""
    log.setup()
    settings = WorkerSettings(
        brokers=endpoints(broker),
        state=state,
        keys=KeySettings(keys, insecure, force_insecure),
        engine=EngineSettings(
            model=model or ("echo" if echo else ""), device=device, device_pages_gib=device_pages_gib,
            host_pool_gib=host_pool_gib, concurrency=concurrency, context_tokens=context_tokens, fit=fit,
            residency=residency, page_tokens=page_tokens, chunk_tokens=chunk_tokens, slot_gib=slot_gib, dtype=dtype,
            threads=threads, retain=retain, target_pages=target_pages, burst_pages=burst_pages,
            headroom_gib=headroom_gib, headroom_reserve_gib=headroom_reserve_gib, own_tokens=own_tokens,
            shared_histories=shared_histories, graphs=graphs, draft_tokens=draft_tokens,
            tensor_parallel=tensor_parallel,
        ),
        ring_mib=ring_mib,
        metrics_port=metrics_port,
        echo=echo,
        echo_delay_ms=echo_delay_ms,
        witness=echo_witness,
    )  # fmt: skip
    if keys is not None and not insecure and (words := key_files.exposed(keys)):
        log.get("worker").warning("keys_exposed", reason=words)
    parent.follow_parent()
    if not echo:
        # read when torch's threads first start: spinning at each barrier, they would take the cores from broker,
        # session and each other (a step on two shared cores took 6 times as long)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        _need_extra()
    from worker import process  # needs numpy, which the client's machine may lack

    process.serve(settings)


def _need_extra() -> None:
    """Say now what a model needs, and not after a login."""
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise not_installed(ModuleNotFoundError(name=module)) or RefusedError(
                f"{module} is not installed here, and a worker with a model needs it: pip install 'haulier[worker]'"
            )
