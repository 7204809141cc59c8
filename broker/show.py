"""shell: how long work is shown: bars on a terminal, plain lines elsewhere; always on stderr. Knows no job.

Standard output is left to results, so that it can be piped. A phase that takes less than a second is not worth a line,
except where each phase is news in itself (``announce``).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from broker.client_rules import done_of, duration, rate
from common.clock import Clock, SystemClock
from common.printable import printable

FIRST_S = 1.0
EVERY_S = 5.0
"""Plain lines of one phase: the first after a second, then one in five while something moves."""
STILL_S = 30.0
"""Plain lines while nothing moves: often enough to see that somebody is alive."""


class Show(Protocol):
    """What a command tells while it works. Close it by leaving its ``with`` block."""

    def phase(self, name: str, total: float = 0, unit: str = "lines") -> None:
        """From now on it is this that takes time; ``total`` 0 for not known."""

    def update(self, done: float, total: float = 0, note: str = "") -> None:
        """So much of the phase is done."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def __enter__(self) -> Show: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def show(announce: bool = False, stream: TextIO | None = None, bars: bool = True) -> Show:
    """Bars when ``stream`` (default: stderr) is a terminal, plain lines otherwise, or when ``bars`` is false."""
    target = stream if stream is not None else sys.stderr
    return Bars(target) if bars and target.isatty() else PlainLines(target, announce)


class _Rate(ProgressColumn):
    """Units a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(rate(speed, task.fields["unit"]) if speed else "", style="progress.data.speed")


class _Left(ProgressColumn):
    """Time left, in words."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        text = f"{duration(left)} left" if left is not None and not task.finished else duration(task.elapsed or 0)
        return Text(text, style="progress.remaining")


class _Count(ProgressColumn):
    """How much of how much."""

    def render(self, task: Task) -> Text:
        known = task.completed or task.total
        return Text(done_of(task.completed, task.total or 0, task.fields["unit"]) if known else "")


class Bars:
    """Bars that go away when the work is done; what was said stays."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Count(), _Rate(), _Left(),
            TextColumn("{task.fields[note]}"), console=self._console, transient=True, speed_estimate_period=30,
            # rich would send our standard output to stderr, and $(haulier submit FILE) would hold nothing
            redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, total: float = 0, unit: str = "lines") -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total or None, unit=unit, note="")

    def update(self, done: float, total: float = 0, note: str = "") -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total or None, note=printable(note))

    def say(self, text: str) -> None:
        self._console.print(f"haulier: {printable(text)}", markup=False, highlight=False, soft_wrap=True)


class PlainLines:
    """One line now and then, with rate and time left."""

    def __init__(self, stream: TextIO, announce: bool, clock: Clock | None = None) -> None:
        self._stream = stream
        self._announce = announce
        self._clock = clock if clock is not None else SystemClock()
        self._name, self._unit, self._total = "", "lines", 0.0
        self._began = self._next = self._first_at = self._first = 0.0
        self._told = -1.0
        self._fresh = True

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def phase(self, name: str, total: float = 0, unit: str = "lines") -> None:
        if name == self._name:
            return
        self._name, self._unit, self._total = name, unit, total
        self._began = self._clock.monotonic()
        self._next = self._began + FIRST_S
        self._told = -1.0
        self._fresh = True
        if self._announce:
            self.say(name)

    def update(self, done: float, total: float = 0, note: str = "") -> None:
        now = self._clock.monotonic()
        self._total = total or self._total
        if self._fresh:
            self._fresh, self._first, self._first_at = False, done, now
        if now < (self._next if done != self._told else self._next + STILL_S - EVERY_S):
            return
        self._next, self._told = now + EVERY_S, done
        speed = (done - self._first) / max(now - self._first_at, 1e-9)
        parts = [done_of(done, self._total, self._unit)]
        if speed > 0:
            parts.append(rate(speed, self._unit))
            if self._total:
                parts.append(f"{duration((self._total - done) / speed)} left")
        self.say(f"{self._name}: {', '.join([*parts, *([note] if note else [])])}")

    def say(self, text: str) -> None:
        print(f"haulier: {printable(text)}", file=self._stream, flush=True)
