"""rules: drafted tokens: what may come next, looked up in a context's own text, and how much of it the model confirmed.

An n-gram lookup: where the newest tokens stood before, what followed them is proposed. One staged pass then samples
after the last token and after every proposed one. A proposal is taken while it is what the model sampled before it, so
the answer is what it would have been, greedy or drawn: each token is sampled from the model's own distribution behind
tokens that are all its own. Knows no model and no device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from common.errors import InvariantError

LONGEST_MATCH_TOKENS = 4
"""So many newest tokens are looked for first, then fewer; the longer the match, the likelier the proposal."""
SHORTEST_MATCH_TOKENS = 2
_WIDTH = 4


class DraftText:
    """A context's prompt and answer so far, searched for where its end stood before. ``prompt`` is int32 token ids."""

    def __init__(self, prompt: array[int]) -> None:
        self._bytes = bytearray(prompt.tobytes())
        self.stages = self.proposed = self.taken = 0
        """Decode stages with it; tokens proposed in them, and taken."""

    def __len__(self) -> int:
        return len(self._bytes) // _WIDTH

    @property
    def last(self) -> int:
        """The newest token."""
        return self._ids(len(self) - 1, 1)[0]

    def add(self, tokens: Iterable[int]) -> None:
        """Tokens of the answer."""
        self._bytes += array("i", tokens).tobytes()

    def propose(self, most: int) -> tuple[int, ...]:
        """At most ``most`` tokens that followed the latest earlier place of the longest end that has one."""
        count = len(self)
        for size in range(min(LONGEST_MATCH_TOKENS, count - 1), SHORTEST_MATCH_TOKENS - 1, -1):
            found = self._earlier(size)
            if found >= 0:
                return tuple(self._ids(found + size, min(most, count - found - size)))
        return ()

    def _earlier(self, size: int) -> int:
        """The token at which the newest ``size`` tokens stood last before, or -1."""
        data = self._bytes
        end = len(data) - 1  # a match that begins where the pattern itself does is none
        pattern = data[-size * _WIDTH :]
        while (found := data.rfind(pattern, 0, end)) >= 0:
            if found % _WIDTH == 0:
                return found // _WIDTH
            end = found + len(pattern) - 1
        return -1

    def _ids(self, first: int, count: int) -> array[int]:
        return array("i", bytes(self._bytes[first * _WIDTH : (first + count) * _WIDTH]))


def confirmed(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of ``drafts`` the model sampled itself; ``sampled`` holds a token more, the first behind no draft.

    The tokens to take are ``sampled[: confirmed + 1]``: the one that refutes a draft is the model's own.
    """
    count = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        count += 1
    return count


class Drafts:
    """The texts of running requests, and what became of what was proposed. ``most`` tokens a stage. One thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts: dict[int, DraftText] = {}
        self.stages = self.proposed = self.taken = 0
        """Decode stages of a request each; tokens proposed in them, and taken."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Stages, proposed, taken."""
        return self.stages, self.proposed, self.taken

    def begin(self, number: int, prompt: array[int] | None) -> None:
        """A request with its prompt. Raises ``InvariantError`` if whoever prepared it kept none on the host."""
        if prompt is None:
            raise InvariantError(f"context {number} is to be drafted for, and its prompt was not kept on the host")
        self._texts[number] = DraftText(prompt)

    def propose(self, number: int, room: int) -> tuple[int, ...]:
        """The input of a request's decode stage: its newest token, and at most ``room`` that may follow."""
        text = self._texts[number]
        most = min(self.most, room)
        return (text.last, *(text.propose(most) if most > 0 else ()))

    def landed(self, number: int, ids: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
        """What the model sampled behind each of ``ids`` (empty: the prompt's end): the tokens that count."""
        count = confirmed(ids[1:], sampled)
        tokens = sampled[: count + 1]
        text = self._texts.get(number)
        if text is not None:
            text.add(tokens)
        for book in (self, text) if ids else ():
            if book is not None:
                book.stages += 1
                book.proposed += len(ids) - 1
                book.taken += count
        return tokens

    def end(self, number: int) -> str:
        """The request is over; for its story, what drafts did for it: empty if it never decoded."""
        text = self._texts.pop(number, None)
        if text is None or not text.stages:
            return ""
        tokens, passes = text.stages + text.taken, "1 pass" if text.stages == 1 else f"{text.stages} passes"
        return (
            f"drafts: {tokens} tokens in {passes}, {tokens / text.stages:.2f} a pass; "
            f"{text.taken} of {text.proposed} proposed tokens taken"
        )
