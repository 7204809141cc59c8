"""Metrics: what an operator's scrape finds, and that totals never lie backwards."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from common.errors import InvariantError, RefusedError
from common.metrics import OUTCOMES, Endpoint, Metrics, open_endpoint, start


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def scraped(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    "family",
    [
        "ring_taken_bytes",
        "ring_returned_bytes",
        "ring_live_bytes",
        "ring_padding_live_bytes",
        "ring_tokens_pending",
        "ring_items_unresolved",
        "sessions",
        "sessions_gone_working",
        "staged_bytes",
        "step_seconds",
        "lines",
        "lines_wasted",
        "wal_bytes",
        "reconnects",
    ],
)
def test_the_figures_that_the_rules_name_are_declared(metrics: Metrics, family: str) -> None:
    """R4 and S3 name figures that must be there before anything goes wrong, since dashboards are made in good times."""
    assert f"haulier_{family}" in {found.name for found in metrics.registry.collect()}


def test_a_scrape_finds_values(metrics: Metrics) -> None:
    """Prometheus reads the port and finds what the process counted."""
    metrics.ring_live_bytes.set(4096)
    metrics.lines.labels(outcome="completed").inc(7)
    endpoint = open_endpoint(metrics, 0)
    try:
        text = scraped(endpoint)
    finally:
        endpoint.stop()
    assert "haulier_ring_live_bytes 4096.0" in text
    assert 'haulier_lines_total{outcome="completed"} 7.0' in text


def test_outcomes_are_there_before_the_first_line_ends(metrics: Metrics) -> None:
    """No failed line yet is 0, not absence: an alert on a rate needs the 0."""
    found = {metrics.registry.get_sample_value("haulier_lines_total", {"outcome": outcome}) for outcome in OUTCOMES}
    assert found == {0.0}


def test_no_port_means_no_server(metrics: Metrics) -> None:
    """Most runs on a laptop want no open port."""
    assert start(metrics, 0) is None


def test_a_port_in_use_is_refused_with_the_setting(metrics: Metrics) -> None:
    """Two workers on one host with one --metrics-port: the second says which flag to change."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RefusedError, match="--metrics-port"):
            start(metrics, other.getsockname()[1])


def test_a_port_that_is_no_port_is_refused(metrics: Metrics) -> None:
    """70000 is a typing mistake, not a bug."""
    with pytest.raises(RefusedError, match="--metrics-port"):
        start(metrics, 70000)


def test_totals_follow_the_books_and_never_fall(metrics: Metrics) -> None:
    """The ring keeps its own totals; a mirrored one that fell would mean two books for one ring."""
    for total in (10, 10, 25):
        metrics.advance(metrics.ring_taken_bytes, total)
    assert metrics.registry.get_sample_value("haulier_ring_taken_bytes_total") == 25
    with pytest.raises(InvariantError, match="fell from 25 to 24"):
        metrics.advance(metrics.ring_taken_bytes, 24)
    assert metrics.registry.get_sample_value("haulier_ring_taken_bytes_total") == 25


def test_two_machines_in_one_process_share_no_number() -> None:
    """A test, or ``haulier run``, holds broker and worker at once."""
    first, second = Metrics(), Metrics()
    first.reconnects.inc()
    assert second.registry.get_sample_value("haulier_reconnects_total") == 0
