"""rules: /v1/embeddings: what a body wants embedded, and the list it is answered with. Knows no tokenizer.

An input is text or token ids. Vectors are told as numbers, or with ``encoding_format`` base64 as little-endian float32.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, NamedTuple

from common import limits
from worker.parameters import RequestError, text
from worker.structures import Finished

EMBEDDED = frozenset({"model", "input", "encoding_format", "user"})
OFF: dict[str, tuple[Any, ...]] = {"dimensions": (), "stream": (False,)}
"""Known parameters that are not supported, with the values that leave them off (absent and null always do)."""
_FORMATS = ("float", "base64")


class Inputs(NamedTuple):
    """What is embedded, in order: texts, and token ids."""

    texts: tuple[str | tuple[int, ...], ...]
    form: str
    """``float`` or ``base64``."""


def read_inputs(asked: dict[str, Any], vocabulary: int) -> Inputs:
    """One input or several. Raises ``RequestError`` naming the parameter."""
    form = asked.get("encoding_format") or "float"
    if form not in _FORMATS:
        raise RequestError("invalid_value", f"encoding_format must be {' or '.join(_FORMATS)}", "encoding_format")
    given = asked.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(one) is int for one in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise RequestError("missing_input", "input must be text, token ids, or a list of such", "input")
    if len(given) > limits.EMBEDDING_INPUTS_MAX_COUNT:
        words = f"{len(given)} inputs; {limits.EMBEDDING_INPUTS_MAX_COUNT} are allowed"
        raise RequestError("invalid_value", words, "input")
    return Inputs(tuple(_input(one, f"input[{place}]", vocabulary) for place, one in enumerate(given)), form)


def _input(given: Any, where: str, vocabulary: int) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return text(given, where)
    if not isinstance(given, list) or not all(type(one) is int for one in given):
        raise RequestError("invalid_type", f"{where} must be text or a list of token ids", where)
    if not all(0 <= one < vocabulary for one in given):
        raise RequestError("invalid_value", f"token ids of {where} must be from 0 to {vocabulary - 1}", where)
    return tuple(given)


def check_lengths(lengths: list[int], context_tokens: int, together_tokens: int) -> None:
    """Raise ``RequestError`` unless each input fits into a context, one token left over, and all of them into the
    ring, of ``together_tokens``."""
    for place, count in enumerate(lengths):
        where = f"input[{place}]"
        if count == 0:
            raise RequestError("empty_prompt", f"{where} has no tokens", where)
        if count >= context_tokens:
            words = f"{where} has {count} tokens, {context_tokens - 1} are the most: start workers with a larger"
            raise RequestError("context_length_exceeded", f"{words} --context-tokens", where)
    if sum(lengths) > together_tokens:
        words = f"{len(lengths)} inputs have {sum(lengths)} tokens together, the ring holds {together_tokens}:"
        raise RequestError("context_length_exceeded", f"{words} use several lines, or a larger --ring-mib", "input")


def embedded(finished: Finished) -> dict[str, Any]:
    """The list that is its answer."""
    request, shape = finished.request, finished.request.sampling.shape
    encode = _base64 if shape is not None and shape.pool == "base64" else list
    data = [
        {"object": "embedding", "index": place, "embedding": encode(choice.vector)}
        for place, choice in enumerate(finished.choices)
    ]
    usage = {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


def _base64(vector: Any) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
