"""Reading in bulk takes exactly what the codec takes slowly, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import bulk, limits
from common.codec import INT_MAX
from common.messages import BatchLine, LineRef, Result, Verdict

REF = ("j", 3, 1)
near = st.sampled_from(
    [
        REF,
        ["j", 3, 1],
        ("j", 3),
        ("j", -1, 1),
        ("j", True, 1),
        ("j", INT_MAX + 1, 1),
        "j",
        "x" * 513,
        0,
        7,
        -1,
        True,
        1.0,
        None,
        b"body",
        (),
    ]
)


def test_raw_tuples_become_values_with_their_types() -> None:
    """A DONE of 64 results: each is a Result, its ref a LineRef."""
    read = bulk.reader(Result, lambda _: 512)
    found = read(((REF, "ok", 200, 1, 2, 2, b"{}", "0.10 s: ended"),) * 2)
    assert found == (Result(LineRef("j", 3, 1), "ok", 200, 1, 2, 2, b"{}", "0.10 s: ended"),) * 2
    assert [type(found[0]), type(found[0].ref)] == [Result, LineRef]
    assert read(()) == ()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([LineRef, BatchLine, Verdict]), st.lists(near, min_size=2, max_size=4))
def test_what_does_not_fit_is_left_to_the_codec(cls: type, fields: list[Any]) -> None:
    """A peer sends something almost right: in bulk it is taken only if field by field it would be."""
    read = bulk.reader(cls, lambda _: limits.TEXT_MAX_CHARS)((tuple(fields),))
    if read is not None:
        assert fits(cls, fields)
        assert read[0] == tuple(fields)
        assert type(read[0]) is cls
    else:
        assert not fits(cls, fields)


def fits(cls: Any, fields: Any) -> bool:
    """By the declaration, written out once more."""
    kinds: dict[Any, list[Any]] = {
        LineRef: [str, int, int], BatchLine: [LineRef, str, int, bytes], Verdict: [LineRef, str, str],
    }  # fmt: skip
    if len(fields) != len(kinds[cls]) or isinstance(fields, str | bytes):
        return False
    return all(one_fits(kind, field) for kind, field in zip(kinds[cls], fields, strict=True))


def one_fits(kind: Any, field: Any) -> bool:
    if kind is LineRef:
        return type(field) is tuple and fits(LineRef, field)
    if type(field) is not kind:
        return False
    return 0 <= field <= INT_MAX if kind is int else kind is bytes or len(field) <= limits.TEXT_MAX_CHARS


def test_other_kinds_of_fields_are_refused_when_the_reader_is_made() -> None:
    """Somebody adds a float to a result: this is found at the first import, not at the first result."""

    class Timed(NamedTuple):
        seconds: float

    with pytest.raises(TypeError, match="seconds"):
        bulk.reader(Timed, lambda _: 9)
