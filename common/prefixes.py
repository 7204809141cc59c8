"""rules: the key of how a request begins: equal for requests that ask about one document, so that they can meet (H5).

Nothing is tokenized: a key is a digest of the beginning of the text. How much of it decides what meets. A fixed length
would take all documents behind one long system prompt for the same, so it goes with the text: the greatest power of
two within its first half. A document has one key while the lengths of its questions do not carry the whole text across
a power of two, and two keys if they do and are shorter than it; documents are apart as soon as they differ within the
first quarter of their text. Not ``worker.prefixes``: that compares token ids of requests that met at a worker, exactly.
Knows no job and no worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

NO_KEY = 0
"""Of a request too short to be worth meeting another."""
LEAST_CHARS = 2_048
"""The shortest beginning with a key, of texts twice as long: below that (some 500 tokens) sharing saves little."""


def prefix_key(body: dict[str, Any]) -> int:
    """The key of a request's body as JSON gave it, 1 to 2^63-1, or ``NO_KEY``. What is no text is passed over."""
    pieces = list(_pieces(body))
    half = sum(map(len, pieces)) // 2
    if half < LEAST_CHARS:
        return NO_KEY
    left = 1 << (half.bit_length() - 1)
    digest = blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece[:left].encode("utf-8", "surrogatepass"))
        left -= min(left, len(piece))
        if not left:
            break
    return (int.from_bytes(digest.digest(), "big") >> 1) or 1


def _pieces(body: dict[str, Any]) -> Iterator[str]:
    """The text in order, as it stands before the model; of token ids, their numbers."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        yield " ".join(str(one) for one in prompt if type(one) is int)
    for name in ("instructions", "input"):
        if isinstance(body.get(name), str):
            yield body[name]
    for name in ("messages", "input"):
        messages = body.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield from _texts(message)


def _texts(message: dict[str, Any]) -> Iterator[str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str):
        yield role
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]
