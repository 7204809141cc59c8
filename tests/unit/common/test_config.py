"""What an operator may set is checked once, at the start, and each mistake names the flag to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import limits
from common.config import (
    BrokerSettings,
    ClientSettings,
    EngineSettings,
    HttpSettings,
    KeySettings,
    WorkerSettings,
    endpoints,
    seconds,
)
from common.errors import UsageError

KEYS = KeySettings(Path("keys"))
OPEN = KeySettings(insecure=True)
ENGINE = EngineSettings(model="m")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tcp://127.0.0.1:7700", ("tcp://127.0.0.1:7700",)),
        ("broker:7700", ("tcp://broker:7700",)),
        ("a:1, b:2", ("tcp://a:1", "tcp://b:2")),
        ("tcp://[::1]:7700", ("tcp://[::1]:7700",)),
        ("tcp://127.0.0.1:*", ("tcp://127.0.0.1:*",)),
    ],
)
def test_endpoints_are_read_as_people_write_them(text: str, found: tuple[str, ...]) -> None:
    """With or without tcp://, one or several."""
    assert endpoints(text) == found


@pytest.mark.parametrize(
    "text", ["", "a", "a:", "a:0", "a:\u0661", "a:65536", "a:x", "ipc:///tmp/x", "http://a:1", "a:1,,b:2"]
)
def test_what_is_no_endpoint_is_named(text: str) -> None:
    """A typing error is told at once, not by a connection that never comes."""
    with pytest.raises(UsageError, match=r"^--broker"):
        endpoints(text)
    with pytest.raises(UsageError, match=r"^--bind"):
        endpoints(text, "--bind")


@given(st.text(max_size=30))
def test_any_text_is_endpoints_or_a_usage_error(text: str) -> None:
    """Whatever stands in HAULIER_BROKER, it is never a traceback."""
    try:
        found = endpoints(text)
    except UsageError:
        return
    assert endpoints(",".join(found)) == found


@pytest.mark.parametrize(
    ("text", "found"), [("0", 0), ("90", 90), ("90s", 90), ("15m", 900), ("24h", 86400), ("2d", 172800)]
)
def test_durations(text: str, found: int) -> None:
    """As people write them on a command line."""
    assert seconds(text, "--keep") == found


@given(st.text(max_size=12))
def test_any_text_is_a_duration_or_a_usage_error(text: str) -> None:
    """Never a traceback, never a negative time."""
    try:
        found = seconds(text, "--keep")
    except UsageError:
        with pytest.raises(UsageError, match=r"^--keep "):
            seconds(text, "--keep")
        return
    assert found >= 0


def test_no_keys_are_only_for_those_who_say_so() -> None:
    """S5: forgetting --keys is a mistake that is told, not a fleet without a lock."""
    with pytest.raises(UsageError, match="--keys"):
        KeySettings()
    assert KeySettings(insecure=True).directory is None


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://0.0.0.0:7700",
        "tcp://*:7700",
        "tcp://10.0.0.1:7700",
        "tcp://example.org:7700",
        "tcp://localhost.example:7700",
        "tcp://127.example:7700",
    ],
)
def test_an_open_broker_stays_on_loopback_unless_forced(bind: str) -> None:
    """S5: --insecure on an address that others reach is refused, and says by what to change."""
    with pytest.raises(UsageError, match="--force-insecure"):
        BrokerSettings(bind, Path("s"), OPEN)
    BrokerSettings(bind, Path("s"), KeySettings(insecure=True, force=True))
    BrokerSettings(bind, Path("s"), KEYS)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:7700", "tcp://localhost:7700", "tcp://[::1]:7700"])
def test_an_open_broker_on_loopback_is_fine(bind: str) -> None:
    """Control of the one above: it is the address that is refused, not --insecure."""
    assert BrokerSettings(bind, Path("s"), OPEN).bind == bind


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("model", "", "--model"),
        ("device", "gpu", "--device"),
        ("device", "cuda:", "--device"),
        ("device_pages_gib", 0, "--device-pages-gib"),
        ("device_pages_gib", 1.5, "--device-pages-gib"),
        ("host_pool_gib", 0.0, "--host-pool-gib"),
        ("concurrency", 0, "--concurrency"),
        ("context_tokens", 1, "--context-tokens"),
        ("fit", "maybe", "--fit"),
        ("residency", "half", "--residency"),
        ("page_tokens", 0, "--page-tokens"),
        ("chunk_tokens", 0, "--chunk-tokens"),
        ("threads", -1, "--threads"),
        ("slot_gib", -1.0, "--slot-gib"),
        ("slot_gib", float("inf"), "--slot-gib"),
        ("host_pool_gib", float("inf"), "--host-pool-gib"),
        ("host_pool_gib", float("nan"), "--host-pool-gib"),
        ("device_pages_gib", 10**12, "--device-pages-gib"),
        ("dtype", "float8", "--dtype"),
        ("headroom_gib", "some", "--headroom-gib"),
        ("headroom_gib", "-1", "--headroom-gib"),
        ("headroom_gib", "1.5", "--headroom-gib"),
        ("headroom_gib", "00", "--headroom-gib"),
        ("headroom_gib", "07", "--headroom-gib"),
        ("headroom_gib", "\u0661", "--headroom-gib"),
        ("headroom_gib", "1048577", "--headroom-gib"),
        ("headroom_gib", "9" * 5000, "--headroom-gib"),
        ("device", "cuda:\u0661", "--device"),
        ("concurrency", 10**30, "--concurrency"),
        ("context_tokens", 10**30, "--context-tokens"),
        ("page_tokens", 10**30, "--page-tokens"),
        ("chunk_tokens", 10**30, "--chunk-tokens"),
        ("target_pages", 10**30, "--target-pages"),
        ("burst_pages", 10**30, "--burst-pages"),
        ("shared_histories", 10**30, "--shared-histories"),
        ("headroom_reserve_gib", -1.0, "--headroom-reserve-gib"),
        ("headroom_reserve_gib", float("nan"), "--headroom-reserve-gib"),
    ],
)
def test_each_engine_setting_names_its_flag(field: str, value: Any, flag: str) -> None:
    """A wrong number ends the start with the one thing to change."""
    with pytest.raises(UsageError, match=flag):
        dataclasses.replace(ENGINE, **{field: value})


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: ClientSettings((), KEYS), "--broker"),
        (lambda: ClientSettings(("tcp://a:1",), KEYS, 0), "--timeout"),
        (lambda: BrokerSettings("nowhere", Path("s"), KEYS), "--bind"),
        (lambda: BrokerSettings("tcp://a:1", Path("s"), KEYS, disk_reserve_gib=-1), "--disk-reserve-gib"),
        (lambda: BrokerSettings("tcp://a:1", Path("s"), KEYS, disk_reserve_gib=float("inf")), "--disk-reserve-gib"),
        (lambda: BrokerSettings("tcp://a:1", Path("s"), KEYS, metrics_port=70000), "--metrics-port"),
        (lambda: BrokerSettings("tcp://a:1", Path("s"), KEYS, grace_s=-1), "--grace"),
        (lambda: WorkerSettings((), Path("s"), KEYS, ENGINE), "--broker"),
        (lambda: WorkerSettings(("tcp://a:1",), Path("s"), KEYS, ENGINE, ring_mib=0), "--ring-mib"),
        (lambda: WorkerSettings(("tcp://a:1",), Path("s"), KEYS, ENGINE, ring_mib=2**40), "--ring-mib"),
    ],
)
def test_each_process_setting_names_its_flag(make: Any, flag: str) -> None:
    """The same for client, broker and worker."""
    with pytest.raises(UsageError, match=flag):
        make()


@pytest.mark.parametrize("address", ["0.0.0.0:80", "localhost.example:80", "127.example:80", "[::]:80"])
def test_http_without_keys_is_for_this_machine(address: str) -> None:
    """S5: the same addresses count as this machine's for both doors; with keys any may be served."""
    with pytest.raises(UsageError, match="--http-keys"):
        HttpSettings(address)
    assert HttpSettings(address, Path("keys")).address == address


@pytest.mark.parametrize("address", ["127.0.0.1:80", "127.1.2.3:0", "localhost:80", "[::1]:80"])
def test_http_needs_no_keys_on_loopback(address: str) -> None:
    """Control of the one above."""
    assert HttpSettings(address).address == address


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tensor_parallel": 0}, "--tensor-parallel 0 must be 1"),
        ({"tensor_parallel": limits.RANKS_MAX_COUNT + 1}, "--tensor-parallel 65 must be 1"),
        ({"tensor_parallel": 2, "draft_tokens": 4}, "--tensor-parallel 2 does not go with --draft-tokens 4"),
        ({"tensor_parallel": 2, "headroom_gib": "auto"}, "--tensor-parallel 2 does not go with --headroom-gib auto"),
        ({"tensor_parallel": 2, "graphs": "on"}, "--tensor-parallel 2 replays no graphs: set --graphs"),
    ],
)
def test_what_ranks_cannot_do_alike_is_refused(more: dict[str, Any], words: str) -> None:
    """By name, with both settings; each of them alone is fine."""
    with pytest.raises(UsageError, match=words):
        EngineSettings("m", **more)
    for name, value in more.items():
        if name != "tensor_parallel":
            EngineSettings("m", **{name: value})
    engine = EngineSettings("m", tensor_parallel=2)
    with pytest.raises(UsageError, match="--echo has none"):
        WorkerSettings(("tcp://a:1",), Path("s"), OPEN, engine, echo=True)
    WorkerSettings(("tcp://a:1",), Path("s"), OPEN, engine)
