"""Names that cross a boundary: unique when chance is real, the same again when it is replayed."""

from __future__ import annotations

import re
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from common.ids import LineId, is_id, new_id


def test_ids_of_the_operating_systems_chance_differ() -> None:
    """Two clients that submit at the same moment name two jobs."""
    assert len({new_id() for _ in range(1000)}) == 1000


@given(st.integers(min_value=0, max_value=2**64))
def test_the_same_chance_gives_the_same_id(seed: int) -> None:
    """A simulator replays a failure from its seed, ids included."""
    assert new_id(Random(seed)) == new_id(Random(seed))
    assert is_id(new_id(Random(seed)))


@given(st.text(max_size=40))
def test_other_text_is_no_id(text: str) -> None:
    """An id comes from a peer: whatever is not our own spelling is refused, and nothing raises."""
    assert is_id(text) == bool(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text))


def test_only_the_canonical_spelling_counts() -> None:
    """One job must not have two names: upper case, braces and missing dashes name the same UUID."""
    one = new_id(Random(1))
    assert is_id(one)
    for other in (one.upper(), "{" + one + "}", one.replace("-", ""), "urn:uuid:" + one, one + "\n", ""):
        assert not is_id(other)


def test_lines_sort_as_in_their_file() -> None:
    """Line 10 comes after line 9, and a job's lines stand together."""
    lines = [LineId("b", 0), LineId("a", 10), LineId("a", 9)]
    assert [str(line) for line in sorted(lines)] == ["a#9", "a#10", "b#0"]
