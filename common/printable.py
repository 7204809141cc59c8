"""rules: text that others chose (names, reasons), as a terminal may be given it. Knows no terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` on one line, what a terminal would obey or hide (controls, line ends, turned writing) as an escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
