"""History in headroom, through the whole engine: bits of the reference under every schedule while chunks come and go,
bytes told apart, pressure answered; and controls: a page of the wrong chunk, no copy, no order, no cooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.config import GIB, EngineSettings
from common.errors import RefusedError
from tests.unit.worker.engine import rigs
from tests.unit.worker.engine.test_fit import D16
from tests.unit.worker.engine.test_retention import BASE, PAGE, model, reference
from tests.unit.worker.engine.test_turns import SLOW_LINK, TOKEN, InTurn, Replay, decoders, decoding, taking_turns
from tests.unit.worker.engine.test_turns import run as taken
from worker.engine.cells import Prepare, cell, play_cell, revoking, with_headroom
from worker.engine.device import RaceError
from worker.engine.fit import fit
from worker.engine.headroom import Cause
from worker.engine.headroom_memory import HeadroomMemory, warm_headroom
from worker.engine.lanes import Temperament
from worker.engine.local import LocalEngine
from worker.engine.routes import StagedRoute
from worker.engine.transport import Edge
from worker.engine.turns import Turns
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling, SharedPrefix

LONG = ("4 equal", "long")


def staged_route(local: LocalEngine) -> StagedRoute:
    """The route of an engine that stages."""
    assert isinstance(local.engine.route, StagedRoute)
    return local.engine.route


@pytest.mark.parametrize("route", ["headroom", "H1+H2"])
def test_a_cell_really_gives_chunks_back_while_they_are_read(route: str) -> None:
    """What the table of cells stands for: pages were dropped and moved, chunks closed and taken again, all while the
    bits stayed; H1 and H2 each served bytes, or H2 alone."""
    outcome = play_cell(model(), BASE, route, *LONG, rested=rigs.at_rest)
    moved = outcome.local.engine.headroom.books.moved
    for cause in (Cause.KEPT, Cause.REVOKED, Cause.OPENED, Cause.CLOSED):
        assert moved[cause] > 0, cause
    assert moved[Cause.SHIFTED] > 0 or route != "headroom"
    found = cell(route, *LONG, PAGE, outcome, reference(*LONG))
    assert (found.equal, found.taken) == (found.steps, True)
    assert found.headroom_bytes > 0
    assert (found.hit_bytes > 0) == (route == "H1+H2")


@pytest.mark.parametrize("seed", [2, 3])
def test_bits_stay_under_any_schedule_while_headroom_is_revoked(seed: int) -> None:
    """H4 with H2, in life: contexts join, finish and are cancelled; chunks leave under them. (Other schedules are in
    ``test_cells_have_the_bits_of_the_reference``.)"""
    where = ("8 mixed with churn", "long")
    outcome = play_cell(model(Temperament.RANDOM, seed), BASE, "headroom", *where, rested=rigs.at_rest)
    assert rigs.same(outcome, reference(*where))
    assert outcome.answers == reference(*where).answers


# -- controls -----------------------------------------------------------------------------------------------------


def _wrong_chunk(local: LocalEngine) -> None:
    """For one step pages are read from another chunk."""
    route = staged_route(local)
    original = route._borrow

    def borrow(packed: Any, layer: int, slot: int, pages: int) -> Any:
        memory = route.headroom
        assert memory is not None
        if packed.step != 6:
            return original(packed, layer, slot, pages)
        other = _Shuffled(memory)
        route.headroom = other  # type: ignore[assignment]
        try:
            return original(packed, layer, slot, pages)
        finally:
            route.headroom = memory

    route._borrow = borrow  # type: ignore[method-assign]


class _Shuffled:
    """Every chunk is another one."""

    def __init__(self, memory: HeadroomMemory) -> None:
        self._memory = memory

    def rows(self, chunk: int, layer: int) -> Any:
        there = sorted(self._memory._chunks)
        return self._memory.rows(there[(there.index(chunk) + 1) % len(there)], layer)


def _wrong_layer(local: LocalEngine) -> None:
    """Pages of layer 0 for every layer."""
    memory = local.engine.headroom
    original = memory.rows
    route = staged_route(local)
    borrow = route._borrow

    def wrong(packed: Any, layer: int, slot: int, pages: int) -> Any:
        memory.rows = lambda chunk, _: original(chunk, 0)  # type: ignore[method-assign]
        try:
            return borrow(packed, layer, slot, pages)
        finally:
            memory.rows = original  # type: ignore[method-assign]

    route._borrow = wrong  # type: ignore[method-assign]


def _never_lent(local: LocalEngine) -> None:
    """Pages of one step count as kept and never are."""
    route = staged_route(local)
    original = route._lend
    route._lend = lambda packed, layer, where: (  # type: ignore[method-assign]
        [] if packed.step == 3 else original(packed, layer, where)
    )


def _never_shifted(local: LocalEngine) -> None:
    """Pages that leave a chunk do not arrive in the other one."""
    route = staged_route(local)
    original = route._lend
    route._lend = lambda packed, layer, where: original(  # type: ignore[method-assign]
        replace(packed, plan=replace(packed.plan, shifts=())), layer, where
    )


@pytest.mark.parametrize("fault", [None, _wrong_chunk, _wrong_layer, _never_lent, _never_shifted])
def test_the_gate_turns_red_on_headroom(fault: Callable[[LocalEngine], None] | None) -> None:
    """A page of the wrong chunk, of another layer, never kept, never moved: each changes bits; without a fault none."""
    outcome = play_cell(model(), BASE, "headroom", *LONG, fault or (lambda local: None), rigs.at_rest)
    assert rigs.same(outcome, reference(*LONG)) == (fault is None)


def _without(edge: Edge) -> Prepare:
    def prepare(local: LocalEngine) -> None:
        local.engine.transport._omit = frozenset({edge})

    return prepare


@pytest.mark.parametrize(
    ("edge", "temperament"),
    [(Edge.MATERIALISE_BEFORE_ATTENTION, Temperament.LATE), (Edge.ATTENTION_BEFORE_MATERIALISE, Temperament.EARLY)],
)
def test_a_missing_edge_around_headroom_is_found(edge: Edge, temperament: Temperament) -> None:
    """Q1, in life: borrowed pages not waited for; pages borrowed before they were lent. The race is named."""
    layers = 1 if edge is Edge.ATTENTION_BEFORE_MATERIALISE else 3
    with pytest.raises(RaceError):
        play_cell(rigs.model(temperament, num_hidden_layers=layers), BASE, "headroom", *LONG, _without(edge))


def _hasty(local: LocalEngine) -> None:
    """Closed chunks count as cold at once; a step that was planned with one still has its address."""
    memory = local.engine.headroom
    books, tend = memory.books, memory.tend

    def tended(step: int, *, idle: bool) -> int:
        there = dict(memory._chunks)
        held = tend(step, idle=idle)
        memory._chunks = there | memory._chunks
        return held

    memory.tend = tended  # type: ignore[method-assign]
    original = books.cold

    def cold(step: int) -> list[int]:
        books._landed, landed = 10**9, books._landed
        try:
            return original(step)
        finally:
            books._landed = landed

    books.cold = cold  # type: ignore[method-assign]


def test_a_chunk_given_back_while_it_is_read_is_a_race() -> None:
    """The control of cooling: without it a chunk goes to the device under a step that reads it; named by the clocks."""
    with pytest.raises(RaceError, match="chunk given back"):
        play_cell(model(Temperament.LATE), BASE, "headroom", *LONG, _hasty)


def test_a_chunk_given_back_while_it_is_read_corrupts() -> None:
    """The same without clocks: the bytes are really others."""
    device = VirtualDevice(Temperament.LATE, 1, check_clocks=False)
    outcome = play_cell(replace(model(), device=device), BASE, "headroom", *LONG, _hasty)
    assert not rigs.same(outcome, reference(*LONG))
    device = VirtualDevice(Temperament.LATE, 1, check_clocks=False)
    assert rigs.same(play_cell(replace(model(), device=device), BASE, "headroom", *LONG), reference(*LONG))


# -- turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperament", [Temperament.LATE, Temperament.RANDOM])
@pytest.mark.parametrize("pages", [0, 28])
def test_parked_contexts_keep_headroom_until_somebody_wants_it(temperament: Temperament, pages: int) -> None:
    """H6 with H2, alone and beside pages for two histories, in life: contexts take turns; who is parked keeps its pages
    or loses all to who runs; a run is filled from headroom; the reference that replays the schedule has the bits."""

    def prepare(local: LocalEngine) -> None:
        turns = InTurn(4, 7)
        if pages:
            taking_turns(pages, turns)(local)
        engine = local.engine
        chunk_bytes = 3 * PAGE * TOKEN
        memory = HeadroomMemory(engine.device, engine.loaded.geometry, PAGE, engine.loaded.dtype, chunk_bytes, most=5)
        memory.fill()
        engine.use(memory)
        engine.turns = engine.scheduler.turns = turns  # type: ignore[assignment]

    outcome, plans = taken(prepare, temperament, retain="on" if pages else "off")
    assert {one.reason for one in outcome.finished.values()} == {"length"}
    engine = outcome.local.engine
    moved = engine.headroom.books.moved
    assert engine.headroom_bytes > 0
    assert moved[Cause.IDLE] > 0
    assert (moved[Cause.IN_PLACE] > 0) == (pages > 0)
    assert turns_bytes(outcome) == 5 * 3 * PAGE * TOKEN

    def replay(local: LocalEngine) -> None:
        local.engine.scheduler.turns = Replay(decoders(plans))

    same, _ = taken(replay, Temperament.EAGER, residency="full")
    assert rigs.same(outcome, same)


def turns_bytes(outcome: rigs.Outcome) -> int:
    """Of headroom, as the planner of turns was told."""
    return outcome.local.engine.turns.headroom_bytes


def test_a_plan_counts_headroom_as_room_for_history() -> None:
    """H6, in life: pages hold one of two histories, headroom the other: nobody has to wait for a turn."""
    turns = Turns(SLOW_LINK, 50 * TOKEN, TOKEN)
    assert turns.decide(0, decoding(40, 40)) is not None
    turns.headroom_bytes = 30 * TOKEN
    assert turns.decide(1, decoding(40, 40)) is None


# -- in life ------------------------------------------------------------------------------------------------------


def pressed(spare: int, most: int, reserve: int) -> Callable[[LocalEngine], None]:
    """Headroom of chunks of two pages on a device with so many bytes to spare; looked at each step."""

    def prepare(local: LocalEngine) -> None:
        engine = local.engine
        assert isinstance(engine.device, VirtualDevice)
        engine.device.spare_bytes = spare
        memory = HeadroomMemory(
            engine.device, engine.loaded.geometry, PAGE, engine.loaded.dtype, 2 * PAGE * TOKEN, most=most,
            reserve_bytes=reserve,
        )  # fmt: skip
        memory.fill()
        engine.use(memory)
        engine.scheduler.turns = None

    return prepare


def test_pressure_is_answered_at_step_boundaries_and_does_not_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    """In life: another process takes the device's memory while requests run, and ends: chunks go back a step later and
    return one by one; the bits stay."""
    monkeypatch.setattr("common.limits.HEADROOM_LOOK_STEPS_COUNT", 1)
    monkeypatch.setattr("common.limits.HEADROOM_QUIET_LOOKS_COUNT", 3)
    chunk = 2 * PAGE * TOKEN
    script = rigs.together(40, 37, tokens=8)
    seen: list[tuple[int, int]] = []
    outcome_of = rigs.run(model(), script, residency="full")
    local_of: list[LocalEngine] = []

    def prepare(local: LocalEngine) -> None:
        pressed(6 * chunk, 4, chunk)(local)
        local_of.append(local)
        device, original = local.engine.device, local.engine.headroom.tend
        assert isinstance(device, VirtualDevice)

        def tend(step: int, *, idle: bool) -> int:
            if step == 8:
                device.spare_bytes -= 4 * chunk  # type: ignore[operator]
            if step == 12:
                device.spare_bytes += 4 * chunk  # type: ignore[operator]
            held = original(step, idle=idle)
            seen.append((step, held // chunk))
            return held

        local.engine.headroom.tend = tend  # type: ignore[method-assign]

    outcome = rigs.run(model(), script, prepare)
    assert rigs.same(outcome, outcome_of)
    counts = [held for _, held in seen]
    assert counts[0] == 4
    assert min(counts) == 1, seen
    low = counts.index(1)
    assert counts[:low] == [4] * low
    assert counts[low:] == sorted(counts[low:]), "it comes back one by one and goes no second time"
    assert counts[-1] > 1
    assert local_of[0].engine.device.spare_bytes == 6 * chunk, "all is the device's again"  # type: ignore[attr-defined]


@pytest.mark.parametrize("told", [True, False])
def test_an_idle_engine_gives_a_revoked_chunk_back(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """In life: two documents stay cached, nobody asks anything, another process wants the memory. The control: a look
    that does not know that the engine idles waits for a step that never comes."""
    local = LocalEngine(rigs.model(), rigs.settings(shared_histories=2, concurrency=2))
    engine = local.engine
    chunk_bytes = 3 * PAGE * engine.loaded.geometry.token_bytes
    memory = HeadroomMemory(engine.device, engine.loaded.geometry, PAGE, engine.loaded.dtype, chunk_bytes, most=2)
    memory.fill()
    engine.use(memory)
    prompts = [[*rigs.prompt(8, 9), 3, 4], [*rigs.prompt(4, 10), 5, 6]]
    local.submit(prompts, [Sampling(3)] * 2, [SharedPrefix("d", 8), SharedPrefix("e", 4)])
    local.run()
    assert engine.scheduler.idle
    assert memory.books.held == 3, "of both documents"
    if not told:
        tend = memory.tend
        monkeypatch.setattr(memory, "tend", lambda step, *, idle: tend(step, idle=False))
    memory.revoke(1)
    for _ in range(4):
        local.step()
    assert (memory.books.closing, len(memory._chunks)) == ((0, 1) if told else (1, 2))
    assert memory.books.held == (2 if told else 3)
    engine.check()
    assert local.close().proved


def test_a_story_tells_where_the_history_came_from() -> None:
    """H3, in life: what a user reads in explain; the sums over contexts are the engine's own counters."""
    outcome = play_cell(model(), BASE, "H1+H2", *LONG, rested=rigs.at_rest)
    notes = [one.notes for one in outcome.finished.values()]
    assert all("history: " in note and " MiB from headroom" in note for note in notes)
    assert any(Cause.KEPT.value in note for note in notes)
    figures = outcome.local.engine.figures()
    assert figures.headroom_hit_bytes == outcome.local.engine.headroom_bytes > 0
    assert dict(figures.headroom_moved)[Cause.KEPT.value] > 0
    assert figures.headroom_held_bytes == 0


@pytest.mark.parametrize("route", ["streamed", "retained", "retained in part", "headroom", "H1+H2"])
def test_rows_of_contexts_add_up_to_the_engines_bytes(route: str) -> None:
    """H3: link, pages and headroom, each counted a context and a step, agree; none is counted as another."""
    served: list[Any] = []

    def prepare(local: LocalEngine) -> None:
        original = local.engine.scheduler.offer

        def offer(*arguments: Any) -> Any:
            context = original(*arguments)
            served.append(context.served)
            return context

        local.engine.scheduler.offer = offer  # type: ignore[method-assign]

    engine = play_cell(model(), BASE, route, *LONG, prepare, rigs.at_rest).local.engine
    assert sum(one.link_rows for one in served) * TOKEN == engine.transport.bytes_in
    assert sum(one.page_rows for one in served) * TOKEN == engine.hit_bytes
    assert sum(one.headroom_rows for one in served) * TOKEN == engine.headroom_bytes


def test_settings_take_headroom_after_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    """In life: ``--retain off --headroom-gib 1``: H2 alone; its arithmetic is logged, the bits are the reference's."""
    script = rigs.together(21, 30)
    outcome = rigs.run(model(), script, headroom_gib="1", headroom_reserve_gib=0.0)
    engine = outcome.local.engine
    assert (engine.hit_bytes, engine.headroom_bytes > 0, engine.headroom.most) == (0, True, 1)
    assert rigs.same(outcome, rigs.run(model(), script, residency="full"))


def test_headroom_is_for_what_requests_can_read() -> None:
    """In life: ``--own-tokens``: short parts and one document are 3 GiB of history, whole histories would be 8."""
    device = VirtualDevice()
    device.spare_bytes = 100 * GIB
    wanted = EngineSettings("d16", host_pool_gib=10.0, concurrency=4, context_tokens=32_000, headroom_gib="auto")
    for changes, chunks in ({"own_tokens": 4_000, "shared_histories": 1}, 3), ({}, 8):
        settings = replace(wanted, **changes)  # type: ignore[arg-type]
        assert warm_headroom(device, D16, fit(D16, settings), settings, torch.bfloat16).most == chunks


def test_headroom_that_is_not_free_is_refused_by_name() -> None:
    """A6, in life: more than the machine has."""
    with pytest.raises(RefusedError, match="--headroom-gib 999999"):
        LocalEngine(rigs.model(), rigs.settings(headroom_gib="999999"))


def test_free_bytes_are_the_machines() -> None:
    """On the CPU: what can be had; for tests, what they say, less the chunks."""
    device = VirtualDevice()
    assert 0 < device.free_bytes() < 2**50
    device.spare_bytes = GIB
    chunk = device.allocate_chunk((4, 4), torch.float32)
    assert device.free_bytes() == GIB - 64
    device.free_chunk(chunk)
    assert device.free_bytes() == GIB


def test_the_hooks_of_the_cells_do_what_they_say() -> None:
    """``with_headroom`` and ``revoking`` are the table's own: chunks there, all of them revoked at last."""
    local = LocalEngine(model(), BASE)
    with_headroom("1 context", PAGE)(local)
    books = local.engine.headroom.books
    assert books.chunks == 2
    revoking(local, 12)
    local.step()
    assert books.chunks == 0
    assert local.close().proved
