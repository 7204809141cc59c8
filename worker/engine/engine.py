"""shell: the engine: one step after another over a model whose history is staged layer by layer (design: a step).

``step`` is the flow. The plan of a step is made while the step before it is being put on the queues, so that its first
copies start there; sampled tokens are read one step late, through an event that is polled until a deadline. Exactly one
``Finished`` a request. What may run is ``scheduler``'s to say, what is exact is ``routes`` and ``kernels``. Any failure
is the transport's (L6): nothing more is submitted or published, quarantine proves that the device is done or retains
all, and ``run`` raises, so that the process ends with the reason.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from common import log
from common.config import EngineSettings
from common.errors import InvariantError
from common.limits import ENGINE_IDLE_S, STEPS_REPORTED_MAX_COUNT
from ring.consumer import Consumer
from worker.engine.addresses import Addresses
from worker.engine.callbacks import Agree, Stop, Watch
from worker.engine.choices import Choices, at_once, choices_of
from worker.engine.contexts import Context
from worker.engine.device import DeviceError, QueueName
from worker.engine.device_pool import DevicePool
from worker.engine.drafts import Drafts
from worker.engine.engine_figures import figures_of
from worker.engine.fit import fit
from worker.engine.fused import adapted
from worker.engine.graphs import graphs_of
from worker.engine.headroom_memory import HeadroomMemory, warm_headroom
from worker.engine.host_pool import HostPool
from worker.engine.intake import Arrival, Intake, Prompts
from worker.engine.kernels import long_attention
from worker.engine.landing import Enqueued, landed_tokens
from worker.engine.linear_states import LinearStates
from worker.engine.link_rate import rates_at_start
from worker.engine.model import LoadedModel
from worker.engine.packing import Packer
from worker.engine.page_leases import PageLeases
from worker.engine.parts import chunk_step
from worker.engine.quantum import believed
from worker.engine.retention import retention_of
from worker.engine.routes import LiveStep, StagedRoute, route_of
from worker.engine.scheduler import Scheduler
from worker.engine.segments import SegmentBook
from worker.engine.shaping import Shaping
from worker.engine.step import PackedStep
from worker.engine.tables import Tables
from worker.engine.transport import Quarantine, Transport
from worker.engine.turns import Turns
from worker.engine.warmup import warm_up
from worker.structures import EngineFigures, Finished, Pooled, Request, TokenLogprob


class UnprovenError(DeviceError):
    """The engine failed and nothing proves that the device is done: all is retained, the process must end (L6)."""


class Engine:
    """Runs what the ring brings. All methods belong to one thread, on which the callbacks are called.

    Raises ``RefusedError`` at construction when the model or its pools do not fit (A6).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        consumer: Consumer,
        settings: EngineSettings,
        on_finished: Callable[[Finished], None],
        on_admitted: Callable[[Request], None] = lambda request: None,
        *,
        watch: Watch | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.loaded, self.settings = loaded, settings
        self.device = device = loaded.device
        self.fit = fit(loaded.geometry, settings)
        self._log = log.get("engine")
        self._log.info("fit", model=loaded.name, residency=settings.residency, formula=list(self.fit.formula))
        self._consumer, self._on_finished, self._on_admitted, self._watch = consumer, on_finished, on_admitted, watch
        self._agree = agree
        device.adopt()
        self.steps = self.tokens = self.hit_bytes = self.headroom_bytes = self.spared_bytes = 0
        self.step_seconds: deque[float] = deque(maxlen=STEPS_REPORTED_MAX_COUNT)
        """What each step took; whoever exports them takes them out, and without a reader the oldest go."""
        self.pages = PageLeases(self.fit.segments)
        self.transport = Transport(device, pages=self.pages)
        segments = SegmentBook(self.pages, self.fit.concurrency, self.fit.longs)
        retention = retention_of(self.fit, settings)
        self.turns = Turns(believed(device.kind), self.fit.page_bytes(loaded.geometry), loaded.geometry.token_bytes)
        # turns and prefetches follow what one device measures, which no other rank knows
        turns = None if retention is None or self.fit.whole or settings.tensor_parallel > 1 else self.turns
        self.drafts = Drafts(settings.draft_tokens) if settings.draft_tokens else None
        with device.running():
            blocks = long_attention(device.torch_device, loaded.geometry, loaded.dtype)
        step = chunk_step(settings.chunk_tokens, blocks)
        self.scheduler = Scheduler(self.fit, settings.chunk_tokens, segments, retention, turns, self.drafts, step)
        self.pool = DevicePool(device, loaded.geometry, self.fit, loaded.dtype)
        self.host = HostPool(device, loaded.geometry, self.fit, loaded.dtype) if self.fit.slot_rows else None
        sampled_max = self.fit.segments * (1 + settings.draft_tokens)
        self.tables = Tables(device, max(settings.chunk_tokens, sampled_max + 1), self.fit.segments, sampled_max)
        self._compute = device.queue(QueueName.COMPUTE)
        self.intake = Intake(consumer, self._compute.handle if device.kind == "cuda" else None)
        self.prompts = Prompts(self.intake)
        self._last = device.allocate_device((self.fit.segments,), torch.int64)
        addresses = Addresses(device, self.fit, loaded.geometry.layers)
        self.route = route_of(self.transport, self.host, self.pool, addresses, self.fit, self._next_step)
        self.graphs = graphs_of(settings, loaded, self.route, addresses, self.fit)
        self.packer = Packer(self.fit, pad=self.graphs is not None, blocks=blocks)
        self._choices = Choices()
        self.shaping = Shaping(device, loaded, self.fit.segments, sampled_max, self.intake.payload)
        self._planned = 0
        self._next: Enqueued | None = None
        self._decided = False
        self._behind: Enqueued | None = None
        self._closed: Quarantine | None = None
        self._stack = ExitStack()
        self.states = LinearStates(device, loaded.geometry.linear, self.fit.segments, loaded.dtype)
        self._stack.enter_context(self.states.installed(loaded.module))
        with device.running(), torch.no_grad():
            self._log.info("kernels", fused=self._stack.enter_context(adapted(loaded)))
            rows = self.pool.slots or self.pool.layers
            warm_up(loaded, rows, shared=self.fit.longs > 0, states=self.states)
            if self.graphs is not None:
                self.graphs.warm_up()
        self.turns.rates = rates_at_start(device, loaded.geometry, self.fit, self.host, self.pool)
        self.use(warm_headroom(device, loaded.geometry, self.fit, settings, loaded.dtype))

    def use(self, headroom: HeadroomMemory) -> None:
        """Keep history in this headroom from now on; before the first step."""
        self.headroom, self.scheduler.kept.headroom = headroom, headroom.books
        if headroom.most and isinstance(self.route, StagedRoute):
            self.route.headroom, self.scheduler.turns = headroom, self.turns

    # -- the flow -------------------------------------------------------------------------------------------------
    def run(self, stop: Stop) -> None:
        """Step until ``stop`` is set or the ring is aborted; asleep on the ring while there is nothing to do. Raises
        what failed, after a quarantine; ``UnprovenError`` from it if that proved nothing."""
        self.device.adopt()
        with self.device.running(), torch.no_grad():
            try:
                while not stop.is_set() and not self._consumer.aborted:
                    if not self.step():
                        self._consumer.wait(ENGINE_IDLE_S)
            finally:
                self._prove(self.close())

    def step(self) -> bool:
        """One pass of the model over what is planned; False when there was nothing to do."""
        began = time.monotonic()
        early: Enqueued | None = None
        with self._failing():
            now, self._next, self._decided = self._next or self._begin(), None, False
            if now is not None:
                live = self._fetch(now)
                logits = self._forward(live, self._gather(live))
                self.route.follow(now.packed, self._next_step())
                if self._behind is not None and self.shaping.needs_tokens(now.packed):
                    early, self._behind = self._behind, None
                    self._land(early)
                self._sample(now, live, logits)
            # with drafts the next plan needs this step's tokens; else they are read one step late
            behind, self._behind = (self._behind, now) if self.drafts is None else (now, None)
            if behind is not None:
                self._land(behind)
            if (behind := behind or early) is not None:
                took = time.monotonic() - began
                self.step_seconds.append(took)
                if now is not None and behind.packed.decodes_only:
                    self.turns.learn(behind.packed.staged_rows, behind.packed.device_rows, took)
            idle = now is None and behind is None
            self.turns.headroom_bytes = self.headroom.tend(self._planned, idle=idle)
        return not idle

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """L6: whatever fails here, the transport has failed: a step may be half on its queues. Then none begins."""
        self.transport.accept()
        try:
            yield
        except Exception as error:
            self.transport.fail(f"step {self.steps}: {error}")
            raise

    def _prove(self, ended: Quarantine) -> None:
        """Say how the engine ended; raise when the device may still be at work."""
        tell = self._log.info if ended.proved else self._log.error
        tell("engine_ended", reason=ended.reason, established=list(ended.established), leases_retained=ended.retained)
        if not ended.proved:
            failed = self.transport.failed
            raise UnprovenError(f"{failed}; all is retained, nothing proves that the device is done: {ended.reason}")

    # -- planning -------------------------------------------------------------------------------------------------
    def _begin(self) -> Enqueued | None:
        """Plan a step that nobody planned ahead, and start its first copies."""
        planned = self._plan()
        if planned is not None:
            self.route.prepare(planned.packed)
        return planned

    def _next_step(self) -> PackedStep | None:
        """The step after the one under way: planned once, when its first copies may start; on the reference route after
        the last layer, knowing the same, so that both routes run the same schedule."""
        if not self._decided and self.drafts is None:
            self._decided = True
            self._next = self._plan()
        return None if self._next is None else self._next.packed

    def _plan(self) -> Enqueued | None:
        self._admit_news()
        plan, admitted = self.scheduler.plan(self._planned, time.monotonic())
        self.prompts.look(self.scheduler.shared)
        for request in self._choices.admitted(admitted):
            self._on_admitted(request)
        if self.scheduler.waiting:
            head = self.scheduler.waiting[0]
            self.intake.hold(head.entry, head.waits)
        if plan is None:
            return None
        self._planned += 1
        packed = self.packer.pack(plan)
        self.hit_bytes += packed.hit_rows * self.loaded.geometry.token_bytes
        self.headroom_bytes += packed.headroom_rows * self.loaded.geometry.token_bytes
        self.spared_bytes += packed.spared_rows * self.loaded.geometry.token_bytes
        return Enqueued(packed, self.tables.upload(packed))

    def _admit_news(self) -> None:
        news = self.intake.look()
        for arrival in news.arrivals:
            over = at_once(arrival.request, self.settings.context_tokens, self.loaded.decode)
            if over is None:
                self._begin_choices(arrival)
            else:
                self.intake.read(arrival.entry)
                self._on_finished(over)
        for ref in news.cancels:
            for context in self._choices.running(ref):
                self._finish(context, "cancelled")

    def _begin_choices(self, arrival: Arrival) -> None:
        request, entry, offer = arrival.request, arrival.entry, self.scheduler.offer
        contexts = [offer(one, entry, arrival.offset + start, time.monotonic()) for one, start in choices_of(request)]
        self._choices.begin(request, contexts, self.loaded.decode)
        for context in contexts:
            self.prompts.came(context, again=context is not contexts[0])
            self.shaping.begin(context)
            if self.drafts is not None:
                self.drafts.begin(context.number, request.text)

    # -- one step on the queues -----------------------------------------------------------------------------------
    def _fetch(self, now: Enqueued) -> LiveStep:
        tensors = self.tables.fetch(now.upload, now.packed)
        layers = () if now.packed.whole else self.route.locate(now.packed, tensors)
        return LiveStep(now.packed, tensors, self.route, self.settings.context_tokens, layers)

    def _gather(self, live: LiveStep) -> torch.Tensor:
        """Input ids (tokens,): prompts straight from the ring's pages, else each context's last token."""
        tensors, last, payload = live.tensors, self._last, self.intake.payload
        prompts = [share for share in live.packed.plan.shares if share.prompt]
        for share in prompts:
            self.intake.before_reading(share.context.entry)

        def ids() -> torch.Tensor:
            drafted = tensors.get("ids")
            newest = last.index_select(0, tensors["last_from"]) if drafted is None else drafted
            if not prompts:
                return newest
            out = torch.empty(live.packed.tokens, dtype=torch.int64, device=last.device)
            out.index_copy_(0, tensors["prompt_to"], payload.index_select(0, tensors["prompt_from"]).long())
            out.index_copy_(0, tensors["last_to"], newest)
            return out

        firsts = [(share.context.offset + share.start, share.rows) for share in prompts]
        reads = [payload[first : first + rows] for first, rows in firsts]
        gathered = self.device.launch(self._compute, ids, reads, (), "gather token ids")
        if gathered is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        return gathered

    def _forward(self, live: LiveStep, ids: torch.Tensor) -> torch.Tensor:
        """Logits (sampled rows, vocabulary)."""
        if live.packed.whole and self.graphs is not None:
            logits = self.graphs.forward(live, ids)
        else:
            states = self.states.keywords(live.packed.plan, live.tensors)
            logits = self.loaded.logits(ids, live.tensors["positions"], live.tensors["sample_rows"], live, **states)
        return logits[: live.packed.sampled_rows]

    def _sample(self, now: Enqueued, live: LiveStep, logits: torch.Tensor) -> None:
        """Choose tokens on the device, keep them there for the next step, and send them to the host."""
        tensors, back = live.tensors, self.device.queue(QueueName.D2H)
        if self._watch is not None:
            self._watch(now.packed.plan, logits)
        tokens = self.shaping.choose(now, tensors, logits)
        if self.drafts is None:
            self._last.index_copy_(0, tensors["sample_segments"], tokens)
        kept = self.tables.sampled(now.upload, tokens.numel())

        def keep() -> None:
            kept.copy_(tokens)

        self.device.launch(self._compute, keep, (), (kept,), "keep sampled tokens")
        sampled = self.device.record(self._compute)
        self.device.wait(back, sampled)
        self.device.release(sampled)
        if tokens.numel():
            self.device.copy(back, self.tables.tokens(now.upload, tokens.numel()), kept, "sampled tokens")
            self.shaping.bring(now, back)
        now.keep, now.over = (live, tokens), self.device.record(back)

    # -- one step late --------------------------------------------------------------------------------------------
    def _land(self, behind: Enqueued) -> None:
        """The step is over on every queue: retire its leases, read its tokens, publish."""
        plan, others = behind.packed.plan, self.shaping.on_host(behind)
        values, told = landed_tokens(self.device, self.tables, behind, others), self.shaping.told(behind)
        if self._agree is not None:
            self._agree(plan.step, [*values, *sum(behind.packed.tail, ())])
        self.transport.retire(time.monotonic())
        self.tables.release(behind.upload)
        behind.keep = ()
        self.steps += 1
        at = 0
        for share in behind.packed.sampling:
            first, at = at, at + share.sampled_rows
            sampled: Sequence[int] = values[first:at]
            if share.prompt:
                self.prompts.read(share.context)
            if self.drafts is not None:
                sampled = self.drafts.landed(share.context.number, share.ids, sampled)
                self.scheduler.confirm(share, len(sampled))
            for row, token in enumerate(sampled, first):
                self._take(share.context, token, told.get(row))
        self.scheduler.landed(plan)
        self.prompts.look(self.scheduler.shared)
        for context in (share.context for share in plan.shares):
            if context.ended and not context.in_flight:
                self.prompts.read(context)
                self.transport.forget(context.number)

    def _take(self, context: Context, token: int, told: TokenLogprob | Pooled | None) -> None:
        if context.ended:
            return  # surplus: planned before its stop was known
        self.tokens += 1
        reason = self._choices.add(context, token, told)
        if reason is not None:
            self._finish(context, reason)

    def _finish(self, context: Context, reason: str) -> None:
        """An answer is over; the last one says how its request ended, once. Memory waits for what is in flight (L8)."""
        finished = self._choices.end(context, reason)
        self.shaping.end(context.number)
        drafted = "" if self.drafts is None else self.drafts.end(context.number)
        self.scheduler.end(context)
        if context.in_flight:
            self.transport.revoke(context.number)
        else:
            self.prompts.read(context)
        told = context.story.told(time.monotonic(), context.served.words(self.loaded.geometry.token_bytes), drafted)
        if finished is not None:
            self._on_finished(finished._replace(notes=told))

    @property
    def layers(self) -> int:
        """Layers attended so far, over all steps; any thread may ask."""
        return self.route.attended

    def figures(self) -> EngineFigures:
        """As it stands; any thread may ask."""
        return figures_of(self)

    # -- start and end --------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise unless all books agree."""
        self.transport.check()
        self.scheduler.check()

    def close(self) -> Quarantine:
        """End: prove that the device is done, then give back. May be called again; the first proof stays."""
        if self._closed is None:
            self._stack.close()
            self._closed = self.transport.quarantine("the engine ends", self._consumer.abort)
            if self._closed.proved:
                self.headroom.close()
                self.tables.close()
                self.shaping.close()
                if self.host is not None:
                    self.host.close()
        return self._closed
