"""values: what crosses the boundaries inside a worker, in order of flow (style habit 8). Knows no thread and no device.

socket -> ``TokenizeJob`` -> tokenizer -> ``Prepared`` or ``Failed`` -> session -> ring -> engine -> ``Finished`` ->
tokenizer (text and response body) -> ``Outcome`` -> session -> outbox -> socket.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common import limits
from common.messages import LineRef


class Sampling(NamedTuple):
    """How the next token is chosen, when to stop. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer (the model's end-of-sequence ids among them); never part of it."""


class TokenizeJob(NamedTuple):
    """A line as it came: the whole ``body`` (JSON bytes of the request)."""

    ref: LineRef
    url: str
    body: bytes


class SharedPrefix(NamedTuple):
    """The first ``tokens`` of a prompt, which other requests of its job begin with too (H5): whole pages, fewer than
    the prompt. ``key`` stands for the job and these very token ids."""

    key: str
    tokens: int


class Request(NamedTuple):
    """A line the engine can run; its token ids travel in the ring beside it."""

    ref: LineRef
    url: str
    model: str
    """The name to repeat in the answer."""
    prompt_tokens: int
    sampling: Sampling
    shared: SharedPrefix | None = None
    text: array[int] | None = None
    """The prompt's int32 token ids, kept on the host where tokens are drafted from them."""

    @property
    def own_tokens(self) -> int:
        """Its own part: what of prompt and answer lies behind the pages that it may share."""
        return self.prompt_tokens + self.sampling.max_tokens - (0 if self.shared is None else self.shared.tokens)


class Prepared(NamedTuple):
    """A tokenized line: int32 ``token_ids`` go into the ring's payload."""

    request: Request
    token_ids: array[int]


class Finished(NamedTuple):
    """What the engine has to say about a request, once. ``token_ids`` are the answer's, without a stop token."""

    request: Request
    token_ids: Sequence[int]
    reason: str
    """``stop``, ``length``, ``cancelled`` or ``failed`` (then ``error`` says why)."""
    error: str = ""
    text_chars: int | None = None
    """Set when a stop string begins inside a token: the answer is the first so many characters of the decoded text."""
    notes: str = ""
    """What it waited for and which device pages moved for it, one note a line (``worker.engine.story``)."""


class Outcome(NamedTuple):
    """A finished line as the outbox stores it. ``body`` is the JSON of the output line's response body."""

    ref: LineRef
    status: str
    """``ok``, ``failed`` or ``cancelled``."""
    status_code: int
    prompt_tokens: int
    completion_tokens: int
    body: bytes
    notes: str = ""

    @property
    def size(self) -> int:
        """Bytes on its way (``carried_bytes``)."""
        return carried_bytes(len(self.body), len(self.notes))


def carried_bytes(body: int, notes: int) -> int:
    """What a result counts as on its way: its notes go with it, but do not make a short one long; of a long one the
    parts are the body's alone."""
    return body if body > limits.PART_MAX_BYTES else min(limits.PART_MAX_BYTES, body + notes)


class HeldUp(NamedTuple):
    """The first request that waits inside the engine, and why: the kind of reason, a colon, and words with numbers."""

    ref: LineRef
    reason: str


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What an engine measures of itself. Bytes, steps and tokens only grow; the rest is as it stands."""

    steps: int = 0
    tokens: int = 0
    staged_bytes: int = 0
    written_back_bytes: int = 0
    events_held: int = 0
    leases_open: int = 0
    contexts_running: int = 0
    contexts_waiting: int = 0
    waits: tuple[tuple[str, int], ...] = ()
    """Steps planned while the head of the queue waited, by reason."""
    hit_bytes: int = 0
    """History that steps found on the device."""
    pages_held: int = 0
    pages_free: int = 0
    pages_moved: tuple[tuple[str, int], ...] = ()
    """Device pages that changed hands, by reason."""
    predicted_s: float = 0.0
    measured_s: float = 0.0
    """Seconds of the decode steps so far, side by side."""
    headroom_hit_bytes: int = 0
    """History that steps found in headroom."""
    headroom_held_bytes: int = 0
    headroom_bytes: int = 0
    """Of headroom as it stands: what holds history, and all of it."""
    headroom_moved: tuple[tuple[str, int], ...] = ()
    """Pages of headroom that changed hands, by cause."""
    shared_histories: int = 0
    """Histories that several requests share, held now; of them some may wait for their next request (H5)."""
    sharing: int = 0
    """Running requests that share one."""
    spared_bytes: int = 0
    """History that steps read without staging it, or holding it, once more for each request."""
    draft_stages: int = 0
    drafts_proposed: int = 0
    drafts_taken: int = 0
    """Decode passes of a request each, tokens proposed in them, and taken."""
    held_up: HeldUp | None = None
    link_bytes_s: float = 0.0
    """What the link carries as far as it was measured; 0 where nothing was (a CPU, or nothing is staged)."""
