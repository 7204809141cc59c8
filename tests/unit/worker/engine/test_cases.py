"""What went wrong in engines that move attention history, as their users reported it, one test for each kind.

Names in brackets are the public reports. Each test says the kind that must not exist here; the edges that prevent it
have their 2,000 seeds in test_edges, the same on a GPU is in tests/gpu.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch

from common.errors import InvariantError, RefusedError
from tests.unit.worker.engine import rigs
from worker.engine import race_checks
from worker.engine.device import QueueName, RaceError, Work
from worker.engine.device_pool import DevicePool
from worker.engine.event_pool import DoubleReleaseError
from worker.engine.fit import fit
from worker.engine.geometry import geometry_of
from worker.engine.host_pool import HostPool
from worker.engine.lanes import Temperament
from worker.engine.leases import ForeignOwnerError
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.page_leases import ContextSet, LeaseBooksError, LeaseError, PageLeases
from worker.engine.segments import SegmentBook
from worker.engine.staged_program import DEEP, EVENTS_COUNT, Program
from worker.engine.transport import Edge, Transport
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling


def comes_out_right(temperament: Temperament, omit: Collection[Edge] = ()) -> bool:
    """Whether the staged program's bytes are right, judged by the bytes alone."""
    device = VirtualDevice(temperament, events=EVENTS_COUNT, check_clocks=False)
    program = Program(device, DEEP, omit)
    try:
        program.run()
        device.drain()
    except RaceError:  # a shadow: attention's inputs changed after it had answered
        return False
    return program.equal()


def test_1_a_row_is_not_stored_before_it_is_computed() -> None:
    """Kind: a device-to-host copy ahead of the kernel that writes its source [vllm 45704]. Compute lags, copies run at
    once: the written row is the computed row; without the edge it is not."""
    assert comes_out_right(Temperament.EARLY)
    assert not comes_out_right(Temperament.EARLY, {Edge.ATTENTION_BEFORE_WRITE_BACK})


def test_2_a_slot_is_not_filled_under_a_running_attention() -> None:
    """Kind: a load into memory that an earlier attention still reads [vllm 47282]. Attention lags, the slot is staged
    anew as early as allowed."""
    assert comes_out_right(Temperament.EARLY)
    assert not comes_out_right(Temperament.EARLY, {Edge.ATTENTION_BEFORE_REUSE, Edge.WRITE_BACK_BEFORE_REUSE})


def test_3_no_reader_of_staged_rows_skips_the_wait() -> None:
    """Kind: one accessor among several forgets to wait [sglang 22811]. Here there is one, and it needs a lease; a layer
    attended without one, or without its wait, is found."""
    assert not comes_out_right(Temperament.LATE, {Edge.COPY_BEFORE_ATTENTION})
    local = LocalEngine(rigs.model(Temperament.LATE), rigs.settings())
    route: Any = local.engine.route
    route.prepare = lambda packed: None
    local.submit([rigs.prompt(9)], [Sampling(2)])
    with pytest.raises(InvariantError, match="attended without a lease"):
        local.run()
    assert not local.finished
    local.close()


@pytest.mark.parametrize("seed", range(3))
def test_4_a_host_segment_is_not_reused_while_its_copy_is_under_way(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Kind: host memory evicted or reused under a copy in flight [sglang 31427]. Contexts finish and are cancelled
    while their copies are held back; others take their segments at once."""
    given: list[bool] = []
    real = SegmentBook.give_back

    def give_back(self: SegmentBook, page: Any) -> None:
        given.append(self._leases.held(page.index))
        real(self, page)

    monkeypatch.setattr(SegmentBook, "give_back", give_back)
    reference = rigs.run(rigs.model(), rigs.CHURN, residency="full", concurrency=2)
    for temperament in (Temperament.LATE, Temperament.RANDOM):
        outcome = rigs.run(rigs.model(temperament, seed), rigs.CHURN, concurrency=2)
        assert rigs.same(outcome, reference)
    assert len(given) >= 3 * 4, "segments changed hands"
    assert not any(given)


def test_4_control_a_segment_given_on_at_once_arrives_with_the_next_owners_rows() -> None:
    """The control: the same copy held back, its page recycled under it without the hold."""
    assert "the next owner's rows arrive without" in race_checks.page_reuse(VirtualDevice)


def test_5_a_step_table_is_not_written_again_under_its_copy() -> None:
    """Kind: an index table copied asynchronously from one reused pinned buffer [TensorRT-LLM 15546]. The host runs
    ahead of a held copy queue: refused; with the books bent, a step carries another step's numbers."""
    assert "refused" in race_checks.table_reuse(VirtualDevice)
    for temperament in (Temperament.LATE, Temperament.RANDOM):
        assert rigs.same(rigs.run(rigs.model(temperament), rigs.CHURN), rigs.run(rigs.model(), rigs.CHURN))


class Tagged:
    """A transport whose every row carries its context's tag; segments change hands as contexts come and go."""

    SEGMENTS, ROWS, WIDTH = 3, 8, 4

    def __init__(self, temperament: Temperament, seed: int) -> None:
        self.device = VirtualDevice(temperament, seed, events=128)
        self.pages = PageLeases(self.SEGMENTS)
        self.book = SegmentBook(self.pages, self.SEGMENTS)
        self.transport = Transport(self.device, 2, self.pages)
        size = (self.SEGMENTS, self.ROWS, self.WIDTH)
        self.host = self.device.allocate_host(size, torch.int64)
        self.slots = self.device.allocate_device((2, *size), torch.int64)
        self.rows: dict[int, int] = {}
        self.owned: dict[int, Any] = {}

    def step(self, number: int) -> None:
        tags = sorted(self.owned, key=lambda tag: self.owned[tag].index)
        contexts = ContextSet(tuple(tags), tuple(self.owned[tag] for tag in tags))
        slot = self.slots[self.transport.next_slot]
        copies = [
            (slot[page.index, : self.rows[tag]], self.host[page.index, : self.rows[tag]], page)
            for tag, page in ((tag, self.owned[tag]) for tag in tags)
            if self.rows[tag]
        ]
        lease = self.transport.stage(number, 0, contexts, copies)
        self.transport.before_attention(lease)
        fresh = [(self.owned[tag].index, self.rows[tag], tag) for tag in tags]
        cells = [slot[index, row] for index, row, _ in fresh]

        def append() -> None:
            for cell, (_, _, tag) in zip(cells, fresh, strict=True):
                cell.fill_(tag)

        self.device.launch(self.device.queue(QueueName.COMPUTE), append, writes=cells)
        attention = self.transport.attended(lease)
        targets = [self.host[index, row] for index, row, _ in fresh]

        def scatter() -> None:
            for target, cell in zip(targets, cells, strict=True):
                target.copy_(cell)

        self.transport.write_back(lease, contexts, number, Work(scatter, cells, targets))
        self.transport.seal(lease, number, attention)
        for tag in tags:
            self.rows[tag] += 1

    def land(self) -> None:
        while self.transport.book.live:
            self.transport.retire(0.0)

    def foreign(self) -> list[tuple[int, int]]:
        """(segment, row) of every row in use that carries another context's tag, on the host and in the last slot."""
        found = []
        for tag, page in self.owned.items():
            wrong = (self.host[page.index, : self.rows[tag]] != tag).any(1)
            found += [(page.index, row) for row in wrong.nonzero().flatten().tolist()]
        return found


@pytest.mark.parametrize("seed", range(4))
def test_6_no_row_of_another_context_is_found_in_a_history(seed: int) -> None:
    """Kind: two offloads into one host block, other prompts' tokens in an answer [TensorRT-LLM 8813]. Every row carries
    its context's tag; contexts come and go, segments change hands, and a scan finds no foreign tag."""
    world = Tagged(Temperament.RANDOM, seed)
    chance = torch.Generator().manual_seed(seed)
    for number in range(1, 60):
        if len(world.owned) < 3 and (page := world.book.take()) is not None:
            world.owned[number], world.rows[number] = page, 0
        world.step(number)
        oldest = min(world.owned)
        if world.rows[oldest] == Tagged.ROWS or int(torch.randint(3, (1,), generator=chance)) == 0:
            world.land()
            assert world.foreign() == []
            world.book.give_back(world.owned.pop(oldest))
        world.book.check()
    world.land()
    assert world.foreign() == []


def test_6_two_contexts_of_a_step_never_share_a_host_page() -> None:
    """The same kind, refused at its root; and rows of a host page that the lease did not begin with."""
    pages = PageLeases(2)
    with pytest.raises(LeaseError, match="one host owner"):
        ContextSet((1, 2), (pages.current(0), pages.current(0)))
    device = VirtualDevice(Temperament.LATE, events=64)
    transport = Transport(device, 2, pages)
    host, slot = device.allocate_host((2, 4), torch.int64), device.allocate_device((4,), torch.int64)
    with pytest.raises(ForeignOwnerError):
        transport.stage(0, 0, ContextSet((1,), (pages.current(0),)), [(slot, host[1], pages.current(1))])


@pytest.mark.parametrize("batch", [1, 2, 8, 64])
def test_7_write_back_holds_at_every_batch_size(batch: int) -> None:
    """Kind: asynchronous write-back that is right for one context and flaky for more [transformers 32179]. Repeated, in
    any order of copies: the bits of everything resident."""
    scenario = rigs.together(*(2 + number % 5 for number in range(batch)), tokens=4)
    how = {"concurrency": batch, "context_tokens": 16, "chunk_tokens": 64}
    reference = rigs.run(rigs.model(), scenario, residency="full", **how)
    for seed in range(2):
        assert rigs.same(rigs.run(rigs.model(Temperament.RANDOM, seed), scenario, **how), reference)


def test_8_a_hybrids_states_are_carried_over() -> None:
    """Kind: a hybrid whose recurrent state is not carried over: prefill identical, the next forward wrong [transformers
    48947]. Every step of two requests, in chunks and decoding, has the bits of everything resident, and each text is
    that of generate alone."""
    scenario = rigs.together(19, 5, tokens=6)

    def hybrid() -> LoadedModel:
        return rigs.model(model_type="qwen3_next", **rigs.HYBRID, **rigs.EXPERTS)

    staged, loaded = rigs.run(hybrid(), scenario), hybrid()
    assert rigs.same(staged, rigs.run(hybrid(), scenario, residency="full"))
    for number, (length, _) in enumerate(scenario.prompts):
        assert list(staged.tokens[number]) == rigs.expected(loaded, rigs.prompt(length, number), 6)


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_8_states_of_another_kind_are_refused_by_name(model_type: str) -> None:
    """The same kind: states that are not ours are refused and never approximated."""
    import transformers

    with pytest.raises(RefusedError, match="uses state-space layers"):
        geometry_of(transformers.AutoConfig.for_model(model_type), 2, 32)


def test_8_steps_after_the_first_are_compared_too() -> None:
    """The same kind on dense models: the gate looks at every step, the second and later ones above all."""
    scenario = rigs.together(9, 5, tokens=6)
    staged, resident = rigs.run(rigs.model(), scenario), rigs.run(rigs.model(), scenario, residency="full")
    assert len(staged.steps) > 5
    assert all(torch.equal(one[1], other[1]) for one, other in zip(staged.steps[2:], resident.steps[2:], strict=True))


@pytest.mark.parametrize("rows", [1, 33, 1_000_003])
def test_9_host_memory_is_what_was_asked_for(rows: int) -> None:
    """Kind: 33 GiB of pinned memory asked for, 64 taken, rounded to a power of two [vllm 48436]. Odd sizes stay odd;
    the pool takes what its formula printed. Measured on a GPU in tests/gpu."""
    device = VirtualDevice()
    assert device.allocate_host((rows,), torch.uint8).untyped_storage().nbytes() == rows
    loaded = rigs.model()
    how = fit(loaded.geometry, rigs.settings(concurrency=3, context_tokens=44))
    assert HostPool(loaded.device, loaded.geometry, how, torch.float32).nbytes == how.host_bytes
    assert DevicePool(loaded.device, loaded.geometry, how, torch.float32).nbytes <= 1 << 30


def test_10_a_full_host_tier_waits_with_a_reason_and_goes_on() -> None:
    """Kind: the host tier is full: a crash [LMCache 1330] or an endless busy wait [LMCache 2942]. More requests than
    segments: they wait, counted, with their reason; each is answered; what cannot ever fit is refused at start."""
    outcome = rigs.run(rigs.model(), rigs.together(*[7] * 9), concurrency=2)
    assert len(outcome.finished) == 9
    waits = outcome.local.engine.scheduler.waits
    assert set(waits) == {"segments"}
    assert waits["segments"] <= len(outcome.steps)
    with pytest.raises(RefusedError, match="--host-pool-gib"):
        LocalEngine(rigs.model(), rigs.settings(host_pool_gib=1e-7))


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("temperament", [Temperament.LATE, Temperament.EARLY])
def test_11_an_abort_at_any_moment_gives_back_everything_once(temperament: Temperament, turn: int) -> None:
    """Kind: a lease or pin never released, or released twice, after an abort [LMCache 1034, 3381]. Cancelled before
    each step in turn, twice over: counts return to zero (``rigs.run`` looks), one answer each."""
    scenario = rigs.Scenario(
        ((9, Sampling(6)), (5, Sampling(6))), {0: (0, 1)}, {turn: (0, 0), turn + 1: (0,)} if turn else {0: (0,)}
    )
    outcome = rigs.run(rigs.model(temperament), scenario)
    assert set(outcome.finished) == {0, 1}
    assert outcome.finished[1].reason == "length"
    assert len(outcome.tokens[1]) == 6


def test_11_what_is_released_twice_is_an_error() -> None:
    """The same kind, refused at its root."""
    pages, device = PageLeases(1), VirtualDevice()
    contexts = ContextSet((1,), (pages.current(0),))
    pages.hold(contexts)
    pages.drop(contexts)
    with pytest.raises(LeaseBooksError, match="more often"):
        pages.drop(contexts)
    event = device.record(device.queue(QueueName.H2D))
    device.release(event)
    with pytest.raises(DoubleReleaseError):
        device.release(event)


def test_12_two_contexts_that_fit_only_alone_both_finish() -> None:
    """Kind: running 0, waiting N, for ever, under memory pressure [vllm 45388]. A slot of one context and a half: one
    runs, the other has its reason, then it runs."""
    slot_gib = 1.5 * rigs.CONTEXT * 2 * 2 * 8 * 4 / 2**30
    running: list[tuple[int, int]] = []

    def look(local: LocalEngine) -> None:
        scheduler = local.engine.scheduler
        original = scheduler.plan

        def plan(step: int, now: float) -> Any:
            found = original(step, now)
            running.append((len(scheduler.running), len(scheduler.waiting)))
            return found

        scheduler.plan = plan  # type: ignore[method-assign]

    outcome = rigs.run(rigs.model(), rigs.together(40, 40), look, slot_gib=slot_gib)
    assert {one.reason for one in outcome.finished.values()} == {"length"}
    assert (1, 1) in running
    assert not any(waiting and not active for active, waiting in running)


def test_13_a_request_that_never_fits_is_refused_at_once_with_its_numbers() -> None:
    """Kind: a request that can never fit hangs [vllm 35541]. Refused before any step, while others run on."""
    scenario = rigs.Scenario(((5, Sampling(3)), (rigs.CONTEXT, Sampling(1))), {0: (0,), 1: (1,)})
    outcome = rigs.run(rigs.model(), scenario)
    refused = outcome.finished[1]
    assert refused.reason == "failed"
    assert f"prompt {rigs.CONTEXT} + max_tokens 1 = {rigs.CONTEXT + 1} tokens is more than" in refused.error
    assert outcome.finished[0].reason == "length"


def test_14_who_waits_behind_a_large_load_has_the_reason_on_record() -> None:
    """Kind: twelvefold time to the first token behind one large load, and nothing says why [vllm 44294]. The head of
    the queue says what it needs and what is free; the ring names it as the holder of its entry; steps waited are
    counted."""
    slot_gib = 1.25 * rigs.CONTEXT * 2 * 2 * 8 * 4 / 2**30
    local = LocalEngine(rigs.model(), rigs.settings(slot_gib=slot_gib))
    local.submit([rigs.prompt(40)], [Sampling(6)])
    local.submit([rigs.prompt(12)], [Sampling(6)])
    local.step()
    local.step()
    (head,) = local.engine.scheduler.waiting
    assert "needs 20 rows of a staging slot, 12 of 60 are free" in head.waits
    holders = Counter(local.producer.handover.holder(sequence) for sequence in (1, 2))
    assert any("needs 20 rows" in words for words in holders)
    assert local.engine.scheduler.waits["slot rows"] >= 1
    assert dict(local.engine.figures().waits)["slot rows"] >= 1
    assert len(local.run()) == 2
    assert local.close().proved


@pytest.mark.parametrize("temperament", list(Temperament))
def test_15_copies_and_scatters_run_beside_attention_without_touching_its_memory(temperament: Temperament) -> None:
    """Kind: copy kernels beside a running attention kernel end in an illegal address [sglang 20611]. On the CPU:
    history copies, materialisation and write-back of neighbouring layers beside a lagging attention share no unordered
    byte (the clocks look at each range), and no address outside of their allocation. On a GPU in tests/gpu."""
    outcome = rigs.run(rigs.model(temperament), rigs.CHURN)
    engine = outcome.local.engine
    arena = engine.pool.arena
    first, last = arena.key.data_ptr(), arena.value.data_ptr() + arena.value.nbytes
    for slot in engine.pool.slots:
        for side in (slot.key, slot.value):
            assert first <= side.data_ptr()
            assert side.data_ptr() + side.nbytes <= last
    assert rigs.same(outcome, rigs.run(rigs.model(), rigs.CHURN, residency="full"))


def test_16_an_engine_starts_idle_and_ends_idle() -> None:
    """Kind: an engine started with nothing to do crashes [transformers 48303]. On its own thread, told to stop without
    ever having had work."""
    local = LocalEngine(rigs.model(), rigs.settings())
    assert not local.step()
    stop = threading.Event()
    thread = threading.Thread(target=local.engine.run, args=(stop,))
    thread.start()
    stop.set()
    local.producer.cancel([])
    thread.join(60)
    assert not thread.is_alive()
    assert local.engine.close().proved


@pytest.mark.parametrize("length", [1, rigs.PAGE, rigs.PAGE + 1])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_17_lengths_at_their_edges(length: int, tokens: int) -> None:
    """Kind: off by one at a page's edge or at nothing at all: a prompt of one token, of a page, of a page and one;
    max_tokens 0 and 1. Token for token what transformers writes."""
    loaded = rigs.model(Temperament.LATE)
    outcome = rigs.run(loaded, rigs.together(length, tokens=tokens))
    assert list(outcome.tokens[0]) == (rigs.expected(loaded, rigs.prompt(length), tokens) if tokens else [])


def test_17_a_stop_at_the_first_token_leaves_an_empty_answer() -> None:
    """The same kind: the first token ends it; what was planned ahead is never published."""
    whole = rigs.expected(rigs.model(), rigs.prompt(6), 2)
    outcome = rigs.run(rigs.model(Temperament.LATE), rigs.together(6, stop_ids=(whole[0],)))
    assert (outcome.tokens[0], outcome.finished[0].reason) == ((), "stop")
