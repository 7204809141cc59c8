"""values: what an operator may set: one checked object a process, filled by flags and environment alike.

Each class checks itself when made and raises ``UsageError`` naming the flag to change. Fit against a model's geometry
is checked by the engine, which alone knows it. Knows no command-line library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common import limits
from common.errors import UsageError

GIB = 1024**3
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.*-]+):([0-9]{1,5}|\*)")
_HTTP_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")


def endpoints(text: str, flag: str = "--broker") -> tuple[str, ...]:
    """``EP[,EP...]`` as a tuple of ZeroMQ endpoints; ``host:port`` is read as ``tcp://host:port``. ``flag`` said it."""
    found = []
    for part in (piece.strip() for piece in text.split(",")):
        full = part if "://" in part else f"tcp://{part}"
        match = _ENDPOINT.fullmatch(full)
        if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65536):
            raise UsageError(f"{flag} {part!r} is not tcp://HOST:PORT")
        found.append(full)
    return tuple(found)


def seconds(text: str, flag: str) -> int:
    """``90``, ``90s``, ``15m``, ``24h`` or ``30d`` in seconds; ``flag`` said it."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text.strip())
    if match is None:
        raise UsageError(f"{flag} {text!r} is not a duration such as 90s, 15m, 24h or 30d")
    return int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _need(holds: bool, words: str) -> None:
    if not holds:
        raise UsageError(words)


def _is_loopback(address: str) -> bool:
    """Whether HOST:PORT, with a scheme before it or without, is reached from this machine alone."""
    return re.fullmatch(r"(?:tcp://)?(?:127\.[0-9.]+|localhost|\[::1\]):.*", address) is not None


def _sized(flag: str, amount: float, least: float = 0, unit_bytes: int = GIB) -> None:
    most = limits.SIZE_MAX_BYTES // unit_bytes
    _need(least <= amount <= most, f"{flag} {amount} must be {least} or more, and at most {most}")


def _counted(flag: str, count: int, least: int) -> None:
    most = limits.ENGINE_MAX_COUNT
    _need(least <= count <= most, f"{flag} {count} must be {least} or more, and at most {most}")


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Where the CURVE keys lie (S5). ``insecure`` is the only way to run without, on loopback unless ``force``."""

    directory: Path | None = None
    insecure: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        _need(
            self.insecure or self.directory is not None,
            "--keys DIR (or HAULIER_KEYS) says where the keys lie; make them with: haulier keys init DIR",
        )


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a client reaches the fleet."""

    brokers: tuple[str, ...]
    keys: KeySettings
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _need(bool(self.brokers), "--broker EP (or HAULIER_BROKER) says which broker to ask")
        _need(self.timeout_s > 0, f"--timeout {self.timeout_s} must be above 0")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The broker's files and batches endpoints over HTTP. Without ``keys`` on loopback alone: everybody is let in."""

    address: str
    """HOST:PORT; port 0 lets the system choose."""
    keys: Path | None = None
    """A file of KEY TENANT lines."""
    upload_mib: int = 512
    """The most one uploaded file may have."""
    cert: Path | None = None
    key: Path | None = None
    """PEM files for TLS: the certificate with its chain, and its key; both, or neither for plain HTTP."""

    def __post_init__(self) -> None:
        match = _HTTP_ADDRESS.fullmatch(self.address)
        _need(
            match is not None and int(match[2]) < 65536,
            f"--http {self.address!r} is not HOST:PORT, such as 127.0.0.1:8000",
        )
        _need(
            self.keys is not None or _is_loopback(self.address),
            f"--http {self.address} would let anyone who reaches it in: give --http-keys FILE, or use 127.0.0.1",
        )
        _need(
            (self.cert is None) == (self.key is None), "--http-cert and --http-key go together: give both, or neither"
        )
        _sized("--http-upload-mib", self.upload_mib, least=1, unit_bytes=1024**2)

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """One broker process."""

    bind: str
    state: Path
    keys: KeySettings
    disk_reserve_gib: float = 1.0
    metrics_port: int = 0
    grace_s: float = 30.0
    keep_s: int = 0
    """Ended jobs are deleted after so long; 0 for never."""
    standby: bool = False
    """Wait for the store while another broker has it, and take over when that one ends."""
    http: HttpSettings | None = None

    def __post_init__(self) -> None:
        _need(_ENDPOINT.fullmatch(self.bind) is not None, f"--bind {self.bind!r} is not tcp://HOST:PORT")
        _need(
            not self.keys.insecure or self.keys.force or _is_loopback(self.bind),
            f"--insecure lets anyone at {self.bind} in; bind to 127.0.0.1, use --keys, or add --force-insecure",
        )
        _sized("--disk-reserve-gib", self.disk_reserve_gib)
        _need(0 <= self.metrics_port < 65536, "--metrics-port must be a port, or 0 for none")
        _need(self.grace_s >= 0, "--grace must be 0 s or more")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine may use (A1, A5, A6). GiB are 2^30 bytes; tokens are rows of history."""

    model: str
    device: str = "cpu"
    device_pages_gib: int = 1
    host_pool_gib: float = 1.0
    concurrency: int = 8
    context_tokens: int = limits.CONTEXT_TOKENS
    fit: str = "refuse"
    residency: str = "staged"
    page_tokens: int = limits.PAGE_TOKENS
    chunk_tokens: int = limits.PREFILL_CHUNK_TOKENS
    slot_gib: float = 0.0
    """Size of one staging slot; 0 for just what ``concurrency`` histories of one layer need."""
    dtype: str = "auto"
    threads: int = 0
    """Processor threads of the engine's arithmetic with ``--device cpu``; 0 for half the cores."""
    retain: str = "on"
    """Whether history is kept in device pages that the staging slots leave (H1); ``whole``: there are none, and a
    request runs only with its whole history in device pages, one after another if need be."""
    target_pages: int = 0
    """Device pages a context holds by right (A2); 0 shares the pool out equally."""
    burst_pages: int = 0
    """Pages it may borrow beyond while they are free; 0 for whatever is free."""
    headroom_gib: str = "0"
    """Device memory beside the pages in which history is kept, revocably (H2): whole GiB at most, or ``auto``."""
    headroom_reserve_gib: float = limits.HEADROOM_RESERVE_BYTES / GIB
    """Device memory that headroom leaves free."""
    own_tokens: int = 0
    """Most tokens of its own, question and answer, of a request that shares a history (H5); 0 gives each request room
    for a whole one."""
    shared_histories: int = -1
    """Histories shared by several requests that the pools hold beside the requests' own; 0 for none, -1 for as many as
    there is room for, or one with ``own_tokens``."""

    graphs: str = "auto"
    """Whether decode steps whose history is on the device are replayed as graphs; ``auto``: on a GPU."""
    draft_tokens: int = 0
    """Tokens proposed from a request's own text and verified in one staged pass; 0 drafts none."""
    tensor_parallel: int = 1
    """Devices that one model is spread over, from ``device`` on; pools and ``threads`` are each one's."""

    def __post_init__(self) -> None:
        _need(bool(self.model), "--model says which model to serve")
        _need(
            re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device) is not None,
            f"--device {self.device!r} is neither cpu nor cuda:N",
        )
        _sized("--device-pages-gib", self.device_pages_gib, least=1)
        _need(
            self.device_pages_gib == int(self.device_pages_gib),
            f"--device-pages-gib {self.device_pages_gib} must be a whole number of GiB",
        )
        _need(self.host_pool_gib > 0, f"--host-pool-gib {self.host_pool_gib} must be above 0")
        _sized("--host-pool-gib", self.host_pool_gib)
        _counted("--concurrency", self.concurrency, 1)
        _counted("--context-tokens", self.context_tokens, 2)
        _need(self.fit in ("refuse", "shrink"), f"--fit {self.fit!r} is neither refuse nor shrink")
        _need(self.residency in ("staged", "full"), f"--residency {self.residency!r} is neither staged nor full")
        _counted("--page-tokens", self.page_tokens, 1)
        _counted("--chunk-tokens", self.chunk_tokens, 1)
        _sized("--slot-gib", self.slot_gib)
        _need(self.retain in ("on", "off", "whole"), f"--retain {self.retain!r} is none of on, off, whole")
        _need(
            self.retain != "whole" or (not self.slot_gib and not self.target_pages and self.headroom_gib == "0"),
            "--retain whole keeps all history of running requests in device pages: leave out --slot-gib, "
            "--target-pages and --headroom-gib",
        )
        _need(
            self.target_pages == 0 or 2 <= self.target_pages <= limits.ENGINE_MAX_COUNT,
            f"--target-pages {self.target_pages} must be 0 (equal shares), or 2 (the floor) or more, "
            f"and at most {limits.ENGINE_MAX_COUNT}",
        )
        _counted("--burst-pages", self.burst_pages, 0)
        _need(
            re.fullmatch(r"auto|0|[1-9][0-9]{0,8}", self.headroom_gib) is not None,
            f"--headroom-gib {self.headroom_gib!r} is neither auto nor a whole number of GiB",
        )
        if self.headroom_gib != "auto":
            _sized("--headroom-gib", int(self.headroom_gib))
        _need(
            self.residency == "staged" or self.headroom_gib == "0",
            f"--headroom-gib {self.headroom_gib} keeps staged history: leave it out, or use --residency staged",
        )
        _sized("--headroom-reserve-gib", self.headroom_reserve_gib)
        _need(
            0 <= self.own_tokens <= self.context_tokens,
            f"--own-tokens {self.own_tokens} must be 0 (whole histories) to --context-tokens {self.context_tokens}",
        )
        _need(
            -1 <= self.shared_histories <= limits.ENGINE_MAX_COUNT,
            f"--shared-histories {self.shared_histories} must be 0 (none) or more, and at most "
            f"{limits.ENGINE_MAX_COUNT}, or -1 for as many as fit",
        )
        _need(
            not self.own_tokens or self.shared_histories != 0,
            f"--own-tokens {self.own_tokens} gives requests no room for a whole history: "
            "set --shared-histories to 1 or more, or leave --own-tokens out",
        )
        _need(
            0 <= self.draft_tokens <= limits.DRAFT_MAX_TOKENS,
            f"--draft-tokens {self.draft_tokens} must be 0 (none) to {limits.DRAFT_MAX_TOKENS}",
        )
        _need(self.graphs in ("auto", "on", "off"), f"--graphs {self.graphs!r} is none of auto, on, off")
        _need(0 <= self.threads <= 1024, f"--threads {self.threads} must be 0 (half the cores) to 1024")
        _need(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            f"--dtype {self.dtype!r} is none of auto, float32, bfloat16, float16",
        )
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Every rank makes the same plan: what plans by what one device measures, or was not tried, stays off."""
        asked = f"--tensor-parallel {self.tensor_parallel}"
        most = limits.RANKS_MAX_COUNT
        _need(1 <= self.tensor_parallel <= most, f"{asked} must be 1 (one device) to {most}")
        if self.tensor_parallel == 1:
            return
        _need(
            self.headroom_gib == "0",
            f"{asked} does not go with --headroom-gib {self.headroom_gib}, which follows one device's free memory: "
            "leave one of them out",
        )
        _need(
            not self.draft_tokens,
            f"{asked} does not go with --draft-tokens {self.draft_tokens}: leave one of them out",
        )
        _need(self.graphs != "on", f"{asked} replays no graphs: set --graphs to auto or off")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker process: one session, one ring, one engine."""

    brokers: tuple[str, ...]
    state: Path
    keys: KeySettings
    engine: EngineSettings
    ring_mib: int = 64
    metrics_port: int = 0
    echo: bool = False
    """No model: answers are the request's own text. For measuring the fleet alone."""
    echo_delay_ms: int = 0
    """How long an echo takes."""
    witness: Path | None = None
    """A file that gets one line for every request the engine begins to run: counts what was run, where it is run."""

    def __post_init__(self) -> None:
        _need(bool(self.brokers), "--broker EP (or HAULIER_BROKER) says which broker to serve")
        _sized("--ring-mib", self.ring_mib, least=1, unit_bytes=1024**2)
        _need(
            not self.echo or self.engine.tensor_parallel == 1,
            f"--tensor-parallel {self.engine.tensor_parallel} spreads a model, --echo has none: leave one of them out",
        )
        _need(self.echo_delay_ms >= 0, f"--echo-delay-ms {self.echo_delay_ms} must be 0 or more")
        _need(0 <= self.metrics_port < 65536, "--metrics-port must be a port, or 0 for none")
