"""rules: one line of a batch input file (OpenAI JSONL): what is wrong with it, or what it asks for and where.

Home of the input half of the batch format: every problem has a stable code. A line is looked at alone; that a
custom_id is used once is found by whoever sees all lines. Knows no file, no job and no model's limits: a prompt that
is too long is found by the worker, which alone can count its tokens.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from common import limits
from common.prefixes import NO_KEY, prefix_key

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)
"""What may be asked for. Stores keep the position: only ever append."""
BOM = b"\xef\xbb\xbf"
CODES = (
    "invalid_utf8", "invalid_json_line", "line_too_long", "missing_required", "invalid_custom_id", "invalid_method",
    "url_mismatch", "model_mismatch", "stream_unsupported", "missing_messages", "missing_prompt", "missing_input",
    "invalid_max_tokens",
    "too_many_models", "duplicate_custom_id", "empty_file", "sha256_mismatch",
)  # fmt: skip
"""Every code a problem may have; the last four need more than one line to be seen."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A good line. ``start`` and ``end`` are byte offsets of ``body``'s JSON within the line as it was given.

    ``prefix`` is the key of how its text begins, 0 for none.
    """

    custom_id: str
    url: str
    model: str
    start: int
    end: int
    prefix: int = NO_KEY


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that cannot run: ``code`` is one of ``CODES``. ``custom_id`` is empty where it could not be read."""

    code: str
    message: str
    custom_id: str = ""


class _Problem(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def is_blank(raw: bytes) -> bool:
    """Whether a line holds nothing: such lines are no requests (the blank last line among them)."""
    return not raw.strip()


def too_long(size: int) -> Bad:
    """The problem of a line of ``size`` bytes, more than may be read at all."""
    return Bad("line_too_long", f"the line has {size} bytes; {limits.LINE_MAX_BYTES} are the most")


def check(raw: bytes, model: str = "", url: str = "") -> Entry | Bad:
    """Look at one line (bytes, its line end may be there, BOM removed). ``model`` and ``url``, if given, must fit."""
    if len(raw) > limits.LINE_MAX_BYTES:
        return too_long(len(raw))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad("invalid_utf8", f"byte {error.start} of the line is not UTF-8: {error.reason}")
    custom_id = ""
    try:
        fields, span = _fields(text)
        custom_id = _custom_id(fields)
        _method_and_url(fields, url)
        body = fields.get("body")
        if not isinstance(body, dict):
            raise _Problem("missing_required", "body must be there and be an object")
        _body(fields["url"], body, model)
    except _Problem as problem:
        return Bad(problem.code, str(problem), custom_id)
    start, end = span
    if not text.isascii():
        start, end = len(text[:start].encode()), len(text[:end].encode())
    return Entry(custom_id, fields["url"], body["model"], start, end, prefix_key(body))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = " \t\r\n"


def _fields(text: str) -> tuple[dict[str, Any], tuple[int, int]]:
    """The line's top-level fields, and where the value of ``body`` lies in ``text``: the object is walked by hand."""
    try:
        return _walk(text)
    except RecursionError:
        raise _Problem("invalid_json_line", "nested too deeply") from None
    except (ValueError, IndexError) as error:
        words = str(error)
        if "set_int_max_str_digits" in words:  # the interpreter's advice to its programmer
            words = f"a number has more than {sys.get_int_max_str_digits():,} digits"
        raise _Problem("invalid_json_line", f"not JSON: {words}") from None


def _walk(text: str) -> tuple[dict[str, Any], tuple[int, int]]:
    fields: dict[str, Any] = {}
    span = (0, 0)
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise _Problem("invalid_json_line", "a line must be a JSON object")
    at = _skip(text, at + 1)
    closed = text[at : at + 1] == "}"
    while not closed:
        if text[at : at + 1] != '"':
            raise ValueError(f"a name in double quotes is missing at character {at}")
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError(f"':' is missing at character {at}")
        start = _skip(text, at + 1)
        fields[name], at = _DECODER.raw_decode(text, start)
        if name == "body":
            span = (start, at)
        at = _skip(text, at)
        closed = text[at : at + 1] == "}"
        if not closed:
            if text[at : at + 1] != ",":
                raise ValueError(f"',' or '}}' is missing at character {at}")
            at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise ValueError(f"there is more after the object, at character {at + 1}")
    return fields, span


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if custom_id is None or custom_id == "":
        raise _Problem("missing_required", "custom_id is missing: give each line its own")
    if not isinstance(custom_id, str):
        raise _Problem("invalid_custom_id", f"custom_id must be text, not {type(custom_id).__name__}")
    if len(custom_id) > limits.CUSTOM_ID_MAX_CHARS:
        raise _Problem(
            "invalid_custom_id", f"custom_id has {len(custom_id)} characters; {limits.CUSTOM_ID_MAX_CHARS} are the most"
        )
    if any("\ud800" <= char <= "\udfff" for char in custom_id):
        raise _Problem("invalid_custom_id", "custom_id holds half of a surrogate pair, which is no character")
    return custom_id


def _method_and_url(fields: dict[str, Any], url: str) -> None:
    for name in ("method", "url", "body"):
        if fields.get(name) is None:
            raise _Problem("missing_required", f"{name} is missing")
    if fields["method"] != "POST":
        raise _Problem("invalid_method", f"method must be POST, not {_short(fields['method'])}")
    if fields["url"] not in URLS:
        raise _Problem("url_mismatch", f"url must be {' or '.join(URLS)}, not {_short(fields['url'])}")
    if url and fields["url"] != url:
        raise _Problem("url_mismatch", f"url is {fields['url']}; this job is for {_short(url)}")


def _body(url: str, body: dict[str, Any], model: str) -> None:
    named = body.get("model")
    if named is None or named == "":
        raise _Problem("missing_required", "body.model is missing")
    if not isinstance(named, str):
        raise _Problem("model_mismatch", f"body.model must be text, not {type(named).__name__}")
    if len(named) > limits.TEXT_MAX_CHARS or any("\ud800" <= char <= "\udfff" for char in named):
        raise _Problem("model_mismatch", f"body.model is no model's name: {_short(named)}")
    if model and named != model:
        raise _Problem("model_mismatch", f"body.model is {_short(named)}; this job is for {_short(model)}")
    if body.get("stream"):
        raise _Problem("stream_unsupported", "stream is not possible in a batch: leave it out")
    if url == CHAT and (not isinstance(body.get("messages"), list) or not body["messages"]):
        raise _Problem("missing_messages", "body.messages must be a list with at least one message")
    if url == COMPLETIONS and (not isinstance(body.get("prompt"), str | list) or not body["prompt"]):
        raise _Problem("missing_prompt", "body.prompt must be text or a list, and not empty")
    if url in (RESPONSES, EMBEDDINGS) and (not isinstance(body.get("input"), str | list) or not body["input"]):
        raise _Problem("missing_input", "body.input must be text or a list, and not empty")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        most = body.get(name)
        if most is not None and (type(most) is not int or most < 1):
            raise _Problem("invalid_max_tokens", f"body.{name} must be a whole number from 1 on, not {_short(most)}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
