"""Which bytes a tensor touches, exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvariantError
from worker.engine import footprint
from worker.engine.footprint import host_bytes, ranges_of, returned_tensors


def touched(tensor: torch.Tensor, base: torch.Tensor) -> set[int]:
    """The bytes of ``base`` that writing ``tensor`` changes, by writing it."""
    base.zero_()
    tensor.fill_(-1)
    changed = base.view(torch.uint8).reshape(-1) != 0
    return {int(byte) for byte in changed.nonzero()}


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_ranges_are_the_bytes_that_a_write_changes(shape: list[int], data: st.DataObject) -> None:
    """Any slice, step and permutation of a pool: no byte too many, none too few."""
    base = torch.zeros(shape, dtype=torch.int16)
    view = base
    for axis, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        view = view[(slice(None),) * axis + (slice(start, stop, data.draw(st.integers(1, 2))),)]
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    found = {byte - base.data_ptr() for low, high in ranges_of(view) for byte in range(low, high)}
    assert found == touched(view, base)


def test_ranges_are_disjoint_and_ascending() -> None:
    """What the overlap walk relies on."""
    ranges = ranges_of(torch.zeros(4, 6)[:, 1:3])
    assert len(ranges) == 4
    assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_an_empty_tensor_touches_nothing() -> None:
    """A context with no history yet."""
    assert ranges_of(torch.zeros(0, 4)) == ()


def test_an_expanded_tensor_touches_its_one_row() -> None:
    """A broadcast row is one row."""
    row = torch.zeros(1, 4)
    assert ranges_of(row.expand(8, 4)) == ranges_of(row)


def test_a_tensor_too_scattered_to_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than checked wrongly or for minutes."""
    monkeypatch.setattr(footprint, "RANGES_MAX_COUNT", 8)
    with pytest.raises(InvariantError, match="too scattered"):
        ranges_of(torch.zeros(16, 2)[:, :1])


def test_bytes_tell_what_numbers_hide() -> None:
    """NaN equals itself as bytes, and minus zero is not zero."""
    nan = torch.tensor([float("nan")])
    assert torch.equal(host_bytes(nan), host_bytes(nan))
    assert not torch.equal(host_bytes(torch.tensor([0.0])), host_bytes(torch.tensor([-0.0])))


def test_returned_tensors_are_found_in_lists_and_tuples() -> None:
    """Attention may return its output and its log-sum-exp."""
    one, other = torch.zeros(1), torch.zeros(2)
    assert returned_tensors((one, [other, None], 3)) == [one, other]
