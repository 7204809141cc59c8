"""rules: H5: histories that several requests of a job share: prefilled once, held once, staged once a step for all.

A shared history is a context of its own, with a long segment and a retention account, and the requests that read it are
its members from their admission until their own segments are given back. It is prefilled by the ring entry of the
member that brought it, and read once that is behind it by a step. Without members a whole one stays cached, until a
long segment is wanted; one that nobody waits for any more before it is whole goes at once. Never an error: where there
is no room for it, a request runs by itself. Knows no tensor, no ring and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import InvariantError
from worker.engine.contexts import Context, Joined, Share
from worker.engine.fit import Fit
from worker.engine.kept import Kept
from worker.engine.segments import SegmentBook
from worker.prefixes import own_too_long
from worker.structures import Sampling, SharedPrefix

Wait = tuple[str, str]
"""Why a request waits: the kind of reason, and its words with numbers."""
WHOLE_SEGMENTS = "whole segments"
"""The kind of a wait for a long segment: those that need none may pass."""


@dataclass(slots=True, eq=False)
class SharedHistory:
    """One of them: its context, and who reads it."""

    key: str
    context: Context
    members: dict[int, Context] = field(default_factory=dict)
    whole_at: int | None = None
    """The step that prefills its last rows: later ones may read it."""
    used: int = -1
    """The step in which it was last joined or left."""

    def look(self, step: int) -> None:
        """Rows of it were planned in ``step``."""
        if self.context.prefilled == self.context.prompt_tokens:
            self.whole_at = step

    def readable(self, step: int) -> bool:
        """Whether a step may read all of it."""
        return self.whole_at is not None and self.whole_at < step


class SharedHistories:
    """All of one engine, in long segments. One thread, the engine's."""

    def __init__(self, fit: Fit, segments: SegmentBook) -> None:
        self._fit = fit
        self._segments = segments
        self._held: dict[str, SharedHistory] = {}
        self.members = 0
        """Running requests that share one; any thread may read it."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Context]:
        """The contexts of all that have a segment, oldest first."""
        return (one.context for one in self._held.values())

    def of(self, context: Context) -> SharedHistory | None:
        """The one it is a member of."""
        key = context.request.shared.key if context.shared is not None and context.request.shared is not None else ""
        return self._held.get(key)

    @staticmethod
    def brought(context: Context, one: SharedHistory) -> bool:
        """Whether it is prefilled from this member's prompt."""
        return (context.entry, context.offset) == (one.context.entry, one.context.offset)

    @property
    def reserved(self) -> int:
        """Rows that histories with members take in a staging slot, once for all of these."""
        return sum(one.context.prompt_tokens for one in self._held.values() if one.members)

    def asked(self, context: Context) -> SharedPrefix | None:
        """What it asks to share, if there are segments that can hold both parts."""
        asked, page = context.request.shared, self._fit.page_rows
        if asked is None or not self._segments.longs:
            return None
        fits = 0 < asked.tokens < context.prompt_tokens and asked.tokens % page == 0
        fits = fits and not own_too_long(context.request, self._fit.own_rows)
        return asked if fits and asked.tokens <= self._fit.context_rows else None

    def find(self, asked: SharedPrefix) -> SharedHistory | None:
        """The history that is meant, if it is held."""
        return self._held.get(asked.key)

    def has_room(self) -> bool:
        """Whether a long segment is free, or held for nobody who reads it."""
        return self._segments.free_longs > 0 or any(self.idle(one) for one in self._held.values())

    def room(self, kept: Kept, step: int) -> bool:
        """Whether a long segment is free, if need be by letting go of what nobody reads, least recently used first."""
        if self._segments.free_longs:
            return True
        cached = [one for one in self._held.values() if self.idle(one)]
        if not cached:
            return False
        self.let_go(min(cached, key=lambda one: (one.used, one.context.number)), kept, step)
        return True

    def open(self, context: Context, asked: SharedPrefix, number: int, filled: int, step: int) -> SharedHistory:
        """A new one, as ``context`` brings it; a long segment is free. ``filled``: rows that are made up, not
        prefilled."""
        if asked.key in self._held:
            raise InvariantError(f"context {context.number} opens a shared history that is held")
        pseudo = context.request._replace(prompt_tokens=asked.tokens, sampling=Sampling(0), shared=None)
        history = Context(number, pseudo, context.entry, context.offset, self._segments.take(long=True))
        one = SharedHistory(asked.key, history, used=step)
        history.prefilled = min(filled, asked.tokens)
        one.look(step - 1)
        self._held[asked.key] = one
        return one

    def join(self, one: SharedHistory, context: Context, step: int) -> None:
        """``context`` starts behind it."""
        context.shared = one.context
        context.prefilled = max(context.prefilled, context.base)
        one.members[context.number] = context
        self.members += 1
        one.used = step

    def leave(self, context: Context, step: int) -> None:
        """A member's segment was given back: no step of it is in flight."""
        one = self.of(context)
        if one is not None and one.members.pop(context.number, None) is not None:
            one.used = step
            self.members -= 1

    def reclaim(self, kept: Kept, step: int) -> None:
        """What was left before it was whole goes as soon as nothing touches it."""
        for one in list(self._held.values()):
            if one.whole_at is None and self.idle(one):
                self.let_go(one, kept, step)

    def release(self, kept: Kept, step: int) -> None:
        """Everything that nobody reads goes."""
        for one in list(self._held.values()):
            if self.idle(one):
                self.let_go(one, kept, step)

    def lost(self, context: Context) -> str:
        """Why it cannot share what others share, and with which numbers; empty if it can, or nobody does."""
        own = context.request.own_tokens
        if not own_too_long(context.request, self._fit.own_rows):
            return ""
        return f"own part needs {own} tokens, --own-tokens holds {self._fit.own_rows}"

    def whole_wait(self, context: Context) -> Wait:
        """It needs a long segment, and none is free."""
        shared, rows = context.request.shared, context.most_rows
        words = self.lost(context)
        if not words and shared is not None:
            words = f"the {shared.tokens} tokens it shares need one"
        words = words or f"needs {rows} tokens and shares none, --own-tokens holds {self._fit.own_rows}"
        return WHOLE_SEGMENTS, f"{words}; all {self._segments.longs} of --shared-histories are owned"

    def let_go(self, one: SharedHistory, kept: Kept, step: int) -> None:
        """Its segment and device pages are free; refused while anyone reads it."""
        page = one.context.page
        if page is None or not self.idle(one):
            raise InvariantError(f"shared history {one.context.number} is let go while it is read")
        self._segments.give_back(page)
        one.context.page, one.context.ended = None, True
        del self._held[one.key]
        kept.leave(one.context.number, step)

    def joined(self, shares: Sequence[Share]) -> tuple[Joined, ...]:
        """The histories that these shares read, in the order of ``order``."""
        found: list[Joined] = []
        for index, share in enumerate(shares):
            history = share.context.shared
            if history is None:
                continue
            if found and found[-1].history is history:
                found[-1] = Joined(history, found[-1].first, found[-1].count + 1)
            else:
                found.append(Joined(history, index, 1))
        return tuple(found)

    def settle(self, kept: Kept) -> None:
        """A history is parked while all its members are: it counts as one context, active with any of them."""
        for one in self._held.values():
            if not any(kept.active(number) for number in one.members):
                kept.park(one.context.number)

    def idle(self, one: SharedHistory) -> bool:
        """Whether nobody reads it, and no step in flight touches it."""
        page = one.context.page
        return not one.members and not one.context.in_flight and page is not None and self._segments.may_recycle(page)

    def check(self, running: Collection[Context]) -> None:
        """Raise unless members are exactly the running contexts that share, and each history has its segment."""
        counted = 0
        for key, one in self._held.items():
            counted += len(one.members)
            if one.key != key or one.context.page is None or one.context.page.index < self._segments.count:
                raise InvariantError(f"shared history {one.context.number} has no long segment")
            if (one.whole_at is not None) != (one.context.prefilled == one.context.prompt_tokens):
                raise InvariantError(f"shared history {one.context.number} is whole and is not")
        sharing = [context for context in running if context.shared is not None]
        if not counted == self.members == len(sharing):
            raise InvariantError(f"{counted} members are booked, {self.members} counted, {len(sharing)} contexts share")
        for context in sharing:
            one_ = self.of(context)
            if one_ is None or one_.context is not context.shared or one_.members.get(context.number) is not context:
                raise InvariantError(f"context {context.number} shares a history that does not know it")
            if context.prefilled > context.base and one_.whole_at is None:
                raise InvariantError(f"context {context.number} ran before its shared history was whole")


def order(share: Share) -> tuple[int, bool, int]:
    """The order of shares in a step: by shared history, those without one first; those that decode before prompts; then
    by segment."""
    history = share.context.shared
    return -1 if history is None else history.number, share.prompt, share.page.index
