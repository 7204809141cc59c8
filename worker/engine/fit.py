"""rules: A5, A6 and A7: how many whole histories fit, as arithmetic with its numbers, and what never can.

A hybrid's linear-attention layers keep a state of fixed size for each segment, out of the device pages as well.
The host pool has one segment for each context, and some for histories that several share (H5). With ``--own-tokens``
the contexts' are short: only those behind them hold a whole history, shared or of one request alone.
Pure functions of geometry and settings. Knows no device and allocates nothing; the pools allocate what is decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config import GIB, EngineSettings
from common.errors import RefusedError
from worker.engine.admission import FLOOR_PAGES
from worker.engine.geometry import Geometry

SLOTS = 2
"""Staging slots: the next layer's copy runs into one while attention reads the other."""

PAGES_OF_ALL = 2
"""More pages than so many times all histories are not booked: enough that a run is found between others."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the pools allocate. Rows are tokens; a row of a slot is one layer's K and V of one token."""

    concurrency: int
    """Effective: the contexts that run together (A5), each with a segment of ``own_rows`` in each dense layer."""
    context_rows: int
    """Rows of a whole history: the longest context, rounded up to whole pages."""
    page_rows: int
    slot_rows: int
    """Rows of one staging slot; 0 with ``--residency full``."""
    arena_rows: int
    """Rows of the device page pool: K and V of one layer of one token each; the last one is nobody's (``sink_row``)."""
    host_bytes: int
    """Bytes of the host pool that are used; 0 with ``--residency full``."""
    slot_bytes: int
    formula: tuple[str, ...]
    """What is printed at start."""
    pages: int = 0
    """Pages of history kept on the device, each of ``page_rows`` rows in every layer; behind the slots in the arena."""
    longs: int = 0
    """Segments of ``context_rows`` behind those of the contexts: for shared histories (H5)."""
    whole: bool = False
    """Whether a context runs only with its whole history in device pages: then slots hold nothing."""
    short_rows: int = 0
    """Rows of a context's segment with ``--own-tokens``; 0: ``context_rows``, as everywhere else."""
    state_bytes: int = 0
    """Bytes of the states of a hybrid's linear-attention layers, of all segments; beside the arena."""

    @property
    def staged(self) -> bool:
        """Whether histories may be attended in slots."""
        return self.slot_rows > 0 and not self.whole

    @property
    def own_rows(self) -> int:
        """Rows of a context's segment."""
        return self.short_rows or self.context_rows

    @property
    def useful_rows(self) -> int:
        """Rows of history that all contexts of a step can need: more of it on the device serves nobody."""
        return _needed(self.concurrency, self.own_rows, self.longs * self.context_rows, short=bool(self.short_rows))

    @property
    def segments(self) -> int:
        """Segments of each dense layer: the contexts', then those for shared histories."""
        return self.concurrency + self.longs

    @property
    def rows(self) -> int:
        """Rows of all segments of one layer."""
        return self.segment_first(self.segments)

    def segment_first(self, index: int) -> int:
        """The row of a layer at which a segment begins; where the last one ends, for the index behind it."""
        own = min(index, self.concurrency)
        return own * self.own_rows + (index - own) * self.context_rows

    @property
    def sink_row(self) -> int:
        """The arena's last row, which nobody owns: what rows that only pad a step write, and all they attend to."""
        return self.arena_rows - 1

    def page_bytes(self, geometry: Geometry) -> int:
        """Bytes of all retained pages."""
        return self.pages * self.page_rows * geometry.token_bytes

    def slot_first(self, slot: int) -> int:
        """The arena row at which a staging slot begins."""
        return slot * self.slot_rows

    def layer_first(self, layer: int) -> int:
        """The arena row at which a layer's pages begin: consecutive pages are consecutive rows of each layer."""
        return SLOTS * self.slot_rows + layer * self.pages * self.page_rows


def _with_sink(arena_rows: int, used: int) -> int:
    """One row more than are used: one of the pool's, if it is not full to the last."""
    return max(arena_rows, used + 1)


def rounded_up(rows: int, page_rows: int) -> int:
    """``rows`` rounded up to whole pages."""
    return -(-rows // page_rows) * page_rows


def _needed(concurrency: int, own: int, beside: int, *, short: bool) -> int:
    """Rows of a layer that all contexts of a step can need: where each has room for a whole history, sharing needs none
    beside it."""
    return concurrency * own + (beside if short else 0)


def _gib(amount: float) -> str:
    return f"{amount / GIB:.3f} GiB"


def _need_gib(amount: int) -> float:
    """``amount`` bytes in GiB, rounded up to three digits: what a setting must at least say."""
    return math.ceil(amount / GIB * 1000) / 1000


def _state_rows(geometry: Geometry) -> int:
    """Rows of the device pages that the states of one context take the place of."""
    return -(-geometry.state_bytes // geometry.layer_token_bytes)


def _keep_states(geometry: Geometry, settings: EngineSettings, segments: int, lines: list[str]) -> tuple[int, int]:
    """Rows of the device pages that are left, and bytes of the states of all segments."""
    rows = settings.device_pages_gib * GIB // geometry.layer_token_bytes
    held = segments * geometry.state_bytes
    if geometry.linear is None:
        return rows, 0
    lines.append(
        f"linear-attention states = {segments} segments x {geometry.state_bytes} B of {len(geometry.linear.layers)} "
        f"layers = {_gib(held)} of {settings.device_pages_gib} GiB of device pages"
    )
    return rows - segments * _state_rows(geometry), held


def _with_states(geometry: Geometry) -> str:
    """For a refusal: what else takes the pages."""
    return "" if geometry.linear is None else f", each context with states of {_gib(geometry.state_bytes)} beside them"


def _refuse_drafts(geometry: Geometry, settings: EngineSettings) -> None:
    if settings.draft_tokens and geometry.linear is not None:
        raise RefusedError(
            f"--draft-tokens {settings.draft_tokens}: model type {geometry.model_type} has linear-attention layers, "
            "whose states cannot be taken back behind a token that was drafted and not taken; set --draft-tokens 0"
        )


def _bounded(fitting: int, settings: EngineSettings, configured: int, words: str, remedy: str) -> int:
    """A6: ``fitting`` histories fit where ``configured`` were asked for."""
    if fitting >= configured:
        return configured
    if fitting < 1 or settings.fit == "refuse":
        raise RefusedError(f"{words}; {remedy}" + (", or --fit shrink" if fitting >= 1 else ""))
    return fitting


def _slot_rows(geometry: Geometry, settings: EngineSettings, most: int, context_rows: int) -> int:
    """``most`` rows are as many as all contexts of a step can need."""
    page = settings.page_tokens
    if not settings.slot_gib:
        return most
    rows = int(settings.slot_gib * GIB) // geometry.layer_token_bytes // page * page
    if rows < context_rows:
        need = _need_gib(context_rows * geometry.layer_token_bytes)
        raise RefusedError(
            f"--slot-gib {settings.slot_gib} holds {rows} rows of one layer, one context needs {context_rows}; "
            f"set --slot-gib to {need} or more, or lower --context-tokens"
        )
    return min(rows, most)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Rows of a layer's segments: ``own`` for each context, and ``longs`` whole ones beside them."""

    own: int
    longs: int
    context: int
    short: bool

    @property
    def beside(self) -> int:
        return self.longs * self.context

    def holds(self, rows: int) -> int:
        """Contexts for which ``rows`` have room."""
        return max(0, rows - self.beside) // self.own

    def slot(self, concurrency: int) -> int:
        """Rows that all contexts of a step can need."""
        return _needed(concurrency, self.own, self.beside, short=self.short)

    def words(self, token_bytes: int) -> str:
        """What stands beside the contexts' own, and how large those are."""
        beside = f" beside {self.longs} of {_gib(self.context * token_bytes)}" if self.longs else ""
        return f"{'own parts' if self.short else 'histories'} of {_gib(self.own * token_bytes)}{beside}"

    @property
    def remedy(self) -> str:
        """Settings that make it smaller."""
        more = "--own-tokens, --shared-histories, " if self.short else "--shared-histories, " if self.longs else ""
        return f"{more}--concurrency or --context-tokens"


def _kinds(settings: EngineSettings, context_rows: int) -> _Kinds:
    if settings.own_tokens:
        own = rounded_up(settings.own_tokens, settings.page_tokens)
        return _Kinds(own, max(1, settings.shared_histories), context_rows, own < context_rows)
    return _Kinds(context_rows, max(0, settings.shared_histories), context_rows, short=False)


def _longs(settings: EngineSettings, kinds: _Kinds, concurrency: int, left: int, lines: list[str]) -> int:
    """Whole histories beside the contexts' own: as asked for, or, where nothing was, as many as are ``left``."""
    longs, words = kinds.longs, "as asked for"
    if settings.shared_histories < 0 and not kinds.short:
        longs, words = min(left, concurrency), f"min({left} more histories, {concurrency})"
    what = "whole histories, shared or of one request alone" if kinds.short else "shared histories"
    lines.append(f"{what} held at once = {words} = {longs}")
    return longs


def _spread(geometry: Geometry, ranks: int) -> list[str]:
    """Of a model on several devices the arithmetic is each one's."""
    heads = geometry.kv_heads
    return (
        [f"each of {ranks} ranks has {heads} of {ranks * heads} key heads, and pools of its own:"] if ranks > 1 else []
    )


def fit(geometry: Geometry, settings: EngineSettings) -> Fit:
    """How much of what was asked for fits, or ``RefusedError`` naming the setting to change (A6).

    effective concurrency = min(configured, host pool // one history, what the device pages hold).
    """
    page = settings.page_tokens
    context_rows = rounded_up(settings.context_tokens, page)
    history = context_rows * geometry.token_bytes
    lines = [
        *_spread(geometry, settings.tensor_parallel),
        f"bytes per token = {geometry.layers} layers x 2 x {geometry.kv_heads} heads x {geometry.head_dim} x "
        f"{geometry.dtype_bytes} B = {geometry.token_bytes}",
        f"one history = {context_rows} rows x {geometry.token_bytes} B = {_gib(history)}",
    ]
    _refuse_drafts(geometry, settings)
    arena_rows = settings.device_pages_gib * GIB // geometry.layer_token_bytes
    state_rows = _state_rows(geometry)
    if settings.residency == "full":
        return _full(geometry, settings, context_rows, arena_rows, lines)
    pool = int(settings.host_pool_gib * GIB)
    kinds = _kinds(settings, context_rows)
    own = kinds.words(geometry.token_bytes)
    held = kinds.holds(pool // geometry.token_bytes)
    lines.append(f"host pool {settings.host_pool_gib} GiB holds {held} {own}, each of {geometry.layers} segments")
    wanted = settings.concurrency
    need_bytes = (kinds.beside + wanted * kinds.own) * geometry.token_bytes
    concurrency = _bounded(
        held,
        settings,
        wanted,
        f"--host-pool-gib {settings.host_pool_gib} holds {held} {own}, --concurrency {wanted} needs {_gib(need_bytes)}",
        f"set --host-pool-gib to {_need_gib(need_bytes)} or more, or lower {kinds.remedy}",
    )
    concurrency, slot_rows = _slots(geometry, settings, kinds, concurrency, arena_rows)
    left = pool // geometry.token_bytes // context_rows - concurrency
    if state_rows:
        left = min(left, (arena_rows - SLOTS * slot_rows) // state_rows - concurrency)
    longs = _longs(settings, kinds, concurrency, left, lines)
    arena_rows, state_bytes = _keep_states(geometry, settings, concurrency + longs, lines)
    slot_bytes = slot_rows * geometry.layer_token_bytes
    lines.append(
        f"staging slots = 2 x {slot_rows} rows x {geometry.layer_token_bytes} B = {_gib(2 * slot_bytes)} "
        f"of {settings.device_pages_gib} GiB of device pages"
    )
    pages = _pages(geometry, settings, arena_rows - SLOTS * slot_rows, concurrency, kinds.slot(concurrency), lines)
    lines.append(f"effective concurrency = min({wanted}, {held} on the host, what two slots hold) = {concurrency}")
    host_bytes = (concurrency * kinds.own + longs * context_rows) * geometry.token_bytes
    arena_rows = _with_sink(arena_rows, SLOTS * slot_rows + geometry.layers * pages * page)
    return Fit(
        concurrency, context_rows, page, slot_rows, arena_rows, host_bytes, slot_bytes, tuple(lines), pages, longs,
        settings.retain == "whole", kinds.own if kinds.short else 0, state_bytes,
    )  # fmt: skip


def _slots(
    geometry: Geometry, settings: EngineSettings, kinds: _Kinds, concurrency: int, arena_rows: int
) -> tuple[int, int]:
    """How many of ``concurrency`` contexts the device pages hold, and the rows of one slot for them."""
    state_rows, states = _state_rows(geometry), _with_states(geometry)
    if settings.retain == "whole":
        return concurrency, settings.page_tokens
    if settings.slot_gib:
        slot_rows = _slot_rows(geometry, settings, kinds.slot(concurrency), kinds.context)
        if SLOTS * slot_rows > arena_rows - (concurrency + kinds.longs) * state_rows:
            raise RefusedError(
                f"two staging slots of {_gib(slot_rows * geometry.layer_token_bytes)}{states} do not fit into "
                f"--device-pages-gib {settings.device_pages_gib}; raise it or lower --slot-gib"
            )
        return concurrency, slot_rows
    beside_rows = SLOTS * kinds.slot(0) + kinds.longs * state_rows
    held = max(0, arena_rows - beside_rows) // (SLOTS * kinds.own + state_rows)
    need_rows = SLOTS * kinds.slot(concurrency) + (concurrency + kinds.longs) * state_rows
    need = math.ceil(need_rows * geometry.layer_token_bytes / GIB)
    beside = f"{kinds.slot(0)} rows and " if kinds.slot(0) else ""
    concurrency = _bounded(
        held,
        settings,
        concurrency,
        f"--device-pages-gib {settings.device_pages_gib} holds two staging slots of {beside}{held} contexts x "
        f"{kinds.own} rows x {geometry.layer_token_bytes} B{states}, --concurrency {concurrency} needs {need} GiB",
        f"set --device-pages-gib to {need} or more, lower {kinds.remedy}, or set --slot-gib",
    )
    return concurrency, _slot_rows(geometry, settings, kinds.slot(concurrency), kinds.context)


def _pages(
    geometry: Geometry, settings: EngineSettings, rows: int, concurrency: int, all_rows: int, lines: list[str]
) -> int:
    """Pages of history that what is left of the device pages holds; none when the floors (A2) do not fit."""
    if settings.retain == "off":
        return 0
    page = settings.page_tokens
    context_pages = rounded_up(settings.context_tokens, page) // page
    pages = min(rows // (geometry.layers * page), PAGES_OF_ALL * all_rows // page)
    if settings.retain == "whole" and pages < context_pages:
        need = _need_gib((context_pages + 1) * geometry.layers * page * geometry.layer_token_bytes)
        raise RefusedError(
            f"--retain whole: --device-pages-gib {settings.device_pages_gib} holds {pages} pages, one context needs "
            f"{context_pages}; set --device-pages-gib to {math.ceil(need)} or more, lower --context-tokens, or "
            "--retain on"
        )
    floors = concurrency * (settings.target_pages or FLOOR_PAGES)
    words = (
        f"retained pages = min({rows} rows left // ({geometry.layers} layers x {page} rows), "
        f"{PAGES_OF_ALL} x all histories) = {pages}"
    )
    if settings.retain == "whole":
        lines.append(f"{words}, {pages / context_pages:.2f} whole histories: so many requests run at once")
        return pages
    if pages < concurrency * FLOOR_PAGES:
        lines.append(f"{words}, fewer than {FLOOR_PAGES} for each of {concurrency} contexts: nothing is retained")
        return 0
    words += f", {pages / context_pages:.2f} whole histories"
    if floors > pages:
        at_once = max(1, pages // settings.target_pages)
        words += f"; --target-pages {settings.target_pages} lets {at_once} contexts run at once"
    lines.append(words)
    return pages


def _full(geometry: Geometry, settings: EngineSettings, context_rows: int, arena_rows: int, lines: list[str]) -> Fit:
    kinds = _kinds(settings, context_rows)
    state_rows, own = _state_rows(geometry), kinds.words(geometry.token_bytes)
    one, long = kinds.own * geometry.layers + state_rows, context_rows * geometry.layers + state_rows
    held = max(0, arena_rows - kinds.longs * long) // one
    need = math.ceil((kinds.longs * long + settings.concurrency * one) * geometry.layer_token_bytes / GIB)
    own += _with_states(geometry)
    concurrency = _bounded(
        held,
        settings,
        settings.concurrency,
        f"--residency full: --device-pages-gib {settings.device_pages_gib} holds {held} whole {own}, "
        f"--concurrency {settings.concurrency} needs {need} GiB",
        f"set --device-pages-gib to {need} or more, or lower {kinds.remedy}",
    )
    lines.append(f"device pages {settings.device_pages_gib} GiB hold {held} {own}")
    longs = _longs(settings, kinds, concurrency, (arena_rows - concurrency * one) // long, lines)
    arena_rows, state_bytes = _keep_states(geometry, settings, concurrency + longs, lines)
    lines.append(f"effective concurrency = min({settings.concurrency}, {held} on the device) = {concurrency}")
    pages = (concurrency * kinds.own + longs * context_rows) // settings.page_tokens
    arena_rows = _with_sink(arena_rows, geometry.layers * pages * settings.page_tokens)
    return Fit(
        concurrency, context_rows, settings.page_tokens, 0, arena_rows, 0, 0, tuple(lines), pages, longs,
        False, kinds.own if kinds.short else 0, state_bytes,
    )  # fmt: skip


def never_fits(prompt_tokens: int, max_tokens: int, context_tokens: int) -> str | None:
    """A7: why a request can never run here, with its numbers, or None. Its surplus rows fit: none is ever planned past
    ``max_tokens``."""
    if prompt_tokens < 1:
        return "the prompt has no tokens"
    if max_tokens < 0:
        return f"max_tokens {max_tokens} is below 0"
    if prompt_tokens + max_tokens > context_tokens:
        return (
            f"prompt {prompt_tokens} + max_tokens {max_tokens} = {prompt_tokens + max_tokens} tokens is more than "
            f"--context-tokens {context_tokens}"
        )
    return None
