"""The list of guards that ``make mutation`` takes out: none has gone stale, and each replacement changes something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.rule} {one.what}")
def test_a_guard_is_where_the_list_says(mutation: Mutation) -> None:
    """A guard that was rewritten is no longer taken out by anybody, unless its mutation is rewritten with it."""
    assert (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.text) == 1
    assert mutation.instead != mutation.text
    assert all((ROOT / name).is_file() for name in mutation.files)
