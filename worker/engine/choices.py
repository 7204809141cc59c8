"""rules: requests under way and their choices: each choice is a context with an answer of its own, all are one result.

A request is answered once, when the last of its choices has ended. Knows no tokenizer, no scheduler and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from common.errors import InvariantError
from common.messages import LineRef
from worker.engine.contexts import Context
from worker.engine.fit import never_fits
from worker.engine.sampling import choice_seed
from worker.engine.stopping import Answer, Decode
from worker.structures import Choice, Finished, Pooled, Request, TokenLogprob


def choices_of(request: Request) -> list[tuple[Request, int]]:
    """A request for each answer, alike but for the seed, each with a guide of its own; or for each piece of the prompt.
    With the first of its tokens, counted from the prompt's."""
    sampling, guide = request.sampling, request.guide
    if request.pieces:
        starts = accumulate(request.pieces, initial=0)
        return [
            (request._replace(prompt_tokens=tokens, pieces=()), start)
            for tokens, start in zip(request.pieces, starts, strict=False)
        ]
    return [
        (
            request._replace(
                sampling=sampling._replace(seed=choice_seed(sampling.seed, one), choices=1),
                guide=None if guide is None else guide.copy(),
            ),
            0,
        )
        for one in range(sampling.choices)
    ]


def at_once(request: Request, context_tokens: int, decode: Decode | None) -> Finished | None:
    """The result of a request that needs no step, or can never run in contexts of ``context_tokens``."""
    sampling = request.sampling
    error = never_fits(max(request.pieces, default=request.prompt_tokens), sampling.max_tokens, context_tokens)
    if error is None and sampling.stop and decode is None:
        error = "stop strings need a model with a tokenizer"
    if error is None and sampling.max_tokens > 0:
        return None
    return Finished(request, (), "length" if error is None else "failed", error or "")


@dataclass(slots=True, eq=False)
class _Open:
    request: Request
    running: dict[int, Context]
    """By number, in the order of its choices."""
    ended: dict[int, Choice] = field(default_factory=dict)
    admitted: bool = False
    error: str = ""


class Choices:
    """The books of requests under way. One thread, the engine's."""

    def __init__(self) -> None:
        self._open: dict[LineRef, _Open] = {}
        self._answers: dict[int, Answer] = {}

    def begin(self, request: Request, contexts: Sequence[Context], decode: Decode | None) -> None:
        """A request, and the contexts that make its answers. Raises ``InvariantError`` if it is under way already."""
        if request.ref in self._open:
            raise InvariantError(f"{request.ref} came twice")
        self._open[request.ref] = _Open(request, {context.number: context for context in contexts})
        for context in contexts:
            self._answers[context.number] = Answer(context.request.sampling, decode, context.request.guide)

    def running(self, ref: LineRef) -> list[Context]:
        """Those of a request that have not ended; none if it is not under way."""
        one = self._open.get(ref)
        return [] if one is None else list(one.running.values())

    def admitted(self, contexts: Sequence[Context]) -> list[Request]:
        """Contexts are admitted: the requests of which they are the first."""
        opened = [one for one in (self._open[context.request.ref] for context in contexts) if not one.admitted]
        for one in opened:
            one.admitted = True
        return list({one.request.ref: one.request for one in opened}.values())

    def add(self, context: Context, token: int, told: TokenLogprob | Pooled | None) -> str | None:
        """The next token of its answer; why the answer ends, if it does."""
        return self._answers[context.number].add(token, told)

    def end(self, context: Context, reason: str) -> Finished | None:
        """A choice is over: the result, when it was the last. What was cancelled or failed in part is so as a whole."""
        one = self._open[context.request.ref]
        del one.running[context.number]
        answer = self._answers.pop(context.number)
        one.error = one.error or answer.error
        one.ended[context.number] = answer.choice._replace(reason=reason)
        if one.running:
            return None
        del self._open[context.request.ref]
        first, *others = (one.ended[number] for number in sorted(one.ended))
        reasons = {choice.reason for choice in one.ended.values()}
        whole = next((word for word in ("failed", "cancelled") if word in reasons), first.reason)
        return Finished(
            one.request,
            first.token_ids,
            whole,
            one.error,
            first.text_chars,
            logprobs=first.logprobs,
            others=tuple(others),
            vector=first.vector,
        )
