"""values: messages to bytes and back, every field checked (bad peers cost only their own session).

A message is a msgpack array: its type's name, then its fields in order; nested values are arrays likewise. Types are
checked as declared in ``common.messages``, counts and lengths against ``common.limits``. Lists of what travels once for
each line are read in bulk (``common.bulk``), and slowly only to say what is wrong. Knows no socket.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, Union, cast

import msgpack

from common import bulk, limits, messages
from common.errors import PeerFault

T = TypeVar("T")
Decode = Callable[[Any, str], Any]
INT_MAX = bulk.INT_MAX
TEXT_MAX_CHARS = {
    "reason": limits.REASON_MAX_CHARS,
    "message": limits.REASON_MAX_CHARS,
    "findings": limits.REASON_MAX_CHARS,
    "notes": limits.NOTES_MAX_CHARS,
}
"""Fields of text with a bound of their own; all others have ``limits.TEXT_MAX_CHARS``."""


def encode(message: object) -> bytes:
    """The message's bytes. Raises ``PeerFault`` when it would not fit into one frame, which the peer would refuse."""
    data = cast(bytes, msgpack.packb([type(message).__name__, *_fields(message)], use_bin_type=True))
    if len(data) > limits.MESSAGE_MAX_BYTES:
        raise PeerFault("too_large", f"{type(message).__name__} of {len(data)} bytes; {limits.MESSAGE_MAX_BYTES} fit")
    return data


def decode(data: bytes | memoryview) -> Any:
    """The message in ``data``, one of ``common.messages``. Raises ``PeerFault`` for anything else."""
    if len(data) > limits.MESSAGE_MAX_BYTES:
        raise PeerFault("too_large", f"a frame of {len(data)} bytes; {limits.MESSAGE_MAX_BYTES} are allowed")
    try:
        raw = msgpack.unpackb(data, use_list=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as bad:
        raise PeerFault("not_msgpack", f"a frame of {len(data)} bytes is no message: {bad}") from bad
    if not isinstance(raw, tuple) or not raw or not isinstance(raw[0], str):
        raise PeerFault("not_a_message", "a frame that does not start with the name of a message")
    reader = _READERS.get(raw[0])
    if reader is None:
        raise PeerFault("unknown_message", f"no message is named {raw[0][:40]!r}")
    return reader(raw[1:], raw[0])


def _fields(value: object) -> list[Any]:
    out: list[Any] = []
    for name in _NAMES[type(value)]:
        item = getattr(value, name)
        kind = type(item)
        if kind in _CLASSES:
            out.append(_fields(item))
        elif kind is tuple and item and type(item[0]) in _CLASSES:
            out.append([_fields(one) for one in item])
        else:  # named tuples too: to msgpack they are arrays
            out.append(item)
    return out


def _reader(cls: type[T]) -> Decode:
    hints = typing.get_type_hints(cls)
    readers = [_read(hint, name) for name, hint in hints.items()]
    required = len(readers) - _defaults(cls)

    def read(raw: Any, where: str) -> T:
        if not isinstance(raw, tuple) or not required <= len(raw) <= len(readers):
            raise PeerFault("bad_shape", f"{where} needs {required} to {len(readers)} fields")
        return cls(*[reader(item, where) for reader, item in zip(readers, raw, strict=False)])

    return read


def _defaults(cls: Any) -> int:
    if dataclasses.is_dataclass(cls):
        return sum(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls))
    return len(cls._field_defaults)


def _read(hint: Any, name: str) -> Decode:
    if hint in (int, float, bool, str, bytes):
        return _SCALARS[hint](name)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return _many(_read(inner, name), name, bulk.reader(inner, _text_max) if hasattr(inner, "_fields") else None)
    if typing.get_origin(hint) in (Union, types.UnionType):
        inner = _read(next(arg for arg in typing.get_args(hint) if arg is not type(None)), name)
        return lambda raw, where: None if raw is None else inner(raw, where)
    return _reader(hint)


def _many(one: Decode, name: str, fast: bulk.Bulk | None) -> Decode:
    def read(raw: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(raw, tuple) or len(raw) > limits.PAGE_MAX_COUNT:
            raise PeerFault("bad_list", f"{where}.{name} must be a list of at most {limits.PAGE_MAX_COUNT}")
        read = None if fast is None else fast(raw)
        return tuple([one(item, where) for item in raw]) if read is None else read

    return read


def _integer(name: str) -> Decode:
    def read(raw: Any, where: str) -> int:
        if type(raw) is not int or not 0 <= raw <= INT_MAX:
            raise PeerFault("bad_integer", f"{where}.{name} must be a whole number from 0 to 2^63-1")
        return raw

    return read


def _signed(name: str) -> Decode:
    def read(raw: Any, where: str) -> int:
        if type(raw) is not int or not -1_000_000 <= raw <= 1_000_000:
            raise PeerFault("bad_integer", f"{where}.{name} must be a whole number within a million of 0")
        return raw

    return read


def _number(name: str) -> Decode:
    def read(raw: Any, where: str) -> float:
        if type(raw) not in (int, float) or not 0 <= raw < 1e15:  # refuses NaN too
            raise PeerFault("bad_number", f"{where}.{name} must be a number from 0 to 1e15")
        return float(raw)

    return read


def _boolean(name: str) -> Decode:
    def read(raw: Any, where: str) -> bool:
        if type(raw) is not bool:
            raise PeerFault("bad_boolean", f"{where}.{name} must be true or false")
        return raw

    return read


def _text_max(name: str) -> int:
    return TEXT_MAX_CHARS.get(name, limits.TEXT_MAX_CHARS)


def _text(name: str) -> Decode:
    most = _text_max(name)

    def read(raw: Any, where: str) -> str:
        if type(raw) is not str or len(raw) > most:
            raise PeerFault("bad_text", f"{where}.{name} must be text of at most {most} characters")
        return raw

    return read


def _blob(name: str) -> Decode:
    def read(raw: Any, where: str) -> bytes:
        if type(raw) is not bytes:
            raise PeerFault("bad_bytes", f"{where}.{name} must be bytes")
        return raw

    return read


_SCALARS: dict[Any, Callable[[str], Decode]] = {
    int: lambda name: _signed(name) if name == "priority" else _integer(name),
    float: _number,
    bool: _boolean,
    str: _text,
    bytes: _blob,
}
_VALUES = (
    messages.Fence, messages.LineRef, messages.ModelInfo, messages.RingReport, messages.EngineReport, messages.HeldLine,
    messages.Verdict, messages.BatchLine, messages.Result, messages.Problem, messages.WorkerInfo,
)  # fmt: skip
_NAMES: dict[type, tuple[str, ...]] = {
    cls: tuple(typing.get_type_hints(cls)) for cls in (*messages.FLEET, *messages.CLIENT, *_VALUES)
}
_CLASSES = frozenset(cls for cls in _NAMES if dataclasses.is_dataclass(cls))
"""Those that msgpack cannot write by itself."""
_READERS: dict[str, Decode] = {cls.__name__: _reader(cls) for cls in (*messages.FLEET, *messages.CLIENT)}
