"""values: what happens to a worker's session: everything its machine can be told, in order of flow. Knows no rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from common.messages import EngineReport, LineRef, ModelInfo, RingReport
from worker.structures import HeldUp, Outcome, Prepared


@dataclass(frozen=True, slots=True)
class LinkReady:
    """The connection asked for stands and both sides' keys fit."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """There is no connection any more, or none came about. ``denied``: the keys do not fit (S5)."""

    reason: str
    denied: bool = False


class Received(NamedTuple):
    """A message from the broker, its fields checked."""

    message: object


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is ready to work. ``concurrency`` is the effective one (A6), ``ring_bytes`` the ring's payload."""

    models: tuple[ModelInfo, ...]
    concurrency: int
    ring_bytes: int


class Tokenized(NamedTuple):
    """A line is ready for the ring."""

    prepared: Prepared


class Published(NamedTuple):
    """The ring took these."""

    refs: tuple[LineRef, ...]


class Admitted(NamedTuple):
    """The engine runs these."""

    refs: tuple[LineRef, ...]


class Ended(NamedTuple):
    """A line has its result: from the engine, or from the tokenizer that refused it."""

    outcome: Outcome


class Stored(NamedTuple):
    """These results are in the outbox, synced (D1)."""

    refs: tuple[LineRef, ...]


@dataclass(frozen=True, slots=True)
class StoreBlocked:
    """The outbox cannot commit (disk full): what waits for it stays in memory and is tried again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of ring, engine and outbox at one moment."""

    ring: RingReport = field(default_factory=RingReport)
    free_entries: int = 0
    free_bytes: int = 0
    """The largest batch the ring would accept now."""
    steps: int = 0
    layers: int = 0
    tokens: int = 0
    held_up: HeldUp | None = None
    engine: EngineReport = field(default_factory=EngineReport)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The socket was drained just before, so that silence is silence."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Terminate:
    """This process is asked to end: drain first, or ``at_once``."""

    reason: str
    at_once: bool = False


Input: TypeAlias = (
    LinkReady
    | LinkLost
    | Received
    | Loaded
    | Tokenized
    | Published
    | Admitted
    | Ended
    | Stored
    | StoreBlocked
    | Tick
    | Terminate
)
