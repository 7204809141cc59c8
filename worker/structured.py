"""rules: the form that an answer must have: a JSON schema, any JSON object, or a regular expression, as a body asks.

Whether a schema or an expression can be kept to is the guide's to say (``worker.guides``). Knows no tokenizer.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from worker.parameters import RequestError, unsupported

STRUCTURED = frozenset({"response_format", "guided_json", "guided_regex", "structured_outputs"})
"""The parameters that are read here: the first as the service has it, the others as vLLM."""
_OBJECT = {"type": "object"}


class Structure(NamedTuple):
    """``text`` is a JSON schema as JSON text, or with ``regex`` an expression that the whole answer matches."""

    param: str
    """Which parameter asked for it."""
    text: str
    regex: bool = False


def read_structure(asked: dict[str, Any], name: str, without: str) -> Structure | None:
    """The one form that is asked for; None for any text. ``name`` is what the body calls its response_format. Raises
    where a setting of the worker's (``without``) does not go with forms: drafted tokens would have to be checked before
    they are taken, and every rank would need the same mask."""
    found = [
        one for one in (_response_format(asked, name), _guided(asked), _structured_outputs(asked)) if one is not None
    ]
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise RequestError("invalid_value", f"{names} both ask for a form: set one", found[1].param)
    if found and without:
        raise unsupported(f"{found[0].param} is not possible on workers with {without}", found[0].param)
    return found[0] if found else None


def _response_format(asked: dict[str, Any], name: str) -> Structure | None:
    wanted = asked.get("response_format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure(name, json.dumps(_OBJECT))
    if kind == "json_schema":
        given = wanted.get("json_schema")
        if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
            raise RequestError("invalid_type", f"{name}.json_schema.schema must be an object", name)
        return Structure(name, _written(given["schema"], name))
    raise unsupported(f"{name}.type must be text, json_object or json_schema", name)


def _guided(asked: dict[str, Any]) -> Structure | None:
    schema, regex = asked.get("guided_json"), asked.get("guided_regex")
    if schema is not None and regex is not None:
        raise RequestError("invalid_value", "guided_json and guided_regex both ask for a form: set one", "guided_regex")
    if schema is not None:
        return _schema(schema, "guided_json")
    return None if regex is None else _regex(regex, "guided_regex")


def _structured_outputs(asked: dict[str, Any]) -> Structure | None:
    wanted, name = asked.get("structured_outputs"), "structured_outputs"
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise RequestError("invalid_type", f"{name} must be an object", name)
    given = {key: value for key, value in wanted.items() if value is not None}
    if "regex" in given and len(given) == 1:
        return _regex(given["regex"], name)
    if "json" in given and len(given) == 1:
        return _schema(given["json"], name)
    raise unsupported(f"{name} must have one of regex and json, and nothing else", name)


def _schema(schema: Any, name: str) -> Structure:
    """As vLLM takes it: the schema, or its text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as bad:
            raise RequestError("invalid_value", f"{name} is not JSON: {bad}", name) from bad
    if not isinstance(schema, dict):
        raise RequestError("invalid_type", f"{name} must be a JSON schema", name)
    return Structure(name, _written(schema, name))


def _regex(regex: Any, name: str) -> Structure:
    if not isinstance(regex, str) or not regex:
        raise RequestError("invalid_type", f"{name} must be a regular expression", name)
    return Structure(name, regex, regex=True)


def _written(schema: dict[str, Any], name: str) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as deep:
        raise RequestError("invalid_value", f"{name}: the schema is nested too deeply", name) from deep
