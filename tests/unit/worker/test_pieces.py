"""Single tokens to bytes, in both spellings of vocabularies."""

from __future__ import annotations

import pytest

from worker.pieces import piece_bytes


@pytest.mark.parametrize(
    ("piece", "byte_level", "added", "expected"),
    [
        ("\u0120the", True, False, b" the"),
        ("\u00c3", True, False, b"\xc3"),
        ("\u010a", True, False, b"\n"),
        ("<|im_end|>", True, True, b"<|im_end|>"),
        ("\u2581the", False, False, b" the"),
        ("<0xE9>", False, False, b"\xe9"),
        ("<0xE9>", True, False, b"<0xE9>"),
        ("\u00e9", False, False, "\u00e9".encode()),
        ("", False, False, b""),
    ],
)
def test_a_piece_is_its_bytes(piece: str, byte_level: bool, added: bool, expected: bytes) -> None:
    """What a decoder would lose: leading spaces, and bytes that are no character alone."""
    assert piece_bytes(piece, byte_level=byte_level, added=added) == expected
