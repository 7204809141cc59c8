"""values: a ring descriptor of 64 bytes, its padding field among them (R3), and the words its entry is known by.

Knows the layout in memory; does not know where the table lies, who holds an entry, or how many are free.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from common.errors import InvariantError
from common.limits import DESCRIPTOR_BYTES

FLAG_CANCEL = 1
"""The entry carries no payload: its requests are to be stopped."""
FLAG_SKIP = 2
"""Every request of the entry was cancelled before the engine took it: nothing in it needs to run."""

BATCH_KEY_BYTES = 16
_KNOWN_FLAGS = FLAG_CANCEL | FLAG_SKIP

LAYOUT = struct.Struct("<QQQQII16sII")
"""sequence, position, length, padding, request count, token count, batch key, flags, reserved (zero)."""

DESCRIPTOR_DTYPE = np.dtype(
    [
        ("sequence", "<u8"),
        ("position", "<u8"),
        ("length", "<u8"),
        ("padding", "<u8"),
        ("request_count", "<u4"),
        ("token_count", "<u4"),
        ("batch_id", "V16"),
        ("flags", "<u4"),
        ("reserved", "<u4"),
    ]
)
"""The same layout for numpy views over the descriptor table: ``(entries,)`` of this dtype."""

if LAYOUT.size != DESCRIPTOR_BYTES or DESCRIPTOR_DTYPE.itemsize != DESCRIPTOR_BYTES:
    raise InvariantError(f"a descriptor is {LAYOUT.size} bytes, its table assumes {DESCRIPTOR_BYTES}")


class Descriptor(NamedTuple):
    """One entry of the table. Frozen; a named tuple, because a frozen dataclass of eight fields takes three times
    as long to make.

    ``position`` and ``length`` are bytes of the payload arena; a position is 64-bit and only grows, its offset is
    ``position % capacity``. ``padding`` is what was left unused before ``position`` so that the payload is in one
    piece; giving the entry back gives back ``length + padding`` (R3).
    """

    sequence: int
    position: int
    length: int
    padding: int
    request_count: int
    token_count: int
    batch_id: bytes
    """``batch_key`` of the batch's name."""
    flags: int = 0

    def pack(self) -> bytes:
        """The 64 bytes of this descriptor."""
        return LAYOUT.pack(*self, 0)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Descriptor:
        """The descriptor in 64 bytes; raises ``InvariantError`` if they are not one."""
        if len(data) != DESCRIPTOR_BYTES:
            raise InvariantError(f"a descriptor has {DESCRIPTOR_BYTES} bytes, not {len(data)}")
        *fields, reserved = LAYOUT.unpack(data)
        found = cls(*fields)
        if reserved or found.flags & ~_KNOWN_FLAGS:
            raise InvariantError(f"descriptor {found.sequence} has unknown bits: flags {found.flags:#x}, {reserved:#x}")
        return found


def batch_key(batch_id: str) -> bytes:
    """The first 16 bytes of a batch's name, for people who look at the table; an entry is known by its sequence."""
    return batch_id.encode()[:BATCH_KEY_BYTES].ljust(BATCH_KEY_BYTES, b"\0")


class RingRequest(NamedTuple):
    """One request of an entry: ``token_count`` int32 ids from index ``offset_tokens`` of the int32 payload view on."""

    item: object
    offset_tokens: int
    token_count: int


class Entry(NamedTuple):
    """A published batch as the host knows it: its descriptor's shadow, so that nobody reads write-combined pages.

    ``requests`` are in the order they were published in; the other fields are the descriptor's.
    """

    sequence: int
    batch_id: str
    requests: tuple[RingRequest, ...]
    position: int
    length: int
    padding: int
    token_count: int
    flags: int = 0

    @property
    def descriptor(self) -> Descriptor:
        """What stands in the table for this entry; made when asked for, since handing an entry over needs none."""
        return Descriptor(
            self.sequence,
            self.position,
            self.length,
            self.padding,
            len(self.requests),
            self.token_count,
            batch_key(self.batch_id),
            self.flags,
        )

    @property
    def is_cancel(self) -> bool:
        """Whether the entry carries no work: its requests' items are to be stopped."""
        return bool(self.flags & FLAG_CANCEL)

    @property
    def is_skip(self) -> bool:
        """Whether all of its requests were cancelled before the engine took it: release it without running it."""
        return bool(self.flags & FLAG_SKIP)
