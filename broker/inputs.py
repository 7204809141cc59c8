"""values: what happens to the broker, in order of flow: the only way into its rules. Knows no socket and no store.

Times travel beside an input as ``Now``; chance and ids come inside it. Whatever must be looked up in the store for an
input is looked up by the shell beforehand and travels along as ``facts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.state import Fact, Line
from common.ids import LineId
from common.messages import Problem

Facts = Mapping[LineId, Fact | None]


@dataclass(frozen=True, slots=True)
class Now:
    """Both clocks, seconds: ``mono`` for timers, ``wall`` for what people read."""

    mono: float
    wall: float


@dataclass(frozen=True, slots=True)
class ClosedJob:
    """What a repeated ``Submit`` or a ``DeleteJob`` must agree with, when its job is in the store only."""

    owner: str
    size: int
    sha256: str
    lines: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Came:
    """A message from a connection. ``user`` names its key (empty without keys), ``admin`` says it may see all."""

    peer: bytes
    user: str
    admin: bool
    message: Any
    facts: Facts = field(default_factory=dict)
    closed: ClosedJob | None = None


@dataclass(frozen=True, slots=True)
class Faulted:
    """A connection broke the protocol (or its key was revoked): only its own session pays."""

    peer: bytes
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unsendable:
    """The socket would block on this connection, or knows it no more."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """The next waiting lines of a job and model, as asked for by ``scheduler.windows_wanted``."""

    job: str
    model: str
    lines: tuple[Line, ...]
    cursor: int
    exhausted: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """A slice of an input file was checked, and its good lines and problems are in the store.

    Counts are of this slice; ``checked_bytes`` is where the next slice begins. ``ended`` says the file is read whole,
    and then ``sha256_fits`` whether it is the file that was announced.
    """

    job: str
    lines: int
    good: int
    problems: int
    bad_stored: int
    models: tuple[str, ...]
    checked_bytes: int
    ended: bool
    sha256_fits: bool
    first_problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class WaitingEnded:
    """``count`` waiting lines of a job got their error line in the store; ``left`` says whether more wait there."""

    job: str
    count: int
    left: bool


@dataclass(frozen=True, slots=True)
class InputFailed:
    """A piece of an input file could not be written: nothing from ``offset`` on is there."""

    job: str
    offset: int
    peer: bytes
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Deaf:
    """For so long this broker did not listen: stopped, starved, or at work on its disk. Then silence proves nothing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The last input of each turn: timers, dispatch and what changed in jobs. ``disk_free`` in bytes."""

    disk_free: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The operator wants this broker to leave."""


Input = Came | Faulted | Unsendable | Loaded | Checked | WaitingEnded | InputFailed | Deaf | Tick | Stop
