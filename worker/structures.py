"""values: what crosses the boundaries inside a worker, in order of flow (style habit 8). Knows no thread and no device.

socket -> ``TokenizeJob`` -> tokenizer -> ``Prepared`` or ``Failed`` -> session -> ring -> engine -> ``Finished`` ->
tokenizer (text and response body) -> ``Outcome`` -> session -> outbox -> socket.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from common import limits
from common.messages import LineRef


class Shape(NamedTuple):
    """What a request changes about its logits before a token is drawn, and what it wants to know of them. The neutral
    values: 1, 0, 0, none, -1."""

    repetition: float = 1.0
    """Logits of tokens of prompt and answer are divided by it, negative ones multiplied."""
    presence: float = 0.0
    frequency: float = 0.0
    """Taken from the logit of each token of the answer, once, and once for each time it stands there."""
    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    logprobs: int = -1
    """Log probabilities are told, with those of so many likeliest tokens; -1 for none."""
    pool: str = ""
    """The mean of the prompt's last hidden states is told, and nothing is generated: as ``float`` or ``base64``."""

    @property
    def penalises(self) -> bool:
        """Whether what may follow depends on the tokens so far."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


class Sampling(NamedTuple):
    """How the next token is chosen, when to stop. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0
    are off."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer (the model's end-of-sequence ids among them); never part of it."""
    min_p: float = 0.0
    choices: int = 1
    """Answers to be made, each with a seed of its own."""
    shape: Shape | None = None
    """None changes and tells nothing."""


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


class Guide(Protocol):
    """Which tokens may come next in one answer, given those that came (structured output). One thread at a time."""

    words: int
    """int32 words of a mask: a bit a token id, the lowest first."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the form allows nothing more but the answer's end."""
        ...

    def copy(self) -> Guide:
        """One that goes on by itself."""
        ...

    def take(self, token: int) -> None:
        """The next token of the answer."""
        ...

    def mask_into(self, row: Any) -> None:
        """Write what may come next into ``row``, a numpy array of ``words`` int32; all bits after an ``error``."""
        ...


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
    """The prompt's int32 token ids, kept on the host where tokens are drafted from them, or other ranks need them."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the prompt offers."""
    guide: Guide | None = None
    """Holds its answer to a form; each of several answers takes a copy."""
    pieces: tuple[int, ...] = ()
    """Its prompt is so many by themselves, of so many tokens each, to be embedded; empty: it is one."""

    @property
    def own_tokens(self) -> int:
        """Its own part: what of prompt and answer lies behind the pages that it may share."""
        return self.prompt_tokens + self.sampling.max_tokens - (0 if self.shared is None else self.shared.tokens)


class Prepared(NamedTuple):
    """A tokenized line: int32 ``token_ids`` go into the ring's payload."""

    request: Request
    token_ids: array[int]


class TokenLogprob(NamedTuple):
    """Of a token of an answer, by the model's own logits; natural logarithms, the likeliest of ``top`` first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Pooled(NamedTuple):
    """The embedding of a prompt."""

    vector: Sequence[float]


class Choice(NamedTuple):
    """One of a request's answers; fields as in ``Finished``."""

    token_ids: Sequence[int]
    reason: str
    text_chars: int | None = None
    logprobs: Sequence[TokenLogprob] = ()
    vector: Sequence[float] = ()


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
    logprobs: Sequence[TokenLogprob] = ()
    """One a token where they were asked for."""
    others: tuple[Choice, ...] = ()
    """Its answers from the second on; the first is told by the other fields."""
    vector: Sequence[float] = ()
    """Of an input that was to be embedded; then there are no tokens."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All of its answers."""
        return (Choice(self.token_ids, self.reason, self.text_chars, self.logprobs, self.vector), *self.others)


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
