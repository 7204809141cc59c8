"""The pages of docs/ and README held against the code and the figures: numbers, links, flags, metrics, examples."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from broker import api
from common import cli
from common.config import EngineSettings
from common.errors import RefusedError
from tests.unit.test_dashboard import series
from tests.unit.worker.engine.test_fit import D16
from worker.engine.fit import fit

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("*/README.md")])
OF_OTHERS = {"--profile", "--scale", "--build"}
"""Flags of other programs that our pages name."""


def between(text: str, mark: str) -> str:
    """The fenced block between two ``<!-- mark -->``."""
    part = text.split(f"<!-- {mark} -->")[1]
    return part.strip().removeprefix("```").removesuffix("```").strip()


def sized(**changes: Any) -> EngineSettings:
    fields = {"model": "d16", "host_pool_gib": 64.0, "concurrency": 4, "context_tokens": 131_072, "device_pages_gib": 8}
    return EngineSettings(**{**fields, **changes})


def test_the_sizing_example_is_what_a_worker_says() -> None:
    """Line by line; and so is the refusal. Control: other settings say something else."""
    text = (DOCS / "operating.md").read_text()
    assert between(text, "fit").splitlines() == list(fit(D16, sized()).formula)
    assert between(text, "fit").splitlines() != list(fit(D16, sized(device_pages_gib=9)).formula)
    with pytest.raises(RefusedError) as refused:
        fit(D16, sized(host_pool_gib=24.0))
    assert between(text, "refusal") == str(refused.value)


def test_every_metric_is_explained_and_every_one_explained_exists() -> None:
    """By the names that an endpoint exports; a histogram by its own."""
    table = (DOCS / "operating.md").read_text().split("## What each metric means")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {f"haulier_{one}" for row in rows for one in re.findall(r"`([a-z_]+)`", row)}
    exported = {re.sub(r"^(haulier_step_seconds)_(?:bucket|sum|count)$", r"\1", name) for name in series()}
    assert named == exported


def links(page: Path) -> Iterator[tuple[str, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", head.lower()).replace(" ", "-") for head in heads}


def dead(page: Path) -> list[str]:
    found = []
    for path, anchor in links(page):
        target = page if not path else (page.parent / path).resolve()
        if not target.exists():
            found.append(f"{page.name}: {path}")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{page.name}: {path}#{anchor}")
    return found


def test_links_lead_somewhere(tmp_path: Path) -> None:
    """Files and headings. Control: a page with two that do not."""
    assert [one for page in PAGES for one in dead(page)] == []
    (tmp_path / "a.md").write_text("# Some head\n[x](b.md) [y](#other) [z](#some-head)\n")
    assert dead(tmp_path / "a.md") == ["a.md: b.md", "a.md: #other"]


def options() -> set[str]:
    """Every option of every command."""
    app, _ = cli.build_app()
    waiting, found = [typer.main.get_command(app)], set()
    while waiting:
        command = waiting.pop()
        found |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        waiting += getattr(command, "commands", {}).values()
    return found | {"--help", "--install-completion", "--show-completion"}


def test_flags_that_pages_name_exist() -> None:
    """Of ours, or of a program that is listed here. Control: one that is neither is found."""
    known = options() | OF_OTHERS
    named = {flag for page in PAGES for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", page.read_text())}
    assert sorted(named - known) == []
    assert sorted(OF_OTHERS - named) == []
    assert "--host-pool-gigabytes" not in known


def numbers(text: str) -> set[str]:
    """Numbers in the rows of a page's tables, without their commas; those below 100 without a point say little."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    found = {one.replace(",", "") for row in rows for one in re.findall(r"\d[\d,]*(?:\.\d+)?", row)}
    return {one for one in found if "." in one or float(one) >= 100}


def measured() -> set[str]:
    """Every number in docs/figures."""
    found: set[str] = set()
    for path in (DOCS / "figures").glob("*.json"):
        found |= set(re.findall(r"\d+(?:\.\d+)?", path.read_text()))
        found |= {f"{float(number):g}" for number in re.findall(r"\d+\.0\b", path.read_text())}
    return found


def test_what_is_compared_was_measured() -> None:
    """Each number of the tables of comparison.md is in docs/figures. Control: a better one is not."""
    found = measured()
    assert sorted(numbers((DOCS / "comparison.md").read_text()) - found) == []
    assert "176.95123" not in found
    assert numbers("| 26.43 | 1,234 | 3 |") == {"26.43", "1234"}


def test_the_python_of_the_quick_start_is_python_that_works() -> None:
    """It parses, what it imports is there, and it is the example's three lines."""
    text = (DOCS / "quick-start.md").read_text()
    code = ast.parse(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    names = [one.name for node in code.body if isinstance(node, ast.ImportFrom) for one in node.names]
    assert names == ["chat", "connect", "text"]
    assert all(callable(getattr(api, name)) for name in names)
    methods = {node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)}
    assert methods <= set(dir(api.FleetApi)) | set(dir(api.Job))
    line = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    assert line == api.chat("q1", "Why is the sky blue?", "smollm2-135m", max_tokens=64)


def test_the_glossary_has_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[2:]
    words = list(itertools.chain.from_iterable(row.split(", ") for row in rows))
    assert len(words) > 35
    assert len(set(words)) == len(words)
