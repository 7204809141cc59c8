"""rules: A7: what a request waited for in the engine and which device pages moved for it, in order, in short texts.

The scheduler tells it at step boundaries, the request's result carries it to the broker for ``haulier explain``. The
oldest notes stay, what does not fit is counted. Other requests are nobody's to read about: none is named. Seconds count
from the request's arrival and are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from common.limits import NOTE_MAX_CHARS, NOTES_MAX_COUNT
from worker.engine.admission import Decision

_LAST_LINES = 4
"""What was left out, two sums, and the end."""


@dataclass(slots=True)
class Noted:
    """The same thing in steps ``first`` to ``last``; ``seconds`` is when it began, ``pages`` how many moved in all."""

    seconds: float
    first: int
    last: int
    words: str
    pages: int = 0

    def text(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"
        pages = f", {self.pages} device page{'s' if self.pages > 1 else ''}" if self.pages else ""
        return _cut(f"{self.seconds:.2f} s, {steps}: {self.words}{pages}")


@dataclass(slots=True, eq=False)
class Story:
    """One request's. ``since`` is the first step that could be planned with it."""

    arrived: float = 0.0
    since: int = 0
    _notes: list[Noted] = field(default_factory=list)
    _left_out: int = 0
    _reached: bool = False

    def add(self, step: int, now: float, words: str, pages: int = 0) -> None:
        """What is said again in a row becomes one note of several steps."""
        last = self._notes[-1] if self._notes else None
        if last is not None and last.words == words and not self._left_out:
            last.last, last.pages = step, last.pages + pages
        elif len(self._notes) < NOTES_MAX_COUNT - _LAST_LINES:
            self._notes.append(Noted(now - self.arrived, step, step, words, pages))
        else:
            self._left_out += 1

    def reached_head(self, step: int) -> None:
        """It is the first that waits from ``step`` on: the steps before it waited behind others."""
        if not self._reached and step > self.since:
            self._notes.append(Noted(0.0, self.since, step - 1, "waited behind other requests"))
        self._reached = True

    def told(self, now: float, *sums: str) -> str:
        """All of it, one note a line, at the request's end; ``sums``, two at most, say where its history came from and
        what drafts did for it; empty ones say nothing."""
        lines = [one.text() for one in self._notes]
        if self._left_out:
            lines.append(f"{self._left_out} later notes left out")
        return "\n".join([*lines, *filter(None, sums), f"{now - self.arrived:.2f} s: ended"])


def _cut(text: str) -> str:
    """A note that is too long ends behind a whole word."""
    if len(text) <= NOTE_MAX_CHARS:
        return text
    end = text.rfind(" ", NOTE_MAX_CHARS // 2, NOTE_MAX_CHARS - 3)
    return f"{text[: end if end > 0 else NOTE_MAX_CHARS - 4]} ..."


def fresh(records: Sequence[Decision], told: int) -> list[Decision]:
    """The decisions from number ``told`` on."""
    return list(takewhile(lambda decision: decision.sequence >= told, reversed(records)))[::-1]


def moves(decision: Decision) -> Iterator[tuple[int, str]]:
    """Whom a movement of pages concerns (context numbers), and its words for each."""
    source, to, reason = decision.source, decision.to, decision.reason.value
    if source is None and to is not None:
        yield to, f"took: {reason}"
    elif source is not None and to == source:
        yield source, f"used again: {reason}"
    elif source is not None:
        yield source, f"gave {'to another request' if to is not None else 'back'}: {reason}"
        if to is not None:
            yield to, f"got from another request: {reason}"
