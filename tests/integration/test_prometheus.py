"""Both metrics endpoints of a real fleet, and, where it is installed, a real Prometheus with docs/'s scrape file."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet_kit import DEADLINE_S, REPOSITORY, Fleet
from tests.unit.test_dashboard import DASHBOARD, GRAFANA, expressions

R4 = (
    "haulier_ring_taken_bytes_total", "haulier_ring_returned_bytes_total", "haulier_ring_live_bytes",
    "haulier_ring_padding_live_bytes", "haulier_ring_tokens_pending", "haulier_ring_items_unresolved",
)  # fmt: skip
S3 = ("haulier_sessions", "haulier_sessions_gone_working_total")
H3 = (
    "haulier_staged_bytes_total", "haulier_retained_hit_bytes_total", "haulier_headroom_hit_bytes_total",
    'haulier_decode_seconds_total{which="predicted"}', 'haulier_decode_seconds_total{which="measured"}',
)  # fmt: skip
NOT_YET: dict[str, Any] = {"status": "starting", "data": {"result": []}}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def exported(port: int) -> dict[str, float]:
    lines = read(f"http://127.0.0.1:{port}/metrics").splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_what_the_rules_ask_for_is_exported(fleet: Fleet) -> None:
    """R4 and H3 at the worker's port, S3 at the broker's, and they say what was done."""
    at_broker, at_worker = free_port(), free_port()
    fleet.broker("--metrics-port", str(at_broker))
    fleet.worker("--metrics-port", str(at_worker), delay_ms=1)
    fleet.whole(fleet.submit(20), 20)
    fleet.until(lambda: exported(at_worker)["haulier_ring_taken_bytes_total"] > 0, "the books were looked at")
    fleet.until(lambda: exported(at_worker)["haulier_ring_items_unresolved"] == 0, "all is resolved")
    worker, broker = exported(at_worker), exported(at_broker)
    assert [name for name in (*R4, *H3) if name not in worker] == []
    assert worker[R4[0]] - worker[R4[1]] == worker[R4[2]]
    assert [name for name in S3 if not any(one.startswith(name) for one in broker)] == []
    assert broker['haulier_lines_total{outcome="completed"}'] == 20
    assert sum(value for name, value in broker.items() if name.startswith("haulier_sessions{")) == 1


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here: apt-get install prometheus")
def test_a_real_prometheus_scrapes_a_fleet_and_takes_every_expression(fleet: Fleet, tmp_path: Path) -> None:
    """The loopback file with this test's ports; each of the dashboard's expressions is valid and gives what it should.
    Control: one that is wrong is refused.
    """
    ports = {"9700": free_port(), "9701": free_port(), "9702": free_port()}
    fleet.broker("--metrics-port", str(ports["9700"]))
    for number, port in enumerate(("9701", "9702")):
        fleet.worker("--metrics-port", str(ports[port]), name=f"worker-{number}", delay_ms=1)
    config = (GRAFANA / "prometheus-loopback.yml").read_text()
    config = re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{ports[found[1]]}", config)
    (tmp_path / "prometheus.yml").write_text(config.replace("scrape_interval: 5s", "scrape_interval: 1s"))
    if shutil.which("promtool"):
        for name in ("prometheus.yml", "prometheus-loopback.yml"):
            subprocess.run(["promtool", "check", "config", str(GRAFANA / name)], check=True, capture_output=True)
    at = free_port()
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
             f"--web.listen-address=127.0.0.1:{at}"],
            stdout=log, stderr=log, cwd=REPOSITORY,
        )  # fmt: skip
    fleet.processes.append(process)
    url = f"http://127.0.0.1:{at}/api/v1/"
    fleet.until(lambda: _up(url) == {"haulier-broker": 1, "haulier-worker": 2}, "all three are scraped")
    fleet.whole(fleet.submit(60), 60)
    fleet.until(lambda: _total(url, "sum(haulier_ring_taken_bytes_total)") > 0, "what was done is scraped")
    for expression in expressions(json.loads(DASHBOARD.read_text())):
        answer = asked(url, expression.replace("$__rate_interval", "1m"))
        assert answer["status"] == "success", (expression, answer)
    identity = "haulier_ring_taken_bytes_total - haulier_ring_returned_bytes_total - haulier_ring_live_bytes"
    found = asked(url, f'{identity} == 0 and on (instance) haulier_ring_taken_bytes_total{{job="haulier-worker"}} > 0')
    assert found["data"]["result"]
    assert asked(url, "sum by (rate(")["status"] == "error"


def asked(url: str, expression: str) -> Any:
    try:
        return json.loads(read(f"{url}query?{urllib.parse.urlencode({'query': expression})}"))
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return json.loads(text) if text.startswith("{") else NOT_YET
    except OSError:
        return NOT_YET


def _up(url: str) -> dict[str, int]:
    found = asked(url, "sum by (job) (up)")["data"]["result"]
    return {one["metric"]["job"]: int(float(one["value"][1])) for one in found}


def _total(url: str, expression: str) -> float:
    found = asked(url, expression)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0
