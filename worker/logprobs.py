"""rules: log probabilities as the OpenAI API writes them: a list of tokens for a chat, four lists for a completion.

``pieces`` are the bytes of each token id. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.structures import Choice

LEAST = -9999.0
"""Written for a probability of nothing, which JSON has no number for; as the service does."""


def of_chat(choice: Choice, pieces: Mapping[int, bytes]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat."""
    content = []
    for token, told in zip(choice.token_ids, choice.logprobs, strict=True):
        top = [_entry(pieces[one], value) for one, value in told.top]
        content.append(_entry(pieces[token], told.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def of_completion(choice: Choice, pieces: Mapping[int, bytes]) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion: offsets count characters of the tokens' own texts."""
    names = [_name(pieces[token]) for token in choice.token_ids]
    offsets, at = [], 0
    for token in choice.token_ids:
        offsets.append(at)
        at += len(pieces[token].decode(errors="replace"))
    tops = [
        {_name(pieces[one]): max(value, LEAST) for one, value in (*told.top, (token, told.logprob))}
        for token, told in zip(choice.token_ids, choice.logprobs, strict=True)
    ]
    values = [max(told.logprob, LEAST) for told in choice.logprobs]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}


def ids_of(choice: Choice) -> set[int]:
    """Every token id that is told of."""
    if not choice.logprobs:
        return set()
    return {*choice.token_ids, *(one for told in choice.logprobs for one, _ in told.top)}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(piece)}


def _name(piece: bytes) -> str:
    """A token in a list or as a key: bytes that are no text by themselves are spelt out, so that no two are alike."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in piece)
