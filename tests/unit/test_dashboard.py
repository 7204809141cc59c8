"""What docs/ and compose.yaml say about metrics, held against those there are: a panel of nothing shows nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram

from common.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "docs" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "haulier.json"
JOBS = {"haulier-broker", "haulier-worker"}
_USE = re.compile(r"(haulier_[a-z0-9_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*=~?\s*"([^"]*)"')
_BY = re.compile(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)")
FROM_SCRAPE = {"job", "instance", "le"}
"""Labels that no metric declares: whoever scrapes adds them, or a histogram does."""


def series() -> dict[str, set[str]]:
    """Every name that an endpoint exports, with the labels declared for it."""
    found: dict[str, set[str]] = {}
    for family in vars(Metrics()).values():
        if not isinstance(family, Counter | Gauge | Histogram):
            continue
        name, labels = family._name, set(family._labelnames)
        endings = ("_total",) if isinstance(family, Counter) else ("",)
        for ending in ("_bucket", "_sum", "_count") if isinstance(family, Histogram) else endings:
            found[name + ending] = labels
    return found


def expressions(dashboard: Any) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def problems(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Names that are not exported, labels that are not theirs, jobs that nobody scrapes."""
    found = []
    allowed = set(FROM_SCRAPE)
    for name, matchers in _USE.findall(expression):
        if name not in known:
            found.append(f"{name} is not exported")
            continue
        allowed |= known[name]
        for label, value in _MATCHER.findall(matchers):
            if label == "job" and value not in JOBS:
                found.append(f"no job is called {value}")
            elif label not in known[name] | FROM_SCRAPE:
                found.append(f"{name} has no label {label}")
    for labels in _BY.findall(expression):
        found += [f"nothing there has a label {one.strip()}" for one in labels.split(",") if one.strip() not in allowed]
    return found


def test_every_expression_of_the_dashboard_asks_for_what_is_exported() -> None:
    """Names, labels and jobs; and each panel has a title, a unit and a word on what it shows."""
    dashboard, known = json.loads(DASHBOARD.read_text()), series()
    asked = list(expressions(dashboard))
    assert len(asked) > 30
    assert [words for one in asked for words in problems(one, known)] == []
    shown = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"] for panel in shown)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_metric_is_on_the_dashboard() -> None:
    """What is not looked at is not seen. One of a histogram's three names is enough."""
    text = DASHBOARD.read_text()
    families = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in series()}
    assert [name for name in sorted(families) if name not in text] == []


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rate(haulier_line_total[1m])", "haulier_line_total is not exported"),
        ("haulier_tokens_generated", "haulier_tokens_generated is not exported"),
        ('haulier_contexts{phase="running"}', "haulier_contexts has no label phase"),
        ('haulier_contexts{job="workers"}', "no job is called workers"),
        ("sum by (kind) (haulier_contexts)", "nothing there has a label kind"),
    ],
)
def test_the_check_finds_its_fault(expression: str, words: str) -> None:
    """Control: a renamed metric, a counter without its ending, a label of another one."""
    assert words in problems(expression, series())
    assert problems('sum by (state) (haulier_contexts{job="haulier-worker"})', series()) == []


def test_the_files_name_each_other() -> None:
    """Scrape jobs, the data source's id, the folder that dashboards are read from, the ports of compose.yaml."""
    compose = (ROOT / "compose.yaml").read_text()
    for name in ("prometheus.yml", "prometheus-loopback.yml"):
        assert set(re.findall(r"job_name: (\S+)", (GRAFANA / name).read_text())) == JOBS
    source = (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    uid = re.search(r"uid: (\S+)", source)
    assert uid is not None
    named = {panel["datasource"]["uid"] for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel}
    assert named == {uid[1]}
    provider = (GRAFANA / "provisioning" / "dashboards" / "haulier.yml").read_text()
    folder = re.search(r"path: (\S+)", provider)
    assert folder is not None
    assert f"./docs/grafana/dashboards:{folder[1]}:ro" in compose
    assert f"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: {folder[1]}/{DASHBOARD.name}" in compose
    assert "./docs/grafana/provisioning:/etc/grafana/provisioning:ro" in compose
    assert "./docs/grafana/prometheus.yml:/etc/prometheus/prometheus.yml:ro" in compose
    ports = set(re.findall(r":(\d+)\"", (GRAFANA / "prometheus.yml").read_text()))
    ports |= set(re.findall(r"port: (\d+)", (GRAFANA / "prometheus.yml").read_text()))
    assert ports == set(re.findall(r'HAULIER_METRICS_PORT: "(\d+)"', compose)) == {"9700"}


def test_images_that_are_fetched_are_pinned() -> None:
    """The same file starts the same thing next year. Our own are built here, and are called local or gpu."""
    images = re.findall(r"^\s*image: (\S+)$", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    fetched = [image for image in images if not image.startswith("haulier-")]
    assert len(fetched) == 2
    assert all(re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", image) for image in fetched)
