"""rules: what ``haulier run`` decides: the job's id, its children's command lines, who is started again, what to say.

Knows no process and no socket. A job's id comes from what decides its answers, so that a second run with the same
state folder finds the first one's work (promise 2) and another input never does.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.client_rules import ENDED, tokens
from common import messages
from common.config import EngineSettings
from common.errors import HaulierError

_NAMESPACE = uuid.UUID("2f6c6a3e-6d0f-5b8e-9a64-8d3c1f0e7b52")
RESTARTS_MAX_COUNT = 3
"""Starts again of one child without a line finished in between: beyond it, it is not the line's fault."""
HANDED_DOWN = (
    "HAULIER_LOG",
    "HAULIER_LOG_LEVEL",
    "HAULIER_CACHE",
    "HAULIER_UNSAFE_FILESYSTEM",
    "HAULIER_WITNESS",
    "HAULIER_ECHO_DELAY_MS",
)
"""The only settings of ours that children take from the environment: the rest comes as flags, or belongs to a fleet
of the user's own, which the private one of a run must not see."""

_LOGGED_REASON = re.compile(r"""\[error\b.*\breason=(?P<quote>['"])(?P<reason>.*?)(?P=quote)(?: \w+=|$)""")
"""The ``reason`` of an error in a log for people."""


def job_id(sha256: str, model: str, lenient: bool) -> str:
    """The job of this input for this model within one state folder: the same for the same, always."""
    return str(uuid.uuid5(_NAMESPACE, f"{sha256}\n{model}\n{'lenient' if lenient else 'strict'}"))


def broker_arguments(bind: str, state: str, keys: str) -> list[str]:
    return ["--bind", bind, "--state", state, "--keys", keys]


def worker_arguments(broker: str, state: str, keys: str, engine: EngineSettings, echo: bool) -> list[str]:
    """What a worker is started with; settings that nobody changed are left to its own defaults."""
    arguments = ["--broker", broker, "--state", state, "--keys", keys, "--model", engine.model]
    for field in dataclasses.fields(EngineSettings):
        value = getattr(engine, field.name)
        if field.name != "model" and value != field.default:
            arguments += [f"--{field.name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return [*arguments, "--echo"] if echo else arguments


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """What a child sees of this process's environment: readable logs, and nothing of another fleet."""
    kept = {name: value for name, value in own.items() if not name.startswith("HAULIER_") or name in HANDED_DOWN}
    return {"HAULIER_LOG": "console", "PYTHONUNBUFFERED": "1", **kept}


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that ended though nobody told it to. ``code`` is negative for a signal, as ``subprocess`` has it."""

    name: str
    code: int
    restarts: int
    """Times it was started again since a line was last finished."""
    ready: bool
    """Whether this process of it ever did its work: logged in, model loaded."""
    tail: tuple[str, ...]
    """The last lines of its log."""
    log: str


def goes_on(ended: Ended) -> bool:
    """Whether the child is started again. Its own refusal stands; a kill or a crash at work costs a new start."""
    if ended.restarts >= RESTARTS_MAX_COUNT:
        return False
    return ended.code < 0 or (ended.ready and ended.code not in (2, 3, 4))


def end_words(ended: Ended) -> str:
    """Why the run stops, in one line: the child's own words where it left some."""
    how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with exit code {ended.code}"
    often = f" for the {ordinal(ended.restarts + 1)} time without a line finished" if ended.restarts else ""
    reason = spoken(ended.tail)
    return f"the {ended.name} {how}{often}: {reason or 'it left no reason'} (log: {ended.log})"


def spoken(tail: Sequence[str]) -> str:
    """The child's last line to people without its prefix, else its last logged error's reason, else nothing."""
    said = [line.removeprefix("haulier: ") for line in tail if line.startswith("haulier: ")]
    logged = [match["reason"] for line in tail if (match := _LOGGED_REASON.search(line))]
    return (said or logged or [""])[-1].strip()


def end_code(ended: Ended) -> int:
    """The exit code of a run that this child ended: the child's own where it is one of ours."""
    return ended.code if ended.code in (2, 3, 4, 5, 6) else HaulierError.exit_code


def ordinal(count: int) -> str:
    suffix = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"


def phase(info: messages.JobInfo, loaded: bool) -> str:
    """What the run is at, in the words of its bar."""
    if info.status == "validating":
        return "validating"
    if info.status not in ENDED and not loaded:
        return "loading model"
    return "running" if info.status not in ENDED else "writing"


def summary(info: messages.JobInfo, seconds: float, before: int, output: str, error: str | None) -> str:
    """The last line of a run that ended. ``before`` lines were finished by earlier runs."""
    ran = info.completed + info.failed - before
    where = output if error is None or not info.failed else f"{output}, {error}"
    if ran <= 0:
        return f"nothing to run: {info.completed} lines completed and {info.failed} failed in an earlier run -> {where}"
    earlier = f", {before} of them in an earlier run" if before else ""
    return (
        f"{info.completed} lines completed, {info.failed} failed{earlier}; {tokens(info)} in {seconds:.1f} s -> {where}"
    )
