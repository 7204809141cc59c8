"""The bench on the CPU: its figures agree with each other and its gate compares something."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.errors import UsageError
from worker.engine.bench import TAIL_STEPS, WARM_STEPS, BenchSettings, bench, retained_pages
from worker.engine.bench_series import series


@pytest.mark.parametrize("fill", ["prefill", "random"])
def test_figures_follow_from_what_was_measured(fill: str) -> None:
    """In life: a small shape on a CPU; histories computed, or made up and said to be."""
    found = bench(BenchSettings("tiny", contexts=2, length=40, steps=3, fill=fill, page_tokens=16, chunk_tokens=32))
    assert found["bitwise"] is True
    assert found["resident_repeats"] is True
    assert found["bitwise_steps"] >= WARM_STEPS + 3 + TAIL_STEPS - 1
    assert found["fill"] == fill
    assert (found["prefill_tokens_s"] is None) == (fill == "random")
    assert found["of_floor"] == pytest.approx(found["tokens_s"] / found["floor_tokens_s"], abs=1e-4)
    assert found["tokens_s"] == pytest.approx(2000 / found["ms_step"], rel=0.01)
    assert found["peak_gb"] is None


@pytest.mark.parametrize("wrong", [{"contexts": 0}, {"length": 1}, {"fill": "zeros"}, {"geometry": "d17"}])
def test_a_wrong_question_is_refused(wrong: dict[str, object]) -> None:
    """In life: a flag that cannot work."""
    with pytest.raises(UsageError):
        bench(BenchSettings(**({"geometry": "tiny", "length": 8} | wrong)))  # type: ignore[arg-type]


@pytest.mark.parametrize("retained", [0.5, 1.0])
def test_what_is_retained_is_found_and_not_staged(retained: float) -> None:
    """H3, in life: the same decode with half and with all of its history in device pages; the bits stay."""
    settings = BenchSettings("tiny", contexts=2, length=64, steps=3, fill="random", page_tokens=8, retained=retained)
    found = bench(settings)
    assert found["bitwise"] is True
    assert found["hit_gb_step"] > 0
    assert (found["staged_gb_step"] == 0) == (retained == 1.0)
    assert found["predicted_ms_step"] > 0


@pytest.mark.parametrize(("length", "retained"), [(20, 0.2), (64, 0.1), (300, 0.03), (7, 0.9)])
def test_a_share_too_small_for_the_floors_says_what_would_do(length: int, retained: float) -> None:
    """A2, in life: a quick look at --retained with short histories: refused with a share and a length that are enough.
    Control: both are."""
    asked = BenchSettings("tiny", contexts=3, length=length, fill="random", page_tokens=32, retained=retained)
    with pytest.raises(UsageError, match="each needs") as refusal:
        bench(asked)
    share, longer = re.findall(r"--(?:retained|length) to ([\d.]+)", str(refusal.value))
    assert retained_pages(replace(asked, retained=float(share))) >= 3
    assert retained_pages(replace(asked, length=int(longer))) >= 3 * 2


@pytest.mark.parametrize(("pages_gib", "enough"), [(3, False), (6, True)])
def test_device_pages_that_do_not_hold_what_is_to_be_retained_are_refused(
    monkeypatch: pytest.MonkeyPatch, pages_gib: int, enough: bool
) -> None:
    """In life: --retained with a small --device-pages-gib. Here a GiB is a MiB: two are the slots', one more holds 4
    of 16 pages. Control: four more hold them all."""
    for module in ("bench", "fit"):
        monkeypatch.setattr(f"worker.engine.{module}.GIB", 1 << 20)
    asked = BenchSettings("tiny", 2, 2000, 2, fill="random", bits=False, retained=1.0, device_pages_gib=pages_gib)
    if enough:
        assert bench(asked)["hit_gb_step"] > 0
        return
    with pytest.raises(UsageError, match="--device-pages-gib holds 4 of 16"):
        bench(asked)


def test_h1_and_h2_are_measured_alone_and_together() -> None:
    """H3, in life: four series of the same decode: nothing kept, H1, H2, both. Bytes of each are never the other's,
    what is not kept comes over the link, and every series has the reference's bits."""
    settings = BenchSettings(
        "tiny", contexts=2, length=512, steps=2, fill="random", page_tokens=8, retained=0.5, headroom_gib="1",
        headroom_reserve_gib=0.0,
    )  # fmt: skip
    rows = {row["series"]: row for row in series(settings)}
    assert list(rows) == ["streamed", "H1", "H2", "H1+H2"]
    assert all(row["bitwise"] and row["resident_repeats"] for row in rows.values())
    kept = {name: (row["hit_gb_step"] > 0, row["headroom_gb_step"] > 0) for name, row in rows.items()}
    assert kept == {"streamed": (False, False), "H1": (True, False), "H2": (False, True), "H1+H2": (True, True)}
    assert rows["streamed"]["staged_gb_step"] > rows["H1"]["staged_gb_step"] > rows["H1+H2"]["staged_gb_step"]


@pytest.mark.parametrize("wrong", [{"retained": 0.0}, {"headroom_gib": "0"}])
def test_a_series_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    """In life: --series without both settings to compare."""
    asked = BenchSettings(**({"geometry": "tiny", "length": 8, "retained": 0.5, "headroom_gib": "1"} | wrong))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--series"):
        list(series(asked))


def test_a_pass_over_wrong_drafts_gives_one_token_and_its_bits() -> None:
    """--draft-tokens in the bench: as many rows as asked, none taken, bits of the reference."""
    found = bench(BenchSettings("tiny", contexts=2, length=40, steps=3, page_tokens=8, draft_tokens=3))
    assert (found["draft_tokens"], found["steps"], found["bitwise"]) == (3, 3, True)
