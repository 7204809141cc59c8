"""Failures: each class has the exit code that the command line documents."""

from __future__ import annotations

import pytest

from common import errors


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (errors.UsageError, 2),
        (errors.UnreachableError, 3),
        (errors.RefusedError, 4),
        (errors.CancelledError, 5),
        (errors.NotFinishedError, 6),
        (errors.ReaderGone, 141),
        (errors.InvariantError, 70),
    ],
)
def test_each_failure_has_its_documented_code(failure: type[errors.HaulierError], code: int) -> None:
    """Scripts branch on these numbers: they are an interface."""
    assert failure.exit_code == code
    assert issubclass(failure, errors.HaulierError)


def test_a_peers_fault_keeps_its_code_apart_from_its_words() -> None:
    """Metrics count by the code; the words may name sizes and ids and would make a family for each."""
    fault = errors.PeerFault("too_large", "frame of 9 MiB, at most 4 MiB")
    assert fault.code == "too_large"
    assert str(fault) == "too_large: frame of 9 MiB, at most 4 MiB"


def test_only_a_bug_ends_as_a_bug() -> None:
    """A new class that forgets its exit code would blame us for what the user can mend."""
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert {found.exit_code for found in classes} == {2, 3, 4, 5, 6, 70, 141}
    assert {found.__name__ for found in classes if found.exit_code == 70} == {"HaulierError", "InvariantError"}
