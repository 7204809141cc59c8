"""rules: H5: which requests of a job share how much of their prompts: decided where their token ids are known.

Not ``common.prefixes``: that gives texts of one document one key, in the broker, so that its requests meet here.

A job's prompts are looked at a batch at a time, so that the first request of a batch shares as well. Of the ways to
share a prompt's beginning the one is taken that spares most tokens: as many requests times as long as they all begin
alike, in whole pages. What was found stays known, so that later batches share the same, and not nearly the same. One
level only: a prompt shares one beginning. Bounded in jobs, prompts and bytes. Knows no text, no pool and no thread.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common import limits
from worker.structures import Prepared, Request, SharedPrefix

Ids = npt.NDArray[np.int32]
_BLOCK = 1 << 14
"""Token ids compared at once: the first block that differs is then looked at alone."""
_NEARLY = 2
"""A known beginning is taken unless one that is so many times as long is there."""


def common_tokens(one: Ids, other: Ids) -> int:
    """How many token ids two prompts begin with alike."""
    most = min(one.size, other.size)
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        differs = one[start:end] != other[start:end]
        if differs.any():
            return start + int(differs.argmax())
    return most


def _key(job: str, ids: bytes) -> str:
    return hashlib.blake2b(job.encode() + b"\0" + ids, digest_size=16).hexdigest()


def own_too_long(request: Request, own_rows: int) -> bool:
    """Whether what it could share is lost to it: its own part is longer than the ``own_rows``, whole pages, that
    requests which share have each (``--own-tokens``)."""
    return request.shared is not None and request.own_tokens > own_rows


@dataclass(slots=True)
class _Known:
    """A beginning that prompts of this job share."""

    prefix: SharedPrefix
    ids: Ids


@dataclass(slots=True, eq=False)
class _Job:
    known: list[_Known] = field(default_factory=list)
    """The one used last stands last."""
    recent: list[Ids] = field(default_factory=list)
    """Prompts of which no large part is known, the newest last."""

    @property
    def nbytes(self) -> int:
        return sum(one.ids.nbytes for one in self.known) + sum(one.nbytes for one in self.recent)


class Prefixes:
    """What is known of each job. ``page_tokens`` 0 shares nothing. One thread."""

    def __init__(self, page_tokens: int) -> None:
        self._page = page_tokens
        self._jobs: dict[str, _Job] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of token ids that are kept."""
        return sum(job.nbytes for job in self._jobs.values())

    def share(self, job: str, prompts: Sequence[array[int]]) -> list[SharedPrefix | None]:
        """For each prompt of a batch of one job, in order: what it shares with others, seen now or before."""
        if not self._page or not prompts:
            return [None] * len(prompts)
        book = self._jobs.pop(job, None) or _Job()
        self._jobs[job] = book  # the newest stands last
        arrays = [np.frombuffer(one, np.int32) if one else np.empty(0, np.int32) for one in prompts]
        found: list[SharedPrefix | None] = [None] * len(arrays)
        heads = [one[: self._page].tobytes() for one in arrays]
        alike: dict[bytes, list[int]] = {}  # who differs in the first page shares nothing, and is not looked at
        for index, head in enumerate(heads):
            alike.setdefault(head, []).append(index)
        done: set[int] = set()
        for index, head in enumerate(heads):
            if index in done:
                continue
            group, tokens = self._group(arrays, index, [one for one in alike[head] if one not in done], book)
            known = self._known(book, arrays[index])
            if known is not None and known.prefix.tokens * _NEARLY > tokens:
                group = [one for one in group if self._begins(arrays[one], known)]
            elif tokens:
                known = self._learn(job, book, arrays[index][:tokens])
            for one in group:
                found[one] = None if known is None else known.prefix
            done.update(group)
        self._remember(book, arrays, found)
        self._bound()
        return found

    def of_choices(self, prepared: Prepared) -> SharedPrefix | None:
        """What the answers to one prompt share with each other, where it shares nothing with other requests: as many
        whole pages as it has, a token left over."""
        tokens = (len(prepared.token_ids) - 1) // self._page * self._page if self._page else 0
        if tokens <= 0 or prepared.request.sampling.choices == 1:
            return None
        return SharedPrefix(_key(prepared.request.ref.job, prepared.token_ids[:tokens].tobytes()), tokens)

    def _group(self, arrays: Sequence[Ids], index: int, waiting: Sequence[int], book: _Job) -> tuple[list[int], int]:
        """With whom of those waiting, and of the prompts seen before, it shares how many tokens: what spares most."""
        mine = arrays[index]
        pages = [(self._pages(mine, arrays[one]), one) for one in waiting if one != index]
        pages += [(self._pages(mine, other), -1) for other in book.recent]
        pages.sort(key=lambda one: -one[0])
        spared = [count * rank for rank, (count, _) in enumerate(pages, 1)]
        most = max(spared, default=0)
        if not most:
            return [index], 0
        least = pages[spared.index(most)][0]
        return [index, *(one for count, one in pages if count >= least and one >= 0)], least * self._page

    def _pages(self, mine: Ids, other: Ids) -> int:
        """Whole pages that two prompts begin with alike, a token of each left over."""
        page, most = self._page, min(mine.size, other.size) - 1
        if most < page or not np.array_equal(mine[:page], other[:page]):
            return 0
        return min(most, common_tokens(mine, other)) // page

    def _known(self, book: _Job, prompt: Ids) -> _Known | None:
        """The longest beginning that is known and that the prompt wholly begins with."""
        fitting = [one for one in book.known if self._begins(prompt, one)]
        if not fitting:
            return None
        best = max(fitting, key=lambda one: one.prefix.tokens)
        book.known.remove(best)
        book.known.append(best)
        return best

    def _begins(self, prompt: Ids, known: _Known) -> bool:
        tokens, page = known.prefix.tokens, self._page
        if prompt.size <= tokens or not np.array_equal(prompt[:page], known.ids[:page]):
            return False
        return bool(np.array_equal(prompt[:tokens], known.ids))

    def _learn(self, job: str, book: _Job, ids: Ids) -> _Known:
        known = _Known(SharedPrefix(_key(job, ids.tobytes()), ids.size), ids.copy())
        book.known.append(known)
        return known

    @staticmethod
    def _remember(book: _Job, arrays: Sequence[Ids], found: Sequence[SharedPrefix | None]) -> None:
        """Keep what may yet turn out to be shared: prompts of which more than half is not known to be."""
        for ids, prefix in zip(arrays, found, strict=True):
            if (0 if prefix is None else prefix.tokens) * _NEARLY < ids.size:
                book.recent.append(ids.copy())
        del book.recent[: -limits.PREFIX_PROMPTS_MAX_COUNT]
        del book.known[: -limits.PREFIXES_MAX_COUNT]

    def _bound(self) -> None:
        """Jobs that were seen longest ago are forgotten; of the last one, its prompts before what it shares."""
        while len(self._jobs) > 1 and (
            len(self._jobs) > limits.PREFIX_JOBS_MAX_COUNT or self.nbytes > limits.PREFIXES_MAX_BYTES
        ):
            del self._jobs[next(iter(self._jobs))]
        book = next(reversed(self._jobs.values()))
        for kept in (book.recent, book.known):
            while kept and book.nbytes > limits.PREFIXES_MAX_BYTES:
                del kept[0]
