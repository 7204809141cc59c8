"""The broker's side of its HTTP server: what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from broker.http import child
from broker.http.plan import Plan, read
from common import keys as key_files
from common import limits
from common.config import BrokerSettings, HttpSettings, KeySettings
from common.errors import RefusedError, UsageError


def settings(folder: Path, http: HttpSettings | None) -> BrokerSettings:
    return BrokerSettings("tcp://127.0.0.1:7700", folder, KeySettings(folder / "keys"), http=http)


@pytest.fixture
def tenants(tmp_path: Path) -> HttpSettings:
    key_files.init(tmp_path / "keys")
    path = tmp_path / "http-keys"
    path.write_text("sk alice\n")
    return HttpSettings("0.0.0.0:0", path)


def test_a_tenant_needs_a_key_of_the_brokers(tmp_path: Path, tenants: HttpSettings) -> None:
    """Control: once it is added all is well."""
    with pytest.raises(RefusedError, match="haulier keys add alice"):
        child.check(settings(tmp_path, tenants))
    key_files.add(tmp_path / "keys", "alice")
    child.check(settings(tmp_path, tenants))
    child.check(settings(tmp_path, None))


def test_what_is_not_installed_is_named(tmp_path: Path, tenants: HttpSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(RefusedError, match=r"uvicorn.*haulier\[http\]"):
        child.check(settings(tmp_path, tenants))
    child.check(settings(tmp_path, None))


@pytest.mark.parametrize(
    "address", ["0.0.0.0:8000", "10.0.0.1:8000", "[::]:8000", "example.org:8000", "127.evil.org:1"]
)
def test_beyond_this_machine_only_with_keys(address: str) -> None:
    """Control: with keys, or on loopback, it is taken."""
    with pytest.raises(UsageError, match="--http-keys"):
        HttpSettings(address)
    assert HttpSettings(address, Path("k")).port == int(address.rpartition(":")[2])
    assert HttpSettings("[::1]:80").host == "::1"
    for wrong in ("8000", "127.0.0.1", "127.0.0.1:70000", "a b:1"):
        with pytest.raises(UsageError, match="--http"):
            HttpSettings(wrong)


def test_an_address_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time in which a killed broker's server would have given it up. Control: a free one is had."""
    monkeypatch.setattr(limits, "PARENT_GRACE_S", -1.0)
    with child._bound(HttpSettings("127.0.0.1:0")) as first:
        port = first.getsockname()[1]
        with pytest.raises(RefusedError, match="choose another --http"):
            child._bound(HttpSettings(f"127.0.0.1:{port}"))
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limits.HTTP_SILENCE_S * 1000


def test_where_the_broker_is_reached() -> None:
    for bound, reached in (
        ("tcp://*:7700", "tcp://127.0.0.1:7700"),
        ("tcp://0.0.0.0:7", "tcp://127.0.0.1:7"),
        ("tcp://[::]:7", "tcp://[::1]:7"),
        ("tcp://10.0.0.1:7", "tcp://10.0.0.1:7"),
    ):
        assert child._reached(bound) == reached


def test_the_plan_arrives_as_it_was_written() -> None:
    plan = Plan(7, "tcp://127.0.0.1:7700", "/s", "", "", 5, 6)
    assert read(plan.written()) == plan


def test_tls_takes_both_files_or_none(tmp_path: Path) -> None:
    """And files that are none of it are refused by name before anything starts. Control: without them plain HTTP."""
    with pytest.raises(UsageError, match="--http-cert and --http-key go together"):
        HttpSettings("127.0.0.1:0", cert=tmp_path / "cert")
    for name in ("cert", "key"):
        (tmp_path / name).write_text("no certificate\n")
    for cert in (tmp_path / "cert", tmp_path / "none"):
        with pytest.raises(RefusedError, match="--http-cert"):
            child.check(settings(tmp_path, HttpSettings("127.0.0.1:0", cert=cert, key=tmp_path / "key")))
    assert HttpSettings("127.0.0.1:0").cert is None
