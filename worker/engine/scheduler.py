"""rules: who runs in a step and who waits, and why (A7): decodes first, then prompts in chunks; admission only here.

A plan is fixed before the tokens of the step before it are known: what a stop or cancel makes surplus is planned at
most twice more and never published. Its rows have room, since none is planned past ``max_tokens``. Knows no tensor, no
token and no clock: ``now`` is an argument, in seconds, and for the stories of requests alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import InvariantError
from worker.engine.fit import Fit, rounded_up
from worker.engine.headroom import Headroom, Shift
from worker.engine.page_leases import HostPage
from worker.engine.quantum import Quantum
from worker.engine.retention import Placement, Retention, streamed
from worker.engine.segments import SegmentBook
from worker.engine.served import Served
from worker.engine.story import Story, fresh, moves
from worker.engine.turns import Decoding
from worker.structures import Request


@dataclass(slots=True, eq=False)
class Context:
    """A request's sequence with its history. Only the scheduler changes it.

    ``entry`` is the ring entry that holds its prompt, ``offset`` the prompt's first index in the ring's int32 view.
    """

    number: int
    request: Request
    entry: int
    offset: int
    page: HostPage | None = None
    prefilled: int = 0
    """Rows of the prompt planned so far."""
    sampled: int = 0
    """Tokens planned to be sampled so far."""
    in_flight: int = 0
    """Steps planned with it whose end nobody saw yet."""
    ended: bool = False
    waits: str = ""
    """Why it is not admitted, with numbers; empty once it is."""
    story: Story = field(default_factory=Story)
    served: Served = field(default_factory=Served)
    """Where its history came from so far (H3)."""

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def rows(self) -> int:
        """Rows of history planned so far: the last sampled token has none yet."""
        return self.prefilled + max(0, self.sampled - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One context's part of a step: ``rows`` new rows from position ``start`` on."""

    context: Context
    start: int
    rows: int
    prompt: bool
    """The rows are the prompt's; else the one row is the last sampled token."""
    number: int
    """Which of its answer's tokens the last row samples (from 0); -1 for a chunk inside the prompt."""

    @property
    def samples(self) -> bool:
        return self.number >= 0

    @property
    def page(self) -> HostPage:
        if self.context.page is None:
            raise InvariantError(f"context {self.context.number} is in a step without a segment")
        return self.context.page


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Rows of a context's history that are copied into its pages before its turn."""

    number: int
    page: HostPage
    placement: Placement


class Planner(Protocol):
    """Who decodes when (``turns.Turns``)."""

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        """None: all of them."""

    def ahead_rows(self, quantum: Quantum) -> int:
        """Rows to bring in beside one step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Who runs in one step, in ascending order of segment, so that resident history offsets only grow."""

    step: int
    shares: tuple[Share, ...]
    placements: tuple[Placement, ...] = ()
    """Where the history of each share's context is; empty when nothing is retained."""
    arrivals: tuple[Arrival, ...] = ()
    """Contexts that do not run in this step and are brought in beside it (H6)."""
    shifts: tuple[Shift, ...] = ()
    """Pages that move within headroom, after attention (H2)."""

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)


class Scheduler:
    """Waiting, running and ending contexts. One thread, the engine's."""

    def __init__(
        self,
        fit: Fit,
        chunk_tokens: int,
        segments: SegmentBook,
        retention: Retention | None = None,
        turns: Planner | None = None,
    ) -> None:
        self._fit = fit
        self._chunk = chunk_tokens
        self.segments = segments
        self.retention = retention
        self.turns = turns
        self.headroom = Headroom(fit.page_rows, 0)
        self.waiting: deque[Context] = deque()
        self.running: list[Context] = []
        self._numbers = 0
        self.filled = 0
        """Rows of every new context's history that are there already: for measuring decode over histories made up."""
        self.waits: Counter[str] = Counter()
        """Steps planned while the head of the queue waited, by reason."""
        self._step, self._now = -1, 0.0
        self._told = [0, 0]
        """Decisions of the page pool, and of headroom, up to these are in the stories."""

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def offer(self, request: Request, entry: int, offset: int, now: float = 0.0) -> Context:
        """A request that fits (A7 is asked before) waits for its turn."""
        context = Context(self._numbers, request, entry, offset, waits="arrived: admission is at the next plan")
        context.story = Story(now, self._step + 1)
        context.prefilled = min(self.filled, request.prompt_tokens - 1)
        self._numbers += 1
        self.waiting.append(context)
        return context

    def end(self, context: Context) -> None:
        """Its answer is over, by a stop or a cancel: it is planned no more. What is in flight lands first."""
        context.ended = True
        if context in self.waiting:
            self.waiting.remove(context)

    def landed(self, plan: StepPlan) -> None:
        """A step's work is over on the device, its leases are retired: ended contexts give their segments back."""
        if self.retention is not None:
            self.retention.pool.landed(plan.step)
        self.headroom.landed(plan.step)
        for share in plan.shares:
            share.context.in_flight -= 1
            if share.context.in_flight < 0:
                raise InvariantError(f"context {share.context.number} landed more often than it was planned")

    def reclaim(self, step: int) -> None:
        """Before ``step`` is planned: segments and device pages of ended contexts that no work can touch any
        more are taken back (L8)."""
        left = []
        for context in self.running:
            page = context.page
            if context.ended and not context.in_flight and page is not None and self.segments.may_recycle(page):
                self.segments.give_back(page)
                context.page = None
                if self.retention is not None:
                    self.retention.leave(context.number, step)
                self.headroom.leave(context.number, step)
            else:
                left.append(context)
        self.running = left

    def plan(self, step: int, now: float = 0.0) -> tuple[StepPlan | None, list[Context]]:
        """The next step and who was admitted for it; None when nobody has a row to compute."""
        self._step, self._now = step, now
        self.reclaim(step)
        admitted = self._admit(step)
        decoding, quantum = self._turn([context for context in self.running if self._decodes(context)], step)
        shares = [self._decode(context) for context in decoding]
        budget = max(1, self._chunk - len(shares))
        for context in self.running:
            left = context.prompt_tokens - context.prefilled
            if context.ended or left == 0:
                continue
            if budget == 0:
                context.story.add(step, now, "waited for prefill: others took all rows of the step")
                continue
            rows = min(left, budget)
            budget -= rows
            shares.append(self._prefill(context, rows))
        if not shares:
            return None, admitted
        shares.sort(key=lambda share: share.page.index)
        placements = self._place(shares, step)
        arrivals = self._arrivals(quantum, step)
        self._tell_moves()
        return StepPlan(step, tuple(shares), placements, arrivals, self.headroom.shifts(step)), admitted

    def _turn(self, decoding: list[Context], step: int) -> tuple[list[Context], Quantum | None]:
        """Those whose turn it is (H6); the others are parked."""
        if self.turns is None or not decoding:
            return decoding, None
        quantum = self.turns.decide(
            step, [Decoding(one.number, one.rows, one.request.sampling.max_tokens - one.sampled) for one in decoding]
        )
        runs = None if quantum is None else frozenset(quantum.runs)
        chosen = [one for one in decoding if runs is None or one.number in runs]
        for one in decoding if runs is not None else ():
            if one not in chosen:
                self._note(one, f"waited for its turn: {len(chosen)} of {len(decoding)} requests decode in this one")
        if runs is not None:
            coming = runs.union(quantum.following) if quantum is not None else runs
            for one in decoding:
                if one.number not in coming:
                    self.headroom.park(one.number)
                    if self.retention is not None:
                        self.retention.park(one.number)
        return [one for one in chosen if self._brought_in(one, step)], quantum

    def _brought_in(self, context: Context, step: int) -> bool:
        reason = None if self.retention is None else self.retention.bring_in(context.number, step)
        if reason is not None:
            self.waits["turn"] += 1
            self._note(context, f"waited for its turn: {reason}")
        else:
            self.headroom.bring_in(context.number)
        context.waits = reason or ""
        return reason is None

    def _arrivals(self, quantum: Quantum | None, step: int) -> tuple[Arrival, ...]:
        """Whose turn is next comes in beside this step, as far as the pool has room and the link time."""
        if quantum is None or self.retention is None or self.turns is None:
            return ()
        left, found = self.turns.ahead_rows(quantum), []
        for context in self.running:
            if context.number not in quantum.following or context.ended or context.page is None or left <= 0:
                continue
            if not self._brought_in(context, step):
                continue
            placement = self.retention.arrive(context.number, context.rows, left, step)
            if placement is not None:
                found.append(Arrival(context.number, context.page, placement))
                context.served.add(placement)
                left -= placement.link_rows
        return tuple(found)

    def _place(self, shares: list[Share], step: int) -> tuple[Placement, ...]:
        if not self._fit.slot_rows:
            return ()
        return tuple(self._placed(share.context, share.start, share.rows, step) for share in shares)

    def _placed(self, context: Context, start: int, rows: int, step: int) -> Placement:
        """Where its history is: in its pages (H1), in headroom (H2), the rest on the host."""
        found = streamed(start)
        if self.retention is not None:
            found = self.retention.place(context.number, start, rows, step)
        found = self.headroom.place(context.number, found, start, rows, step)
        context.served.add(found)
        return found

    def _note(self, context: Context, words: str) -> None:
        context.story.add(self._step, self._now, words)

    def _tell_moves(self) -> None:
        """What the page pool and headroom decided since the last time, to the stories of those it concerns."""
        running = {context.number: context for context in self.running}
        pool = None if self.retention is None else self.retention.pool
        for at, books in enumerate((pool, self.headroom)):
            if books is None or books.sequence == self._told[at]:
                continue
            for decision in fresh(books.records, self._told[at]):
                for number, words in moves(decision):
                    if number in running:
                        running[number].story.add(decision.step, self._now, words, len(decision.pages))
            self._told[at] = books.sequence

    def check(self) -> None:
        """Raise unless contexts and segments agree."""
        self.segments.check()
        if self.retention is not None:
            self.retention.check()
        self.headroom.check()
        if len({context.number for context in self.running}) != len(self.running):
            raise InvariantError("a context runs twice")
        if self.segments.held != len(self.running) or any(context.page is None for context in self.running):
            raise InvariantError(f"{len(self.running)} contexts run on {self.segments.held} segments")
        if self._fit.slot_rows and self._reserved(self.running) > self._fit.slot_rows:
            raise InvariantError(f"{self._reserved(self.running)} rows are promised in slots of {self._fit.slot_rows}")
        for context in self.running:
            if context.rows > context.prompt_tokens + context.request.sampling.max_tokens:
                raise InvariantError(f"context {context.number} has {context.rows} rows, more than it asked for")

    def _reservation(self, context: Context) -> int:
        return rounded_up(context.prompt_tokens + context.request.sampling.max_tokens, self._fit.page_rows)

    def _reserved(self, contexts: Iterable[Context]) -> int:
        return sum(self._reservation(context) for context in contexts)

    def _admit(self, step: int) -> list[Context]:
        admitted: list[Context] = []
        while self.waiting:
            context = self.waiting[0]
            context.story.reached_head(step)
            reason = self._must_wait(context, step)
            if reason:
                self.waits[reason[0]] += 1
                context.waits = reason[1]
                self._note(context, f"waited for {reason[0]}: {reason[1]}")
                break
            context.page = self.segments.take()
            context.waits = ""
            self._note(context, "admitted")
            self.waiting.popleft()
            self.running.append(context)
            admitted.append(context)
        return admitted

    def _must_wait(self, context: Context, step: int) -> tuple[str, str] | None:
        if not self.segments.free:
            return "segments", f"all {self.segments.count} segments of the host pool are owned"
        free = self._fit.slot_rows - self._reserved(self.running)
        need = self._reservation(context)
        if self._fit.slot_rows and need > free:
            return "slot rows", f"needs {need} rows of a staging slot, {free} of {self._fit.slot_rows} are free"
        if self.retention is not None:
            words = self.retention.admit(
                context.number, context.prompt_tokens + context.request.sampling.max_tokens, step
            )
            if words is not None:
                return "device pages", words
        return None

    @staticmethod
    def _decodes(context: Context) -> bool:
        return (
            not context.ended
            and context.prefilled == context.prompt_tokens
            and context.sampled < context.request.sampling.max_tokens
        )

    @staticmethod
    def _decode(context: Context) -> Share:
        share = Share(context, context.rows, 1, False, context.sampled)
        context.sampled += 1
        context.in_flight += 1
        return share

    @staticmethod
    def _prefill(context: Context, rows: int) -> Share:
        start = context.prefilled
        last = start + rows == context.prompt_tokens
        context.prefilled += rows
        context.in_flight += 1
        if last:
            context.sampled += 1
        return Share(context, start, rows, True, 0 if last else -1)
