"""rules: the bytes of single tokens: what a tokenizer's vocabulary writes for them, undone.

A token alone may be no whole character, and decoders drop a leading space: so not through the decoder. Byte-level
vocabularies spell each byte as a character of its own; the others write spaces as U+2581 and single bytes as <0xNN>.
"""

from __future__ import annotations

import re

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def piece_bytes(piece: str, *, byte_level: bool, added: bool) -> bytes:
    """The bytes of a token whose vocabulary entry is ``piece``; ``added`` ones (special tokens) are plain text."""
    if added:
        return piece.encode()
    if byte_level and all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    single = _BYTE.fullmatch(piece)
    if single is not None:
        return bytes([int(single[1], 16)])
    return piece.replace(SPACE, " ").encode()
