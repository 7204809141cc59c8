"""docs/rules.md says where each rule lives and which test fails without it: what it names must be there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = {"R": 6, "L": 8, "Q": 5, "S": 5, "D": 6, "A": 7, "H": 6}
ROW = re.compile(r"^\| ([RLQSDAH]\d) [^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)


def table() -> dict[str, tuple[str, str, str]]:
    """Rule to home, test and control, as the page has them."""
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8").split("## Mutations")[0]
    return {found[1]: (found[2].strip(), found[3].strip(), found[4].strip()) for found in ROW.finditer(text)}


@cache
def known_tests() -> set[str]:
    """Every test function there is, and every test file."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names.add(path.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
    return names


def test_every_rule_is_in_the_table() -> None:
    """A rule without a row is a rule nobody can find."""
    assert set(table()) == {f"{letter}{number}" for letter, count in RULES.items() for number in range(1, count + 1)}


@pytest.mark.parametrize("rule", sorted(table()))
def test_what_the_table_names_is_there(rule: str) -> None:
    """Homes exist and name their rule in the docstring; tests exist. "not built" has neither, and says so."""
    home, test, control = table()[rule]
    if home.startswith("not built"):
        assert not test + control
        return
    paths = re.findall(r"`([\w/]+\.py)`", home)
    assert paths
    named = [rule in (ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or "") for path in paths]
    assert any(named), f"none of {paths} names {rule}"
    tests = re.findall(r"`(test_[\w.]+)`", test + control)
    assert re.search(r"`test_", test)
    assert control
    assert [name for name in tests if name not in known_tests()] == []
