"""A descriptor is the same 64 bytes to the producer, to numpy and to whoever reads the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from ring.descriptor import DESCRIPTOR_DTYPE, FLAG_CANCEL, FLAG_SKIP, Descriptor, Entry, RingRequest, batch_key

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
DESCRIPTORS = st.builds(
    Descriptor, U64, U64, U64, U64, U32, U32, st.binary(min_size=16, max_size=16), st.integers(0, 3)
)


@given(DESCRIPTORS)
def test_a_descriptor_survives_its_64_bytes(descriptor: Descriptor) -> None:
    """Every field, at both ends of its range, reads back as written."""
    data = descriptor.pack()
    assert len(data) == 64
    assert Descriptor.unpack(data) == descriptor


@given(DESCRIPTORS)
def test_numpy_reads_the_same_fields(descriptor: Descriptor) -> None:
    """The structured type is the same layout: positions of 64 bits, padding in its own field."""
    row = np.frombuffer(descriptor.pack(), dtype=DESCRIPTOR_DTYPE)[0]
    for name in ("sequence", "position", "length", "padding", "request_count", "token_count", "flags"):
        assert int(row[name]) == getattr(descriptor, name)
    assert bytes(row["batch_id"]) == descriptor.batch_id


def test_bytes_that_are_no_descriptor_are_refused() -> None:
    """A table read at the wrong place, or written by another version, is noticed."""
    good = Descriptor(1, 0, 64, 0, 1, 16, batch_key("b"))
    with pytest.raises(InvariantError, match="not 63"):
        Descriptor.unpack(good.pack()[:-1])
    with pytest.raises(InvariantError, match="unknown bits"):
        Descriptor.unpack(good._replace(flags=8).pack())
    with pytest.raises(InvariantError, match="unknown bits"):
        Descriptor.unpack(good.pack()[:-4] + b"\1\0\0\0")


def test_a_batch_is_named_by_its_first_bytes() -> None:
    """Names may be longer than the field: an entry is known by its sequence, the name is for people."""
    assert batch_key("ab") == b"ab" + b"\0" * 14
    assert batch_key("0123456789abcdef0123") == b"0123456789abcdef"


def test_an_entry_knows_its_descriptor_and_its_kind() -> None:
    """The host plans from the shadow: what it says must be what stands in the table."""
    entry = Entry(7, "b7", (RingRequest("x", 0, 16),), 128, 64, 32, 16)
    assert entry.descriptor == Descriptor(7, 128, 64, 32, 1, 16, batch_key("b7"), 0)
    assert not entry.is_cancel
    assert not entry.is_skip
    assert entry._replace(flags=FLAG_CANCEL).is_cancel
    assert entry._replace(flags=FLAG_SKIP).is_skip
