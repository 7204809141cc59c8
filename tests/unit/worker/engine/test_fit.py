"""A5, A6, A7: the arithmetic of what fits, and the setting that a refusal names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import GIB, EngineSettings
from common.errors import RefusedError
from worker.engine.fit import fit, never_fits, rounded_up
from worker.engine.geometry import Geometry

D16 = Geometry("llama", 16, 24, 4, 256, 2, 153_600, 262_144)


def settings(**changes: object) -> EngineSettings:
    """Four requests of 31,744 tokens and 256 new ones."""
    fields = {"model": "d16", "host_pool_gib": 8.0, "concurrency": 4, "context_tokens": 32_000, "device_pages_gib": 1}
    return EngineSettings(**(fields | changes))  # type: ignore[arg-type]


def test_the_published_workload_fits_as_its_arithmetic_says() -> None:
    """In life: D16, 64 KiB a token, four histories of 32,000 rows, two slots within one GiB."""
    found = fit(D16, settings())
    assert D16.token_bytes == 64 * 1024
    assert found.concurrency == 4
    assert found.slot_rows == 4 * 32_000
    assert 2 * found.slot_bytes <= GIB
    assert any("65536" in line for line in found.formula)
    assert any("min(4, 4 on the host" in line for line in found.formula)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host_pool_gib": 7.0}, "--host-pool-gib"),
        ({"concurrency": 5, "host_pool_gib": 10.0}, "--device-pages-gib"),
        ({"slot_gib": 0.05}, "--slot-gib"),
        ({"slot_gib": 0.6, "concurrency": 5, "host_pool_gib": 10.0}, "--device-pages-gib"),
        ({"residency": "full"}, "--residency full"),
    ],
)
def test_refuse_mode_names_the_setting(changes: dict[str, object], named: str) -> None:
    """A6, in life: one pool is too small; the operator is told which flag and how much."""
    with pytest.raises(RefusedError, match=named):
        fit(D16, settings(**changes))


@pytest.mark.parametrize(
    ("changes", "concurrency"),
    [({"host_pool_gib": 7.0}, 3), ({"concurrency": 9, "host_pool_gib": 64.0}, 4)],
)
def test_shrink_mode_lowers_concurrency(changes: dict[str, object], concurrency: int) -> None:
    """A6, in life: the same, and the serving layer queues the rest."""
    assert fit(D16, settings(fit="shrink", **changes)).concurrency == concurrency


def test_shrink_mode_refuses_what_holds_not_one() -> None:
    """In life: shrinking to nothing is no service."""
    with pytest.raises(RefusedError, match="--host-pool-gib"):
        fit(D16, settings(fit="shrink", host_pool_gib=1.0))


def test_many_questions_on_one_document_fit_where_its_history_fits() -> None:
    """In life: 128 questions of 320 tokens, answer included, on a document of 131,072: a host pool of 1.3 histories and
    two GiB of device pages; as histories of their own they would need a terabyte."""
    wanted = {"context_tokens": 131_392, "page_tokens": 64, "concurrency": 128, "device_pages_gib": 2}
    found = fit(D16, settings(own_tokens=320, host_pool_gib=10.6, **wanted))
    assert (found.concurrency, found.longs, found.own_rows, found.segments) == (128, 1, 320, 129)
    assert found.rows == found.slot_rows == 131_392 + 128 * 320
    assert found.host_bytes / (131_392 * D16.token_bytes) < 1.32
    assert (found.segment_first(0), found.segment_first(127)) == (0, 127 * 320)
    assert (found.segment_first(128), found.segment_first(129)) == (128 * 320, found.rows)
    assert any("whole histories, shared or of one request alone" in line and "= 1" in line for line in found.formula)
    with pytest.raises(RefusedError, match=r"--host-pool-gib 10\.6 holds 1 histories"):
        fit(D16, settings(host_pool_gib=10.6, **wanted))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host_pool_gib": 3.0}, "--own-tokens, --shared-histories, --concurrency or --context-tokens"),
        ({"concurrency": 300, "host_pool_gib": 64.0}, "--device-pages-gib 1 holds two staging slots of 32000 rows and"),
        ({"shared_histories": 3, "host_pool_gib": 64.0, "concurrency": 80}, "--slot-gib"),
        ({"residency": "full"}, "--residency full"),
    ],
)
def test_two_kinds_of_segments_refuse_and_shrink_by_name(changes: dict[str, object], named: str) -> None:
    """A6, in life: --own-tokens, and one pool is too small for what stands beside: which flag, and how many fit."""
    wanted = {"own_tokens": 512, "concurrency": 64, "host_pool_gib": 4.0} | changes
    with pytest.raises(RefusedError, match=named):
        fit(D16, settings(**wanted))
    if changes.get("residency") != "full":
        found = fit(D16, settings(fit="shrink", **wanted))
        assert 1 <= found.concurrency < int(str(wanted["concurrency"]))
        assert found.host_bytes <= float(str(wanted["host_pool_gib"])) * GIB
        assert 2 * found.slot_bytes <= GIB


@pytest.mark.parametrize(
    ("pool", "asked", "longs"), [(8.0, -1, 0), (12.0, -1, 2), (40.0, -1, 4), (12.0, 0, 0), (12.0, 1, 1)]
)
def test_shared_histories_are_what_the_pool_holds_beyond(pool: float, asked: int, longs: int) -> None:
    """In life: four requests, and a host pool of just their histories, of two more, of any number; or as asked for."""
    found = fit(D16, settings(host_pool_gib=pool, shared_histories=asked))
    assert (found.concurrency, found.longs) == (4, longs)
    assert found.slot_rows == 4 * 32_000, "sharing needs no more rows of a slot"
    assert found.host_bytes == (4 + longs) * 32_000 * D16.token_bytes
    assert any(
        f"shared histories held at once = {'' if asked < 0 else 'as asked for = '}" in line for line in found.formula
    )
    if asked == 1:
        with pytest.raises(RefusedError, match="--shared-histories, --concurrency"):
            fit(D16, settings(host_pool_gib=pool, shared_histories=3))


@given(
    layers=st.integers(1, 64),
    heads=st.sampled_from([1, 2, 8]),
    dim=st.sampled_from([64, 128, 256]),
    host=st.floats(0.01, 64),
    pages=st.integers(1, 16),
    concurrency=st.integers(1, 64),
    context=st.integers(2, 100_000),
    page=st.sampled_from([1, 16, 256]),
    residency=st.sampled_from(["staged", "full"]),
    own=st.integers(0, 5_000),
    shared=st.integers(-1, 3),
)
def test_what_fits_really_fits(
    layers: int,
    heads: int,
    dim: int,
    host: float,
    pages: int,
    concurrency: int,
    context: int,
    page: int,
    residency: str,
    own: int,
    shared: int,
) -> None:
    """Whatever is asked for: the pools that follow are within what was given, or it is refused."""
    geometry = Geometry("llama", layers, heads, heads, dim, 2, 1000, 10**6)
    wanted = EngineSettings(
        model="x",
        host_pool_gib=host,
        device_pages_gib=pages,
        concurrency=concurrency,
        context_tokens=context,
        page_tokens=page,
        residency=residency,
        fit="shrink",
        own_tokens=min(own, context) if shared else 0,
        shared_histories=shared,
    )
    try:
        found = fit(geometry, wanted)
    except RefusedError as error:
        assert "--" in str(error)  # noqa: PT017 - a refusal is one of two good outcomes
        return
    assert 1 <= found.concurrency <= concurrency
    assert found.context_rows >= context
    assert found.context_rows % page == 0
    assert found.host_bytes <= host * GIB
    held = 2 * found.slot_rows if residency == "staged" else layers * found.rows
    assert found.host_bytes in (0, found.rows * geometry.token_bytes)
    assert found.segment_first(found.segments) == found.rows
    assert found.longs == shared or shared < 0
    assert held <= found.arena_rows
    if residency == "staged":
        assert found.slot_rows == found.useful_rows, "without --slot-gib a slot has room for all that a step needs"
    assert (found.arena_rows - 1) * geometry.layer_token_bytes <= pages * GIB
    assert found.sink_row not in range(found.slot_first(2)), "padding writes a row of a slot"
    assert not found.pages or found.sink_row >= found.layer_first(geometry.layers), "padding writes a row of a page"


def test_short_segments_make_less_history_of_use() -> None:
    """In life: four questions of 4,000 tokens on one document of 32,000: what headroom and pages may be taken for."""
    assert fit(D16, settings(own_tokens=4_000, shared_histories=1)).useful_rows == 4 * 4_096 + 32_000
    assert fit(D16, settings(shared_histories=1, host_pool_gib=10.0)).useful_rows == 4 * 32_000


def test_what_never_fits_says_its_numbers() -> None:
    """A7, in life: one token too many."""
    assert never_fits(90, 10, 100) is None
    assert "90 + max_tokens 11 = 101" in (never_fits(90, 11, 100) or "")
    assert never_fits(0, 5, 100)
    assert never_fits(5, -1, 100)
    assert rounded_up(1, 4) == 4
    assert rounded_up(8, 4) == 8
