"""Every message survives the trip, and no bytes from outside do anything but raise ``PeerFault``."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import codec, limits, messages
from common.errors import PeerFault

EVERY = (*messages.FLEET, *messages.CLIENT)
ONE = messages.JobInfo(1, "j", "n", "completed", 9, 9, 0, 0, 0, 0, 1, 2, 1.5, 2.5, 3.5, 0, "", 9)


def values_of(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Legal values of a field declared as ``hint``."""
    if hint is int:
        return st.integers(-1_000_000, 1_000_000) if name == "priority" else st.integers(0, codec.INT_MAX)
    if hint is float:
        return st.floats(0, 1e14, allow_nan=False)
    if hint is str:
        return st.text(max_size=40)
    if hint is bytes:
        return st.binary(max_size=60)
    if hint is bool:
        return st.booleans()
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0], name), max_size=3).map(tuple)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.none() | values_of(next(arg for arg in typing.get_args(hint) if arg is not type(None)), name)
    return instances(hint)


def instances(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values_of(hint, name) for name, hint in hints.items()})


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_trip(cls: type) -> None:
    """Whatever a side may say, the other side hears exactly that, types included."""

    @settings(max_examples=25, deadline=None)
    @given(instances(cls))
    def trip(message: Any) -> None:
        heard = codec.decode(codec.encode(message))
        assert heard == message
        assert type(heard) is cls

    trip()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_only_ever_raises_peer_fault(data: bytes) -> None:
    """A port scanner, another protocol, a broken peer: its own session pays, nobody else's."""
    with pytest.raises(PeerFault):
        codec.decode(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([cls.__name__ for cls in EVERY]), st.lists(anything, max_size=12))
def test_a_known_name_with_any_fields_is_a_message_or_a_peer_fault(name: str, fields: list[Any]) -> None:
    """A peer that knows our names but not our fields: what is let through is a message that we could have sent."""
    try:
        message = codec.decode(msgpack.packb([name, *fields], use_bin_type=True))
    except PeerFault:
        return
    assert codec.decode(codec.encode(message)) == message


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EVERY).flatmap(instances), st.data())
def test_a_flipped_byte_is_a_message_or_a_peer_fault(message: Any, data: st.DataObject) -> None:
    """A bit turns on the way: never anything but a whole message or its refusal."""
    raw = bytearray(codec.encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        codec.decode(bytes(raw))
    except PeerFault:
        return


def test_unchecked_decoding_lets_the_noise_through() -> None:
    """Control: msgpack alone takes what the codec refuses, so it is the codec that refuses it."""
    raw = msgpack.packb(["AskStatus", "three", 7])
    assert msgpack.unpackb(raw) == ["AskStatus", "three", 7]
    with pytest.raises(PeerFault, match="bad_integer"):
        codec.decode(raw)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (["AskStatus", -1, "j"], "bad_integer"),
        (["AskStatus", True, "j"], "bad_integer"),
        (["AskStatus", 1.0, "j"], "bad_integer"),
        (["AskStatus", 2**63, "j"], "bad_integer"),
        (["AskStatus", 1, b"j"], "bad_text"),
        (["AskStatus", 1, "j" * (limits.TEXT_MAX_CHARS + 1)], "bad_text"),
        (["AskStatus", 1], "bad_shape"),
        (["AskStatus", 1, "j", 2], "bad_shape"),
        (["Nonsense", 1], "unknown_message"),
        (["Fence", "s", 1, 1, 1], "unknown_message"),
        ([1, 2], "not_a_message"),
        ([], "not_a_message"),
        (["Chunk", 1, "j", 0, "text"], "bad_bytes"),
        (["Submit", 1, "j", "n", 1, "s", 1, 0, 0, "m"], "bad_boolean"),
        (["Submit", 1, "j", "n", 1, "s", True, 2_000_000, 0, "m"], "bad_integer"),
        (["Jobs", 1, [[]], False], "bad_shape"),
        (["Jobs", 1, {}, False], "not_msgpack"),
    ],
)
def test_each_wrong_field_is_told_by_a_stable_word(fields: list[Any], code: str) -> None:
    """Logs and metrics count these words: they say what is wrong with the peer."""
    with pytest.raises(PeerFault) as told:
        codec.decode(msgpack.packb(fields if code != "not_msgpack" else ["Jobs", 1, {"a": 1}, False]))
    assert told.value.code == code


def test_numbers_that_are_none_are_refused() -> None:
    """NaN would make every later comparison false."""
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(PeerFault, match="bad_number"):
            codec.decode(codec.encode(dataclasses.replace(ONE, created_at=bad)))


def test_size_and_depth_are_bounded_before_anything_is_built() -> None:
    """A peer cannot make us allocate: too large a frame, too long a list, too deep a nest."""
    with pytest.raises(PeerFault, match="too_large"):
        codec.decode(b"\x00" * (limits.MESSAGE_MAX_BYTES + 1))
    with pytest.raises(PeerFault, match="too_large"):
        codec.encode(messages.Chunk(1, "j", 0, b"\x00" * (limits.MESSAGE_MAX_BYTES + 1)))
    many = ["Jobs", 1, [[]] * (limits.PAGE_MAX_COUNT + 1), False]
    with pytest.raises(PeerFault, match="bad_list"):
        codec.decode(msgpack.packb(many))
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(PeerFault):
        codec.decode(msgpack.packb(["Jobs", 1, deep, False]))
    with pytest.raises(PeerFault):  # an array that says it has four billion items
        codec.decode(b"\xdd\xff\xff\xff\xff")


def test_a_field_with_a_default_may_be_left_out() -> None:
    """A peer of the version before does not send what it does not know."""
    raw = msgpack.unpackb(codec.encode(messages.Lines(1, "j", (b"x",), 5, True)))
    assert codec.decode(msgpack.packb(raw[:-1])) == messages.Lines(1, "j", (b"x",), 5, True, False)


def test_every_bound_of_a_text_is_of_a_field_that_is_there() -> None:
    """A field renamed in the messages takes its bound along, or this fails."""
    texts = {
        name
        for cls in (*messages.FLEET, *messages.CLIENT, *codec._VALUES)
        for name, hint in typing.get_type_hints(cls).items()
        if hint in (str, tuple[str, ...])
    }
    assert codec.TEXT_MAX_CHARS.keys() <= texts
    notes = messages.Result(messages.LineRef("j", 1, 1), "ok", 200, 1, 1, 2, b"{}", "n" * (limits.NOTES_MAX_CHARS + 1))
    with pytest.raises(PeerFault, match=str(limits.NOTES_MAX_CHARS)):
        codec.decode(codec.encode(messages.Done(messages.Fence("s", 1, 1, 1), (notes,))))
