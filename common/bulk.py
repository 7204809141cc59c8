"""values: reading the values that travel once for each line, many at a time: one compiled function a type.

A peer sends thousands of them a second, and a call for each field would cost more than all rules together. What a field
may be stands in ``common.codec`` alone; here its declaration becomes one expression. Anything that does not fit at once
is left to the codec, which reads it slowly and says what is wrong. Knows no socket.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

INT_MAX = 2**63 - 1
Bulk = Callable[[tuple[Any, ...]], tuple[Any, ...] | None]


def reader(cls: type, text_max_chars: Callable[[str], int]) -> Bulk:
    """A function from raw tuples to a tuple of ``cls`` (a NamedTuple of numbers, text, bytes and others like it).

    It gives None when one of them does not fit. ``text_max_chars`` bounds the field of that name. Raises ``TypeError``
    for a class with a field of another kind.
    """
    writer = _Writer(text_max_chars)
    value = writer.value(cls, "raw", 2)
    body = "\n".join(writer.lines)
    source = f"def read(raws):\n  out = []\n  for raw in raws:\n{body}\n    out.append({value})\n  return tuple(out)\n"
    scope: dict[str, Any] = {"new": tuple.__new__, "most": INT_MAX, **writer.classes}
    exec(source, scope)  # text made of our own declarations, when the codec is imported
    read: Bulk = scope["read"]
    return read


class _Writer:
    """The checks of one value, as lines of source."""

    def __init__(self, text_max_chars: Callable[[str], int]) -> None:
        self.lines: list[str] = []
        self.classes: dict[str, type] = {}
        self._most = text_max_chars

    def value(self, cls: Any, name: str, depth: int) -> str:
        """Write the checks of the raw tuple ``name``; returns the expression that builds the value from it."""
        hints = typing.get_type_hints(cls)
        parts = [f"{name}_{number}" for number in range(len(hints))]
        self._unless(f"type({name}) is tuple and len({name}) == {len(parts)}", depth)
        self.lines.append(f"{'  ' * depth}{', '.join(parts)} = {name}")
        built = []
        for (field, hint), part in zip(hints.items(), parts, strict=True):
            check = self._check(hint, field, part)
            if check:
                self._unless(check, depth)
                built.append(part)
            else:
                built.append(self.value(hint, part, depth))
        self.classes[cls.__name__] = cls
        return f"new({cls.__name__}, ({', '.join(built)}))" if built != parts else f"new({cls.__name__}, {name})"

    def _unless(self, check: str, depth: int) -> None:
        self.lines.append(f"{'  ' * depth}if not ({check}): return None")

    def _check(self, hint: Any, field: str, part: str) -> str:
        if hint is int:
            return f"type({part}) is int and 0 <= {part} <= most"
        if hint is str:
            return f"type({part}) is str and len({part}) <= {self._most(field)}"
        if hint is bytes:
            return f"type({part}) is bytes"
        if hasattr(hint, "_fields"):
            return ""
        raise TypeError(f"{field} is a {hint}: not for reading in bulk")
