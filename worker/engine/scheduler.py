"""rules: who runs in a step and who waits, and why (A7): decodes first, then prompts in chunks; admission only here.

A plan is fixed before the tokens of the step before it are known: what a stop or cancel makes surplus is planned at
most twice more and never published. Its rows have room, since none is planned past ``max_tokens``. Knows no tensor, no
token and no clock: ``now`` is an argument, in seconds, and for the stories of requests alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from common.errors import InvariantError
from common.limits import PASSED_BY_MAX_COUNT
from worker.engine.contexts import Context, Joined, Prefetch, Share, StepPlan
from worker.engine.drafts import Drafts
from worker.engine.fit import Fit, rounded_up
from worker.engine.kept import Kept
from worker.engine.parts import chunk_rows
from worker.engine.quantum import Quantum
from worker.engine.retention import Placement, Retention
from worker.engine.segments import SegmentBook
from worker.engine.shared import WHOLE_SEGMENTS, SharedHistories, SharedHistory, Wait, order
from worker.engine.story import Story, moves
from worker.engine.turns import Decoding, decoding_of
from worker.structures import HeldUp, Request


class Planner(Protocol):
    """Who decodes when (``turns.Turns``)."""

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        """None: all of them."""

    def ahead_rows(self, quantum: Quantum) -> int:
        """Rows to bring in beside one step."""


class Scheduler:
    """Waiting, running and ending contexts. One thread, the engine's."""

    def __init__(
        self,
        fit: Fit,
        chunk_tokens: int,
        segments: SegmentBook,
        retention: Retention | None = None,
        turns: Planner | None = None,
        drafts: Drafts | None = None,
        chunk_step: int = 0,
    ) -> None:
        self._fit = fit
        self._chunk_step = chunk_step
        self._chunk = chunk_tokens
        self.segments = segments
        self.shared = SharedHistories(fit, segments)
        self.kept = Kept(fit, retention)
        self.turns = turns
        self.drafts = drafts
        self.waiting: deque[Context] = deque()
        self.running: list[Context] = []
        self._numbers = 0
        self.filled = 0
        """Rows of every new context's history that are there already: for measuring decode over histories made up."""
        self.waits: Counter[str] = Counter()
        """Steps planned while the first of those waiting did, by reason; or, of ``turn``, while one running did."""
        self.held_up: HeldUp | None = None
        """The first of those waiting at the last plan, if it waited, and why; any thread may read it."""
        self._step, self._now = -1, 0.0

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def offer(self, request: Request, entry: int, offset: int, now: float = 0.0) -> Context:
        """A request that fits (A7 is asked before) waits for its turn."""
        context = Context(self._number(), request, entry, offset, waits="arrived: admission is at the next plan")
        context.story = Story(now, self._step + 1)
        context.prefilled = min(self.filled, request.prompt_tokens - 1)
        self.waiting.append(context)
        return context

    def _number(self) -> int:
        """Of a new context; a shared history counts as one."""
        self._numbers += 1
        return self._numbers - 1

    def end(self, context: Context) -> None:
        """Its answer is over, by a stop or a cancel: it is planned no more. What is in flight lands first."""
        context.ended = True
        if context in self.waiting:
            self.waiting.remove(context)

    def landed(self, plan: StepPlan) -> None:
        """A step's work is over on the device, its leases are retired: the next ``reclaim`` may take segments back."""
        self.kept.landed(plan.step)
        for share in plan.shares:
            share.context.in_flight -= 1
            if share.context.in_flight < 0:
                raise InvariantError(f"context {share.context.number} landed more often than it was planned")

    def confirm(self, share: Share, count: int) -> None:
        """Of a share with drafts ``count`` tokens count: rows behind them are nobody's, and are written again."""
        context = share.context
        context.sampled += count - 1
        if context.page is not None:
            self.kept.confirm(context.number, context.own_rows, self._step)

    def reclaim(self, step: int) -> None:
        """Before ``step`` is planned: segments and device pages of ended contexts that no work can touch any
        more are taken back (L8)."""
        left = []
        for context in self.running:
            page = context.page
            if context.ended and not context.in_flight and page is not None and self.segments.may_recycle(page):
                self.segments.give_back(page)
                context.page = None
                self.shared.leave(context, step)
                self.kept.leave(context.number, step)
            else:
                left.append(context)
        self.running = left
        self.shared.reclaim(self.kept, step)
        self.shared.settle(self.kept)

    def plan(self, step: int, now: float = 0.0) -> tuple[StepPlan | None, list[Context]]:
        """The next step and who was admitted for it; None when nobody has a row to compute."""
        self._step, self._now = step, now
        self.reclaim(step)
        admitted = self._admit(step)
        decoding, quantum = self._turn([context for context in self.running if self._decodes(context)], step)
        shares = [self._decode(context) for context in decoding]
        shares += self._prefills(step, max(1, self._chunk - sum(share.rows for share in shares)))
        if not shares:
            return None, admitted
        shares.sort(key=order)
        placements, joined = self._place(shares, step)
        prefetches = self._prefetches(quantum, joined, step)
        self._tell_moves()
        return StepPlan(step, tuple(shares), placements, prefetches, joined, self.kept.headroom.shifts(step)), admitted

    def _prefills(self, step: int, budget: int) -> list[Share]:
        """Prompts in chunks, ``budget`` rows in all. A shared history is prefilled for the first that waits for it; the
        others, and their own rows, come when that is over (H5)."""
        found: list[Share] = []
        for context in self.running:
            if context.ended or context.prefilled == context.prompt_tokens:
                continue
            history = self.shared.of(context)
            if history is not None and not history.readable(step):
                mine = self.shared.brought(context, history)
                who = "prefilled" if mine else "waited for another request to prefill"
                self._note(context, f"{who} the {context.base} tokens that it shares")
                rows = self._rows(history.context, budget, found)
                if rows and history.context.number not in {share.context.number for share in found}:
                    found.append(self._prefill(history.context, rows))
                    budget -= rows
                    history.look(step)
                continue
            if budget == 0:
                self._note(context, "waited for prefill: others took all rows of the step")
                continue
            rows = self._rows(context, budget, found)
            if not rows:
                continue
            budget -= rows
            self._tell_sharing(context, history)
            found.append(self._prefill(context, rows))
        return found

    def _rows(self, context: Context, budget: int, found: Sequence[Share]) -> int:
        """Rows of its next chunk; the first one of a step is never put off."""
        left = context.prompt_tokens - context.prefilled
        return chunk_rows(context.prefilled - context.base, budget, left, self._chunk_step, some=not found)

    def _turn(self, decoding: list[Context], step: int) -> tuple[list[Context], Quantum | None]:
        """Those whose turn it is (H6); the others are parked."""
        if self.turns is None or not decoding:
            return decoding, None
        quantum = self.turns.decide(step, decoding_of(decoding))
        if quantum is None:
            return [one for one in decoding if self._brought_in(one, step)], None
        runs, coming = frozenset(quantum.runs), frozenset((*quantum.runs, *quantum.following))
        words = f"waited for its turn: {len(runs)} of {len(decoding)} requests decode in this one"
        for one in decoding:
            if one.number not in runs:
                self._note(one, words)
            if one.number not in coming:
                self.kept.park(one.number)
        self.shared.settle(self.kept)
        return [one for one in decoding if one.number in runs and self._brought_in(one, step)], quantum

    def _brought_in(self, context: Context, step: int) -> bool:
        """It is active from now on, and with it the history it shares; or its reason is on record."""
        reason = None
        for one in (context.shared, context):
            if one is not None and reason is None:
                reason = self.kept.bring_in(one.number, step)
        if reason is not None:
            self.waits["turn"] += 1
            self._note(context, f"waited for its turn: {reason}")
        context.waits = reason or ""
        return reason is None

    def _prefetches(self, quantum: Quantum | None, joined: tuple[Joined, ...], step: int) -> tuple[Prefetch, ...]:
        """Whose turn is next comes in beside this step, as far as the pool has room and the link time."""
        if quantum is None or self.kept.retention is None or self.turns is None:
            return ()
        left, found = self.turns.ahead_rows(quantum), []
        looked = {one.history.number for one in joined}
        for context in self.running:
            if context.number not in quantum.following or context.ended or left <= 0:
                continue
            if not self._brought_in(context, step):
                continue
            for one in (context.shared, context):
                if one is None or one.page is None or one.number in looked or left <= 0:
                    continue
                looked.add(one.number)
                placement = self.kept.arrive(one, left, step)
                if placement is not None:
                    found.append(Prefetch(one.number, one.page, placement))
                    left -= placement.link_rows
        return tuple(found)

    def _place(self, shares: list[Share], step: int) -> tuple[tuple[Placement, ...], tuple[Joined, ...]]:
        joined = self.shared.joined(shares)
        if not self._fit.slot_rows:
            return (), joined
        place = self.kept.place
        own = tuple(place(share.context, share.own_start, share.rows, step) for share in shares)
        return own, tuple(replace(one, placement=place(one.history, one.history.rows, 0, step)) for one in joined)

    def _note(self, context: Context, words: str) -> None:
        context.story.add(self._step, self._now, words)

    def _tell_moves(self) -> None:
        """What page pool and headroom decided since the last time, to the stories of those it concerns."""
        running = {context.number: context for context in self.running}
        for decision in self.kept.news():
            for number, words in moves(decision):
                if number in running:
                    running[number].story.add(decision.step, self._now, words, len(decision.pages))

    def check(self) -> None:
        """Raise unless contexts and segments agree."""
        self.segments.check()
        self.kept.check()
        if len({context.number for context in self.running}) != len(self.running):
            raise InvariantError("a context runs twice")
        self.shared.check(self.running)
        owners = len(self.running) + len(self.shared)
        if self.segments.held != owners or any(context.page is None for context in self.running):
            raise InvariantError(f"{owners} contexts and shared histories have {self.segments.held} segments")
        if self._fit.staged and self._reserved > self._fit.slot_rows:
            raise InvariantError(f"{self._reserved} rows are promised in slots of {self._fit.slot_rows}")
        for context in self.running:
            if context.rows > context.prompt_tokens + context.request.sampling.max_tokens:
                raise InvariantError(f"context {context.number} has {context.rows} rows, more than it asked for")

    @property
    def _reserved(self) -> int:
        """Rows of a staging slot that are promised: each context's own, and each shared history once."""
        own = sum(rounded_up(context.most_rows, self._fit.page_rows) for context in self.running)
        return own + self.shared.reserved

    def _admit(self, step: int) -> list[Context]:
        admitted: list[Context] = []
        while self.waiting:
            context = self.waiting[0]
            context.story.reached_head(step)
            reason = self._start(context, step)
            if reason:
                self.waits[reason[0]] += 1
                context.waits = reason[1]
                self._note(context, f"waited for {reason[0]}: {reason[1]}")
                self.held_up = HeldUp(context.request.ref, f"{reason[0]}: {reason[1]}")
                return admitted + (self._pass_by(context, step) if reason[0] == WHOLE_SEGMENTS else [])
            admitted.append(self._admitted(context))
        self.held_up = None
        return admitted

    def _admitted(self, context: Context) -> Context:
        context.waits = ""
        lost = self.shared.lost(context)
        self._note(context, f"admitted to run alone: {lost}" if lost else "admitted")
        self.waiting.remove(context)
        self.running.append(context)
        return context

    def _pass_by(self, head: Context, step: int) -> list[Context]:
        """``head`` waits for a whole segment: those behind it that need none run, so many at most that it is not kept
        waiting for ever by those who read the history that it waits for."""
        admitted: list[Context] = []
        for context in list(islice(self.waiting, 1, 1 + PASSED_BY_MAX_COUNT)):
            if head.passed_by >= PASSED_BY_MAX_COUNT:
                break
            reason = self._start(context, step)
            if reason is not None and reason[0] != WHOLE_SEGMENTS:
                break
            if reason is None:
                head.passed_by += 1
                context.story.reached_head(step)
                admitted.append(self._admitted(context))
        return admitted

    def _start(self, context: Context, step: int) -> Wait | None:
        """Give it what it needs to run, behind a history that it shares if there is room for one; or why it waits."""
        if len(self.running) >= self.segments.count:
            return "segments", f"all {self.segments.count} segments of the host pool are owned"
        asked = self.shared.asked(context)
        one = None if asked is None else self.shared.find(asked)
        long = rounded_up(context.most_rows, self._fit.page_rows) > self._fit.own_rows
        if long and one is None and not self.shared.has_room():
            return self.shared.whole_wait(context)
        reason = self._slot_wait(context, asked.tokens if asked is not None and one is not None and one.members else 0)
        if reason is not None:
            return reason
        if asked is not None and (one is not None or self.shared.room(self.kept, step)):
            if one is None:
                one = self.shared.open(context, asked, self._number(), self.filled, step)
            words = self.kept.admit(one.context.number, asked.tokens, step)
            words = words or self.kept.admit(context.number, context.most_rows - asked.tokens, step)
            if words is None:
                self.shared.join(one, context, step)
                context.page = self.segments.take()
                return None
            if not self.shared.idle(one):
                return "device pages", words
            self.shared.let_go(one, self.kept, step)  # alone it needs no more than its own
        return self._start_alone(context, long, step)

    def _start_alone(self, context: Context, long: bool, step: int) -> Wait | None:
        if long:
            self.shared.room(self.kept, step)
        words = self.kept.admit(context.number, context.most_rows, step)
        if words is not None:
            return "device pages", words
        context.page = self.segments.take(long=long)
        return None

    def _slot_wait(self, context: Context, promised: int) -> Wait | None:
        """``promised`` rows of its history are in the slots already, for others that share them."""
        free = self._fit.slot_rows - self._reserved
        need = rounded_up(context.most_rows, self._fit.page_rows) - promised
        if self._fit.staged and need > free:
            return "slot rows", f"needs {need} rows of a staging slot, {free} of {self._fit.slot_rows} are free"
        return None

    def _tell_sharing(self, context: Context, one: SharedHistory | None) -> None:
        """Once, with its first own rows: how much it need not compute."""
        if one is None or context.prefilled > context.base:
            return
        by = "this request" if self.shared.brought(context, one) else "another request"
        others = len(one.members) - 1
        words = f"{others} other{'' if others == 1 else 's'}"
        self._note(context, f"shares {context.base} tokens with {words}, prefilled by {by}")

    @staticmethod
    def _decodes(context: Context) -> bool:
        return (
            not context.ended
            and context.prefilled == context.prompt_tokens
            and context.sampled < context.request.sampling.max_tokens
        )

    def _decode(self, context: Context) -> Share:
        ids: tuple[int, ...] = ()
        if self.drafts is not None:
            ids = self.drafts.propose(context.number, context.request.sampling.max_tokens - context.sampled - 1)
        share = Share(context, context.rows, max(1, len(ids)), False, context.sampled, ids)
        context.sampled += 1
        context.in_flight += 1
        return share

    @staticmethod
    def _prefill(context: Context, rows: int) -> Share:
        start = context.prefilled
        last = start + rows == context.prompt_tokens
        context.prefilled += rows
        context.in_flight += 1
        samples = last and context.request.sampling.max_tokens > 0  # a shared history samples nothing
        context.sampled += samples
        return Share(context, start, rows, True, 0 if samples else -1)
