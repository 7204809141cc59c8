"""values: who runs in a step: contexts, their shares of it, and the histories that several of them share (H5).

A shared history is a context as well: it is prefilled like one and owns a segment, but samples nothing. Members start
behind it: their positions are absolute, their own rows count from ``base``. Knows no tensor and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import InvariantError
from worker.engine.headroom import Shift
from worker.engine.page_leases import HostPage
from worker.engine.retention import Placement
from worker.engine.served import Served
from worker.engine.story import Story
from worker.structures import Request


@dataclass(slots=True, eq=False)
class Context:
    """A request's sequence with its history, or a shared history. The scheduler and its books change it, nobody else.

    ``entry`` is the ring entry that holds its prompt, ``offset`` the prompt's first index in the ring's int32 view; a
    shared history has those of the request that brought it.
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
    """Why it is not admitted, or not brought in for its turn, with numbers; empty when it may run."""
    passed_by: int = 0
    """How many were admitted before it while it was the first of those waiting."""
    shared: Context | None = None
    """The history that it shares and starts behind; None runs by itself."""
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

    @property
    def base(self) -> int:
        """The position of its first own row."""
        return 0 if self.shared is None else self.shared.prompt_tokens

    @property
    def base_number(self) -> int:
        """The number of the history that it shares; -1 for none."""
        return -1 if self.shared is None else self.shared.number

    @property
    def own_rows(self) -> int:
        """Rows of its own segment planned so far."""
        return self.rows - self.base

    @property
    def most_rows(self) -> int:
        """Own rows of its longest possible history."""
        return self.prompt_tokens + self.request.sampling.max_tokens - self.base


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One context's part of a step: ``rows`` new rows from position ``start`` on."""

    context: Context
    start: int
    rows: int
    prompt: bool
    """The rows are the prompt's; else the first is the last sampled token's, and the only one without drafts."""
    number: int
    """Which of its answer's tokens the first row that samples gives (from 0); -1 for a chunk inside the prompt."""
    ids: tuple[int, ...] = ()
    """The tokens of its rows, where tokens are drafted: the last one and those that may follow, each row samples. Empty
    elsewhere: the last sampled token is on the device."""

    @property
    def sampled_rows(self) -> int:
        """Its last so many rows sample a token each."""
        return max(1, len(self.ids)) if self.samples else 0

    @property
    def own_start(self) -> int:
        """Its first row, counted from the context's first own row."""
        return self.start - self.context.base

    @property
    def samples(self) -> bool:
        return self.number >= 0

    @property
    def page(self) -> HostPage:
        if self.context.page is None:
            raise InvariantError(f"context {self.context.number} is in a step without a segment")
        return self.context.page


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """Rows of a context's history that are copied into its pages before its turn."""

    number: int
    page: HostPage
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A shared history in a step, and the shares that read it: ``count`` of them from ``first`` on."""

    history: Context
    first: int
    count: int
    placement: Placement | None = None
    """Where its rows are; None when nothing is retained."""

    @property
    def page(self) -> HostPage:
        if self.history.page is None:
            raise InvariantError(f"shared history {self.history.number} is in a step without a segment")
        return self.history.page


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Who runs in one step: those that share a history last, by history, so that the queries of each are contiguous;
    those that decode before prompts (``shared.order``)."""

    step: int
    shares: tuple[Share, ...]
    placements: tuple[Placement, ...] = ()
    """Where the history of each share's context is; empty when nothing is retained."""
    prefetches: tuple[Prefetch, ...] = ()
    """Contexts that do not run in this step and are brought in beside it (H6)."""
    joined: tuple[Joined, ...] = ()
    """The shared histories of its last shares, in their order (H5)."""
    shifts: tuple[Shift, ...] = ()
    """Pages that move within headroom, after attention (H2)."""

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)
