"""shell: H4 as a table: companies of contexts by lengths, with and without shared histories, on each route, bit for
bit against ``--residency full``.

A ``Scenario`` says which prompts arrive and which are cancelled before which step; ``play`` runs it on the calling
thread and keeps each step's schedule and logits. A cell of a route is equal when every step has the schedule of the
reference and its logits are ``torch.equal``; it counts only if the route was really taken, which its bytes show. Knows
no command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from common.config import GIB, EngineSettings
from common.errors import InvariantError
from worker.engine.admission import PagePool
from worker.engine.contexts import StepPlan
from worker.engine.geometry import Geometry
from worker.engine.headroom_memory import HeadroomMemory
from worker.engine.local import LocalEngine
from worker.engine.model import LoadedModel
from worker.engine.retention import Retention
from worker.structures import Finished, Sampling, SharedPrefix

COMPANIES = ("1 context", "4 equal", "8 mixed with churn", "8 on shared histories")
LENGTHS = ("short", "page-aligned", "one past a page", "long")
ROUTES = ("streamed", "retained", "retained in part", "headroom", "H1+H2")
"""Everything comes over the link; whole histories in place in device pages; some pages kept, the rest over the link;
pages kept in headroom alone; some in device pages, some in headroom, the rest over the link. Of headroom a part is
given back in the middle, and taken again."""
HEADROOM_ROUTES = ROUTES[3:]
CONCURRENCY = 4
"""Segments of the host pool: the eight contexts of the churn take them in turn."""
SHARED_HISTORIES = 2
"""Segments beside those: the last company's documents (H5)."""
CONTEXT_PAGES, CHUNK_PAGES = 12, 2
CHUNK_HEADROOM_PAGES, ALONE_CHUNKS, PART_CHUNKS = 2, 2, 7
"""Headroom for one context and for more: fewer pages than their long histories."""
REVOKED_AT = {4: 1, 7: 2, 12: 9}
"""Before which turn how many chunks are given back; all of them at last."""
TAKEN_AGAIN_AT = (10, 16)
_DOCUMENT_SALT = 500
"""Documents differ from every prompt."""
ALONE_PAGES, PART_PAGES, SHARED_PART_PAGES = 4, 10, 14
"""Device pages of the route in part, for one context, for more, and with shared histories: fewer than their long
histories, no fewer than their floors, so that pages are taken, lost and kept."""

Prepare = Callable[[LocalEngine], None]
"""Sees an engine before its first step, or after its last one."""
Each = Callable[[LocalEngine, int], None]
"""Sees an engine after each turn."""
Step = tuple[tuple[tuple[int, int, int], ...], torch.Tensor]
"""Which contexts computed which rows (number, first row, rows), which histories were shared by whom (number, first of
these contexts, how many), and the logits."""


def _nothing(local: LocalEngine, turn: int = 0) -> None:
    """For ``Prepare`` and ``Each`` where there is nothing to do."""


# -- scenarios ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """``prompts`` of (length, sampling), published in batches before the steps in ``arrive``; cancels likewise.
    ``shared``, for each prompt if there is any: which document it begins with and that one's tokens, or None; without
    ``share`` the prompts are the same and nobody is told so (H5)."""

    prompts: tuple[tuple[int, Sampling], ...]
    arrive: dict[int, tuple[int, ...]]
    cancel: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shared: tuple[tuple[int, int] | None, ...] = ()
    share: bool = True

    def prompt(self, number: int, vocabulary: int) -> list[int]:
        """The token ids of one prompt."""
        length, document = self.prompts[number][0], self._document(number)
        if document is None:
            return prompt(length, number, vocabulary)
        which, tokens = document
        return prompt(tokens, _DOCUMENT_SALT + which, vocabulary) + prompt(length - tokens, number, vocabulary)

    def prefix(self, number: int) -> SharedPrefix | None:
        """What it shares."""
        document = self._document(number)
        return None if document is None or not self.share else SharedPrefix(f"document {document}", document[1])

    def _document(self, number: int) -> tuple[int, int] | None:
        return self.shared[number] if self.shared else None


def together(*lengths: int, tokens: int = 5, **sampling: Any) -> Scenario:
    """All at once."""
    prompts = tuple((length, Sampling(tokens, **sampling)) for length in lengths)
    return Scenario(prompts, {0: tuple(range(len(lengths)))})


def tokens_of(length: str, page: int) -> int:
    """Prompt tokens of one of ``LENGTHS``."""
    return (page - 1, 2 * page, 2 * page + 1, 10 * page)[LENGTHS.index(length)]


def scenario(company: str, length: str, page: int) -> Scenario:
    """A cell's requests. The churn joins and finishes at unequal lengths around the cell's; one context is cancelled
    while it decodes, one before it has a token."""
    rows = tokens_of(length, page)
    if company == COMPANIES[0]:
        return together(rows, tokens=4)
    if company == COMPANIES[1]:
        return together(*[rows] * 4, tokens=4)
    if company == COMPANIES[3]:
        return _on_documents(length, page)
    most = tokens_of("long", page)
    around = [max(1, min(most, rows + shift)) for shift in (0, 1, -1, 0, page, -page, 2, 0)]
    answers = (1, 2, 8, 3, 5, 6, 4, 7)
    decodes = 3 + sum(around[:3]) // (CHUNK_PAGES * page)
    cancel: dict[int, tuple[int, ...]] = {decodes: (2,)}
    cancel[8] = (*cancel.get(8, ()), 6)
    prompts = tuple((one, Sampling(tokens)) for one, tokens in zip(around, answers, strict=True))
    return Scenario(prompts, {0: (0, 1), 1: (2, 3, 4), 4: (5, 6), 6: (7,)}, cancel)


def _on_documents(length: str, page: int) -> Scenario:
    """Questions on two documents, and two contexts alone, come and go; own parts are unequal around the length's; the
    one that brings the first document is cancelled while it decodes, one before it has a token."""
    pages = (1, 2, 2, 9)[LENGTHS.index(length)]
    first, second = (0, pages * page), (1, max(1, pages - 1) * page)
    documents = (first, first, None, first, second, second, first, None)
    own = (page - 1, page, page + 1, page)[LENGTHS.index(length)]
    answers, shifts = (8, 2, 5, 3, 5, 4, 4, 6), (0, 0, 0, -1, 0, -1, -2, 1)
    prompts = tuple(
        ((document[1] if document else pages * page) + max(1, own + shift), Sampling(tokens))
        for document, shift, tokens in zip(documents, shifts, answers, strict=True)
    )
    decodes = 4 + pages // CHUNK_PAGES
    arrive = {0: (0, 1), 1: (2, 3, 4), 4: (5, 6), 6: (7,)}
    cancel: dict[int, tuple[int, ...]] = {decodes: (0, 6)} if decodes == 8 else {decodes: (0,), 8: (6,)}
    return Scenario(prompts, arrive, cancel, documents)


def prompt(length: int, salt: int, vocabulary: int) -> list[int]:
    """Distinct data: no two prompts share rows."""
    chance = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(1, vocabulary, (length,), generator=chance).tolist()


# -- playing ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run gave, with one ``Step`` a step."""

    steps: list[Step]
    finished: dict[int, Finished]
    local: LocalEngine

    @property
    def answers(self) -> dict[int, Finished]:
        """What finished, without the notes: those tell seconds and pages, which differ from run to run."""
        return {number: one._replace(notes="") for number, one in self.finished.items()}

    @property
    def tokens(self) -> dict[int, tuple[int, ...]]:
        return {number: tuple(one.token_ids) for number, one in self.finished.items()}


def play(
    loaded: LoadedModel,
    settings: EngineSettings,
    script: Scenario,
    prepare: Prepare = _nothing,
    rested: Prepare = _nothing,
    each: Each = _nothing,
) -> Outcome:
    """Run a scenario to its end, books checked at every step; ``rested`` looks once nothing runs any more."""
    steps: list[Step] = []

    def watch(plan: StepPlan, logits: torch.Tensor) -> None:
        own = tuple((s.context.number, s.start, s.rows) for s in plan.shares)
        shared = tuple((one.history.number, one.first, one.count) for one in plan.joined)
        steps.append((own + shared, logits.clone()))

    tokens = sum(length for length, _ in script.prompts)
    ring_bytes = 1 << max(20, math.ceil(math.log2(8 * tokens)))
    local = LocalEngine(loaded, settings, ring_bytes=ring_bytes, watch=watch)
    try:
        prepare(local)
        for turn in _turns(local, script, loaded.geometry.vocabulary):
            local.engine.check()
            each(local, turn)
        rested(local)
    finally:
        ended = local.close()
    if not ended.proved or len(local.finished) != len(script.prompts):
        raise InvariantError(f"the engine ended with {len(local.finished)} answers: {ended.reason}")
    return Outcome(steps, dict(local.finished), local)


def _turns(local: LocalEngine, script: Scenario, vocabulary: int) -> Iterator[int]:
    """Each step once it was taken, until nothing is left to do and nothing more comes."""
    turn, last = 0, max([*script.arrive, *script.cancel])
    worked = True
    while worked or turn <= last:
        arriving = script.arrive.get(turn, ())
        if arriving:
            local.submit(
                [script.prompt(number, vocabulary) for number in arriving],
                [script.prompts[number][1] for number in arriving],
                [script.prefix(number) for number in arriving],
            )
        if turn in script.cancel:
            local.cancel(script.cancel[turn])
        worked = local.step()
        yield turn
        turn += 1


def equal_steps(one: Outcome, other: Outcome) -> int:
    """Steps in which both ran the same schedule and have the same bits."""
    return sum(
        plan == plan_ and torch.equal(logits, logits_)
        for (plan, logits), (plan_, logits_) in zip(one.steps, other.steps, strict=False)
    )


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two runs had the same schedule and the same bits in every step's logits."""
    return len(one.steps) == len(other.steps) == equal_steps(one, other)


# -- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of one route. ``taken`` says that its bytes are those of the route: hits on a retained one alone."""

    route: str
    company: str
    length: str
    tokens: int
    """Of the cell's prompts, which the churn varies."""
    steps: int
    equal: int
    hit_bytes: int
    staged_bytes: int
    headroom_bytes: int = 0

    @property
    def taken(self) -> bool:
        """Short histories lie whole in few pages: only long ones must be in part on the device, in part not."""
        pages, headroom, link = self.hit_bytes > 0, self.headroom_bytes > 0, self.staged_bytes > 0
        if self.route in ("streamed", "retained"):
            return (pages, headroom, link) == (self.route == "retained", False, self.route == "streamed")
        if self.length == "long":
            return (pages, headroom, link) == (self.route != "headroom", self.route in HEADROOM_ROUTES, True)
        return (pages, headroom) == (False, True) if self.route == "headroom" else pages

    @property
    def passed(self) -> bool:
        return 0 < self.steps == self.equal and self.taken


def cell_settings(geometry: Geometry, base: EngineSettings, route: str | None) -> EngineSettings:
    """Pools as large as the cells need, of the same size on every route; None is the reference."""
    rows = (CONCURRENCY + SHARED_HISTORIES) * CONTEXT_PAGES * base.page_tokens
    pages_gib = math.ceil((2 * geometry.layers + 2) * rows * geometry.layer_token_bytes / GIB)
    return replace(
        base,
        device_pages_gib=max(1, pages_gib),
        host_pool_gib=math.ceil(rows * geometry.token_bytes / GIB * 1024) / 1024,
        concurrency=CONCURRENCY,
        context_tokens=CONTEXT_PAGES * base.page_tokens,
        chunk_tokens=CHUNK_PAGES * base.page_tokens,
        residency="full" if route is None else "staged",
        retain="off" if route in (None, "streamed", "headroom") else "on",
        shared_histories=SHARED_HISTORIES,
    )


def in_part(company: str, page: int) -> Prepare:
    """History is kept in few pages; nobody is parked, so that the schedule stays the reference's."""

    def prepare(local: LocalEngine) -> None:
        pages = {COMPANIES[0]: ALONE_PAGES, COMPANIES[3]: SHARED_PART_PAGES}.get(company, PART_PAGES)
        pool = PagePool(pages)
        local.engine.scheduler.kept.retention = Retention(pool, page)
        local.engine.scheduler.turns = None

    return prepare


def with_headroom(company: str, page: int) -> Prepare:
    """History is kept in small chunks of headroom; nobody is parked."""

    def prepare(local: LocalEngine) -> None:
        engine, loaded = local.engine, local.engine.loaded
        chunk_bytes = CHUNK_HEADROOM_PAGES * page * loaded.geometry.token_bytes
        most = ALONE_CHUNKS if company == COMPANIES[0] else PART_CHUNKS
        memory = HeadroomMemory(engine.device, loaded.geometry, page, loaded.dtype, chunk_bytes, most=most)
        memory.fill()
        engine.use(memory)
        engine.scheduler.turns = None

    return prepare


def revoking(local: LocalEngine, turn: int) -> None:
    """Chunks are given back while they are read, and taken again."""
    local.engine.headroom.revoke(REVOKED_AT.get(turn, 0))
    if turn in TAKEN_AGAIN_AT:
        local.engine.headroom.fill()


def play_cell(
    fresh: LoadedModel,
    base: EngineSettings,
    route: str | None,
    company: str,
    length: str,
    prepare: Prepare = _nothing,
    rested: Prepare = _nothing,
) -> Outcome:
    """One cell on one route, or with everything resident (None). ``fresh`` is the model on a device nobody used."""

    def prepared(local: LocalEngine) -> None:
        if route in ("retained in part", "H1+H2"):
            in_part(company, base.page_tokens)(local)
        if route in HEADROOM_ROUTES:
            with_headroom(company, base.page_tokens)(local)
        prepare(local)

    settings = cell_settings(fresh.geometry, base, route)
    each = revoking if route in HEADROOM_ROUTES else _nothing
    return play(fresh, settings, scenario(company, length, base.page_tokens), prepared, rested, each)


def cell(route: str, company: str, length: str, page: int, outcome: Outcome, reference: Outcome) -> Cell:
    """What the cell's run says beside the reference."""
    engine, steps = outcome.local.engine, max(len(outcome.steps), len(reference.steps))
    return Cell(
        route, company, length, tokens_of(length, page), steps, equal_steps(outcome, reference), engine.hit_bytes,
        engine.transport.bytes_in, engine.headroom_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A company at a length: one ``Cell`` a route. The first control is that the reference repeats itself."""

    repeats: bool
    cells: tuple[Cell, ...]


def table(
    fresh: Callable[[], LoadedModel],
    base: EngineSettings,
    prepare: Prepare = _nothing,
    companies: Sequence[str] = COMPANIES,
    lengths: Sequence[str] = LENGTHS,
) -> Iterator[Row]:
    """Every cell on every route, row by row as they are measured. ``fresh`` gives the same weights on a device nobody
    used. ``prepare`` sees the engines of the routes, and not the reference's: whatever it breaks must show."""
    for company in companies:
        for length in lengths:
            reference = play_cell(fresh(), base, None, company, length)
            repeats = same(reference, play_cell(fresh(), base, None, company, length))
            found = []
            for route in ROUTES:
                outcome = play_cell(fresh(), base, route, company, length, prepare)
                found.append(cell(route, company, length, base.page_tokens, outcome, reference))
            yield Row(repeats, tuple(found))
