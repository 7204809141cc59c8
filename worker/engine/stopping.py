"""rules: when an answer ends, and where exactly: stop ids, stop strings on the decoded text, max_tokens.

Decoding is incremental: each token costs one decode of a short tail, so that n tokens cost O(n). Knows no tokenizer:
``decode`` is a function from token ids to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import InvariantError
from worker.structures import Choice, Guide, Pooled, Sampling, TokenLogprob

Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes of a character that is not whole yet."""


class Answer:
    """The tokens of one request's answer, until it ends. One thread.

    ``text_chars`` is set when a stop string begins inside a token: the answer's text is then the first so many
    characters of the decoded ``token_ids``.
    """

    def __init__(self, sampling: Sampling, decode: Decode | None, guide: Guide | None = None) -> None:
        if sampling.stop and decode is None:
            raise InvariantError("stop strings need a decoder")
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.vector: Sequence[float] = ()
        self.reason: str | None = None
        self.error = ""
        """Why it failed."""
        self._guide = guide
        self.text_chars: int | None = None
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_ids)
        self._stops = tuple(stop for stop in sampling.stop if stop)
        self._decode = decode
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._text = ""
        self._ends: list[int] = []
        self._tail = 0
        self._seen = 0

    @property
    def choice(self) -> Choice:
        """As a result tells it, once it has ended."""
        if self.vector:  # what was sampled behind an embedded prompt is nobody's
            return Choice((), self.reason or "", vector=self.vector)
        told = tuple(self.logprobs[: len(self.token_ids)])
        return Choice(tuple(self.token_ids), self.reason or "", self.text_chars, told)

    def add(self, token: int, told: TokenLogprob | Pooled | None = None) -> str | None:
        """Take the next token, with what is told of it; ``stop`` or ``length`` when the answer ends with it, ``failed``
        when its guide cannot go on. Later tokens are surplus."""
        if self.reason is not None:
            raise InvariantError(f"a token after the answer ended ({self.reason})")
        if token in self._stop_ids:
            self.reason = "stop"
            return self.reason
        self.token_ids.append(token)
        if isinstance(told, Pooled):
            self.vector = told.vector
        elif told is not None:
            self.logprobs.append(told)
        if self._guide is not None:
            self._guide.take(token)
            self.error = self._guide.error
        if self.error:
            self.reason = "failed"
        elif (self._stops and self._stopped()) or (self._guide is not None and self._guide.ended):
            self.reason = "stop"
        elif len(self.token_ids) >= self._sampling.max_tokens:
            self.reason = "length"
            if self._stops and self._finish_text():
                self.reason = "stop"
        return self.reason

    def _stopped(self) -> bool:
        """Decode what the newest token added and look for a stop string in it; cut the answer if there is one."""
        decode = self._decoder()
        whole = decode(self.token_ids[self._tail :])
        known = decode(self.token_ids[self._tail : self._seen])
        if whole.endswith(_INCOMPLETE) or len(whole) <= len(known):
            self._ends.append(len(self._text))
            return False
        return self._grow(whole[len(known) :])

    def _finish_text(self) -> bool:
        """At the last token: what a half character held back counts now, as the reader will see it."""
        decode = self._decoder()
        whole = decode(self.token_ids[self._tail :])
        known = decode(self.token_ids[self._tail : self._seen])
        if len(whole) <= len(known):
            return False
        self._ends.pop()
        return self._grow(whole[len(known) :])

    def _grow(self, added: str) -> bool:
        start = max(0, len(self._text) - self._longest + 1)
        self._text += added
        self._ends.append(len(self._text))
        self._tail, self._seen = self._seen, len(self.token_ids)
        window = self._text[start:]
        found = [place for place in (window.find(stop) for stop in self._stops) if place >= 0]
        if not found:
            return False
        self._cut(start + min(found))
        return True

    def _cut(self, chars: int) -> None:
        """Keep the fewest tokens whose text covers the first ``chars`` characters."""
        if chars == 0:
            self.token_ids = []
            return
        keep = next(index for index, end in enumerate(self._ends) if end >= chars) + 1
        self.token_ids = self.token_ids[:keep]
        if self._decoder()(self.token_ids) != self._text[:chars]:
            self.text_chars = chars

    def _decoder(self) -> Decode:
        if self._decode is None:
            raise InvariantError("stop strings need a decoder")
        return self._decode
