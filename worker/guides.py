"""shell: answers held to a form by llguidance: which tokens may come next, given those that came.

A form that the library cannot keep to is refused with the library's own reason. Its limits on grammars bound the time
of one mask. Made on the tokenizer's thread, used on the engine's; the library gives the interpreter lock away.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from worker.parameters import RequestError
from worker.structured import Structure
from worker.structures import Guide

_WORD_BITS = 32
_REASON_MAX_CHARS = 1000


class Guides:
    """Makes guides for one tokenizer: ``tokenizer`` is its JSON, ``vocabulary`` counts its ids. The answer may end, by
    one of ``stop_ids``, where the form allows it. Takes a third of a second for 50,000 tokens."""

    def __init__(self, tokenizer: str, vocabulary: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(stop_ids) or None)
        self._words = -(-vocabulary // _WORD_BITS)

    def make(self, structure: Structure) -> Guide:
        """A guide at its beginning. Raises ``RequestError`` with the library's reason."""
        try:
            if structure.regex:
                grammar = llguidance.LLMatcher.grammar_from_regex(structure.text)
            else:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(structure.text)
            limits = llguidance.LLParserLimits(verbose_errors=False)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as refused:
            raise RequestError("invalid_value", _words(structure, str(refused)), structure.param) from refused
        if matcher.is_error():
            raise RequestError("invalid_value", _words(structure, matcher.get_error()), structure.param)
        return _Guide(matcher, self._words)


def _words(structure: Structure, reason: str) -> str:
    return f"{structure.param} cannot be kept to: {reason}"[:_REASON_MAX_CHARS]


class _Guide:
    """See ``structures.Guide``."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self._matcher = matcher
        self.words = words

    @property
    def error(self) -> str:
        return self._matcher.get_error()[:_REASON_MAX_CHARS] if self._matcher.is_error() else ""

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    def copy(self) -> Guide:
        return _Guide(self._matcher.deep_copy(), self.words)

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask_into(self, row: npt.NDArray[np.int32]) -> None:
        if self._matcher.is_error():
            row.fill(-1)
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
