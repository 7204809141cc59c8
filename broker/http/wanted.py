"""rules: what a client asks for over HTTP, checked field by field. Raises ``ApiFault`` naming the field to change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from broker.http.faults import bad
from broker.http.records import FILE, is_id
from common import config, limits
from common.errors import UsageError
from common.openai_lines import URLS

FILES_LIMITS = (10_000, 10_000)
"""Default and most entries of one page."""
BATCHES_LIMITS = (20, 100)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch as it is asked for."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None


def batch(body: bytes) -> Wanted:
    """What ``POST /v1/batches`` asks for."""
    fields = _object(body)
    known = {"input_file_id", "endpoint", "completion_window", "metadata"}
    for name, value in fields.items():
        if name not in known and value is not None:
            raise bad(name[:80], f"{name[:80]!r} is not supported here: leave it out", "unsupported_parameter")
    file, endpoint, window = (_text(fields, name) for name in ("input_file_id", "endpoint", "completion_window"))
    if not is_id(FILE, file):
        raise bad("input_file_id", f"{file[:80]!r} is no file's id: upload the file first, with purpose 'batch'")
    if endpoint not in URLS:
        raise bad("endpoint", f"endpoint must be {' or '.join(URLS)}, not {endpoint[:80]!r}")
    try:
        window_s = config.seconds(window, "completion_window")
    except UsageError as error:
        raise bad("completion_window", str(error)) from error
    if not 0 < window_s <= limits.HTTP_WINDOW_MAX_S:
        raise bad("completion_window", f"completion_window {window[:20]!r} must be above 0 and at most 30d")
    return Wanted(file, endpoint, window, window_s, _metadata(fields.get("metadata")))


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad("body", f"the body is not JSON: {error}", "invalid_json") from error
    if not isinstance(fields, dict):
        raise bad("body", "the body must be a JSON object", "invalid_json")
    return fields


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise bad(name, f"{name} is missing", "missing_required_parameter")
    if not isinstance(value, str):
        raise bad(name, f"{name} must be text, not {type(value).__name__}", "invalid_type")
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise bad("metadata", "metadata must be an object whose values are text", "invalid_type")
    if len(value) > limits.HTTP_METADATA_MAX_COUNT:
        raise bad("metadata", f"metadata has {len(value)} entries; {limits.HTTP_METADATA_MAX_COUNT} are the most")
    for name, text in value.items():
        if len(name) > limits.HTTP_METADATA_NAME_MAX_CHARS or len(text) > limits.TEXT_MAX_CHARS:
            most = f"{limits.HTTP_METADATA_NAME_MAX_CHARS} characters a name, {limits.TEXT_MAX_CHARS} a value"
            raise bad("metadata", f"metadata {name[:80]!r} is too long: {most} are the most")
        if any("\ud800" <= char <= "\udfff" for char in name + text):
            raise bad("metadata", "metadata holds half of a surrogate pair, which is no character")
    return value


@dataclass(frozen=True, slots=True)
class PageWanted:
    """A page of a list as it is asked for."""

    after: str
    limit: int
    newest_first: bool
    purpose: str


def listed(query: Mapping[str, str], kind: str, limit: tuple[int, int]) -> PageWanted:
    """What a list's query asks for; ``kind`` begins its ids, ``limit`` is the default and the most of a page."""
    after = query.get("after", "")
    if after and not is_id(kind, after):
        raise bad("after", f"after must be an id such as {kind}..., not {after[:80]!r}")
    default, most = limit
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad("limit", f"limit must be a whole number from 1 to {most}, not {text[:20]!r}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad("order", f"order must be asc or desc, not {order[:20]!r}")
    return PageWanted(after, int(text), order == "desc", query.get("purpose", ""))
