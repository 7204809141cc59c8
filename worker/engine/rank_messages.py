"""values: what the ranks of one engine tell each other over host sockets, in plain msgpack; devices have NCCL or gloo.

Down, from rank 0: ``Begin`` before each step, ``News`` before each plan: all that a plan depends on. Up: ``Landed`` for
each step and ``Read`` whenever a rank's device has read more of the ring. Knows no socket.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgpack

from common.errors import InvariantError
from common.messages import LineRef
from ring.descriptor import Entry, RingRequest
from worker.structures import Request, Sampling, Shape, SharedPrefix


class Begin(NamedTuple):
    """One more step is to be made, or the engine ends here."""

    stop: bool


class Carried(NamedTuple):
    """An entry of rank 0's ring, and the int32 token ids of its requests, in order."""

    entry: Entry
    ids: array[int]


class News(NamedTuple):
    """What rank 0's engine took from its ring before this plan."""

    entries: tuple[Carried, ...]


class Landed(NamedTuple):
    """A step is over on this rank; ``digest`` of its numbers (``engine.Agree``)."""

    step: int
    digest: int


class Read(NamedTuple):
    """This rank's device has read all entries up to ``through`` for good."""

    through: int


Message = Begin | News | Landed | Read


def digest(numbers: Sequence[int]) -> int:
    """Of a step's numbers: equal on every rank."""
    return zlib.crc32(array("q", numbers).tobytes())


def carried(entry: Entry) -> Carried:
    """An entry as it goes to other ranks: a cancel names lines alone, and only what will be run has token ids. Raises
    ``InvariantError`` for a request whose ids were not kept on the host, or that a guide holds."""
    if entry.is_cancel:
        named = tuple(one._replace(item=_ref(one.item)) for one in entry.requests)
        return Carried(entry._replace(requests=named), array("i"))
    ids, requests = array("i"), []
    for one in entry.requests:
        if not isinstance(one.item, Request):
            raise InvariantError(f"entry {entry.sequence} carries {type(one.item).__name__}, not a Request")
        if one.item.guide is not None or one.item.text is None:
            raise InvariantError(f"{one.item.ref} came with a guide, or without its ids: other ranks cannot run it")
        if not entry.is_skip:
            ids.extend(one.item.text)
        requests.append(one._replace(item=one.item._replace(text=None)))
    return Carried(entry._replace(requests=tuple(requests)), ids)


def pack(message: Message) -> bytes:
    """The message's bytes."""
    fields: Any = message
    if isinstance(message, News):
        fields = ([(*entry, ids.tobytes()) for entry, ids in message.entries],)
    return cast(bytes, msgpack.packb((type(message).__name__, *fields)))


def unpack(data: bytes) -> Message:
    """The message in ``data``. Raises ``InvariantError`` for anything else: both ends are one version of this file."""
    name, *fields = msgpack.unpackb(data, use_list=False)
    if name == "News":
        return News(tuple(_entry(*one) for one in fields[0]))
    for kind in (Begin, Landed, Read):
        if name == kind.__name__:
            return kind(*fields)
    raise InvariantError(f"a rank was told {name!r}, which is nothing that ranks say")


def _entry(*fields: Any) -> Carried:
    *head, ids = fields
    entry = Entry(*head)
    requests = tuple(RingRequest(_item(*one[:1]), *one[1:]) for one in entry.requests)
    numbers = array("i")
    numbers.frombytes(ids)
    return Carried(entry._replace(requests=requests), numbers)


def _item(fields: Any) -> Request | LineRef:
    if len(fields) == len(LineRef._fields):
        return LineRef(*fields)
    request = Request(*fields)
    shared, sampling = request.shared, Sampling(*request.sampling)
    if sampling.shape is not None:
        sampling = sampling._replace(shape=Shape(*sampling.shape))
    return request._replace(
        ref=LineRef(*request.ref), sampling=sampling, shared=None if shared is None else SharedPrefix(*shared)
    )


def _ref(item: object) -> LineRef:
    ref = getattr(item, "ref", item)
    if not isinstance(ref, LineRef):
        raise InvariantError(f"a cancel names {item!r}, which is no line")
    return ref
