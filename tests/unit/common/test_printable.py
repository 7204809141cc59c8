"""Text of others on a terminal: nothing in it is obeyed, and what people write stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.printable import printable


@pytest.mark.parametrize("text", ["", "a job", "Vertrag Nº 7, Grün", "合同", 'quotes " and \\'])
def test_what_people_write_stays(text: str) -> None:
    """Any language."""
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"), ("two\nlines\t", "two\\nlines\\t"), ("\u202eevil", "\\u202eevil"),
        ("\x9b", "\\x9b"),
    ],
)  # fmt: skip
def test_what_a_terminal_obeys_is_shown(text: str, shown: str) -> None:
    """Clearing the screen, a line of its own, writing turned round, the eight-bit escape."""
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_one_harmless_line(text: str) -> None:
    """Half surrogates too."""
    assert printable(text).isprintable()
