"""rules: single parameters of a body: read with their type and bounds, or refused by name.

Refusals carry the service's status, code and message. Knows no request as a whole and no model but its vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

from common import limits
from worker.structures import Shape

INT64_MAX = 2**63 - 1
REPETITION_LEAST, REPETITION_MOST = 0.01, 10.0
"""Beyond them a repetition penalty leaves nothing of a distribution."""


class RequestError(Exception):
    """A request that cannot be met: what its output line says."""

    def __init__(self, code: str, message: str, param: str | None = None, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.code = code
        self.message = message
        self.param = param


def unsupported(message: str, param: str) -> RequestError:
    """Something we know and do not do."""
    return RequestError("unsupported_parameter", message, param)


def same(value: Any, off: Any) -> bool:
    """Equal, and not a boolean that equals a number."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)


def number(asked: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    """A finite number from ``least`` to ``most``; absent and null are ``default``."""
    value = asked.get(name)
    return default if value is None else _bounded(value, name, least, most)


def _bounded(value: Any, name: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError("invalid_type", f"{name} must be a number", name)
    if not least <= value <= most:
        raise RequestError("invalid_value", f"{name} is {value}, it must be from {least:g} to {most:g}", name)
    return float(value)


def integer(asked: dict[str, Any], name: str, default: int | None, least: int, most: int) -> int | None:
    """A whole number from ``least`` to ``most``; absent and null are ``default``."""
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("invalid_type", f"{name} must be a whole number", name)
    if not least <= value <= most:
        raise RequestError("invalid_value", f"{name} is {value}, it must be from {least} to {most}", name)
    return value


def boolean(asked: dict[str, Any], name: str) -> bool:
    """True or false; absent and null are false."""
    value = asked.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError("invalid_type", f"{name} must be true or false", name)
    return value


def text(value: str, where: str) -> str:
    """The text, unless it holds half a surrogate pair, which no encoding of text has."""
    try:
        value.encode()
    except UnicodeEncodeError as bad:
        raise RequestError("invalid_unicode", f"{where} holds a lone surrogate at {bad.start}", where) from bad
    return value


def stop(asked: dict[str, Any]) -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    value = asked.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise RequestError("invalid_type", "stop must be a string or a list of strings", "stop")
    if len(stops) > limits.STOP_STRINGS_MAX_COUNT:
        raise RequestError("invalid_value", f"{len(stops)} stops; {limits.STOP_STRINGS_MAX_COUNT} are allowed", "stop")
    if "" in stops:
        raise RequestError("invalid_value", "a stop string is empty", "stop")
    return tuple(text(one, "stop") for one in stops)


def stop_ids(asked: dict[str, Any], vocabulary: int) -> tuple[int, ...]:
    """Token ids that end the answer beside the model's own."""
    ids = asked.get("stop_token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise RequestError("invalid_type", "stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(ids) > limits.STOP_IDS_MAX_COUNT:
        words = f"{len(ids)} stop_token_ids; {limits.STOP_IDS_MAX_COUNT} are allowed"
        raise RequestError("invalid_value", words, "stop_token_ids")
    return tuple(_token(one, "stop_token_ids", vocabulary) for one in ids)


def choices(asked: dict[str, Any]) -> int:
    """``n``."""
    return integer(asked, "n", 1, 1, limits.CHOICES_MAX_COUNT) or 1


def shape(asked: dict[str, Any], vocabulary: int, *, chat: bool, drafting: bool) -> Shape | None:
    """Penalties, bias and log probabilities; None where all of them are off. Raises where drafted tokens
    (``drafting``) would have to be counted before they are taken."""
    found = Shape(
        repetition=number(asked, "repetition_penalty", 1.0, REPETITION_LEAST, REPETITION_MOST),
        presence=number(asked, "presence_penalty", 0.0, -2.0, 2.0),
        frequency=number(asked, "frequency_penalty", 0.0, -2.0, 2.0),
        bias=_bias(asked, vocabulary),
        logprobs=_chat_logprobs(asked) if chat else _completion_logprobs(asked),
    )
    if drafting and found.penalises:
        name = next(name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty") if asked.get(name))
        raise unsupported(f"{name} is not possible on workers with --draft-tokens", name)
    return None if found == Shape() else found


def _bias(asked: dict[str, Any], vocabulary: int) -> tuple[tuple[int, float], ...]:
    bias = asked.get("logit_bias")
    if bias is None:
        return ()
    if not isinstance(bias, dict):
        raise RequestError("invalid_type", "logit_bias must be an object of token ids and numbers", "logit_bias")
    if len(bias) > limits.LOGIT_BIAS_MAX_COUNT:
        words = f"logit_bias names {len(bias)} tokens; {limits.LOGIT_BIAS_MAX_COUNT} are allowed"
        raise RequestError("invalid_value", words, "logit_bias")
    found: dict[int, float] = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= len(str(INT64_MAX))):
            raise RequestError("invalid_value", f"logit_bias names {name[:80]!r}, which is no token id", "logit_bias")
        token = _token(int(name), "logit_bias", vocabulary)
        if token in found:
            raise RequestError("invalid_value", f"logit_bias names token {token} twice", "logit_bias")
        found[token] = _bounded(value, "logit_bias", -100.0, 100.0)
    return tuple(found.items())


def _chat_logprobs(asked: dict[str, Any]) -> int:
    """Likeliest tokens to be told beside each; -1 tells nothing."""
    wanted = boolean(asked, "logprobs")
    top = integer(asked, "top_logprobs", 0, 0, limits.TOP_LOGPROBS_MAX_COUNT) or 0
    if top and not wanted:
        raise RequestError("invalid_value", "top_logprobs needs logprobs true", "top_logprobs")
    return top if wanted else -1


def _completion_logprobs(asked: dict[str, Any]) -> int:
    if asked.get("logprobs") is False:
        return -1
    top = integer(asked, "logprobs", -1, 0, limits.COMPLETION_LOGPROBS_MAX_COUNT)
    return -1 if top is None else top


def _token(token: int, name: str, vocabulary: int) -> int:
    if not 0 <= token < vocabulary:
        raise RequestError("invalid_value", f"token ids of {name} must be from 0 to {vocabulary - 1}", name)
    return token
