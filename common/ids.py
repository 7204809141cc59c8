"""values: names of things that cross a boundary. Chance is an argument, so that a simulator can replay it."""

from __future__ import annotations

import uuid
from random import Random, SystemRandom
from typing import NamedTuple


class LineId(NamedTuple):
    """One line of one job. ``job`` is the canonical text of a UUID, ``index`` counts the job's good lines from 0."""

    job: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody here needs

    def __str__(self) -> str:
        return f"{self.job}#{self.index}"


def new_id(chance: Random | None = None) -> str:
    """A random UUID (version 4) in canonical text; ``chance`` replaces the operating system's randomness."""
    source = chance if chance is not None else SystemRandom()
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def is_id(text: str) -> bool:
    """Whether ``text`` is a UUID in canonical text, as ``new_id`` writes it."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
