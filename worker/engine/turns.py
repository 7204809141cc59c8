"""rules: H6 over time: which contexts decode in a step, quantum after quantum, each plan on record with what it beat.

A quantum lasts the steps that were planned for it, or until who decodes has changed. While the pool holds all histories
nobody is parked and nothing is planned. Knows no pages: the scheduler parks and brings in what is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.limits import DECISIONS_KEPT_MAX_COUNT
from worker.engine.contexts import Context
from worker.engine.quantum import Candidate, Quantum, Rates, plan


class Decoding(NamedTuple):
    """A context that could decode now: ``rows`` of history of its own, ``remaining`` tokens at most; it reads
    ``shared_rows`` of the shared history numbered ``shared`` as well, -1 for none (H5)."""

    number: int
    rows: int
    remaining: int
    shared: int = -1
    shared_rows: int = 0


def decoding_of(contexts: Sequence[Context]) -> list[Decoding]:
    """Contexts that could decode, as plans see them."""
    return [
        Decoding(one.number, one.own_rows, one.request.sampling.max_tokens - one.sampled, one.base_number, one.base)
        for one in contexts
    ]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan on record: for which step it was made, among whom, and what it says."""

    step: int
    among: tuple[int, ...]
    quantum: Quantum


class Turns:
    """``pool_bytes`` of retained pages, ``token_bytes`` a row of all layers. One thread, the engine's."""

    def __init__(self, rates: Rates, pool_bytes: int, token_bytes: int) -> None:
        self.rates = rates
        self._pool_bytes = pool_bytes
        self.headroom_bytes = 0
        """Of headroom, as it stands: it serves history as pages do, at the memory's rate (H2)."""
        self._token_bytes = token_bytes
        self._quantum: Quantum | None = None
        self._among: frozenset[int] = frozenset()
        self._until = 0
        self._ran: dict[int, int] = {}
        self.records: deque[Planned] = deque(maxlen=DECISIONS_KEPT_MAX_COUNT)
        self.predicted_s = self.measured_s = 0.0
        """Sums over the decode steps so far: side by side (H3)."""

    def decide(self, step: int, decoding: Sequence[Decoding]) -> Quantum | None:
        """Who decodes in ``step``; None for all of them."""
        among = frozenset(one.number for one in decoding)
        shared = {one.shared: one.shared_rows for one in decoding}
        rows = sum(one.rows for one in decoding) + sum(shared.values())
        if rows * self._token_bytes <= self._held_bytes or len(among) < 2:
            self._quantum = None
            return None
        if self._quantum is None or step >= self._until or among != self._among:
            self._plan(step, decoding, among)
        if self._quantum is not None:
            self._ran.update(dict.fromkeys(self._quantum.runs, step))
        return self._quantum

    def ahead_rows(self, quantum: Quantum) -> int:
        """Rows that the link carries beside one step of the quantum without making it longer."""
        return max(1, int(quantum.step_s * self.rates.link_bytes_s / self._token_bytes))

    def learn(self, staged_rows: int, hit_rows: int, measured_s: float) -> None:
        """A decode step of one layer's ``staged_rows`` and ``hit_rows`` took ``measured_s`` seconds."""
        staged, hit = staged_rows * self._token_bytes, hit_rows * self._token_bytes
        self.predicted_s += self.rates.seconds(staged, hit)
        self.measured_s += measured_s
        self.rates = self.rates.learned(staged, hit, measured_s)

    @property
    def _held_bytes(self) -> int:
        return self._pool_bytes + self.headroom_bytes

    def _plan(self, step: int, decoding: Sequence[Decoding], among: frozenset[int]) -> None:
        self._ran = {number: at for number, at in self._ran.items() if number in among}
        candidates = [
            Candidate(
                one.number,
                max(1, one.rows * self._token_bytes),
                max(1, one.remaining),
                step - self._ran.get(one.number, -1),
                one.shared,
                one.shared_rows * self._token_bytes,
            )
            for one in decoding
        ]
        self._quantum = plan(self.rates, self._held_bytes, candidates)
        self._among, self._until = among, step + self._quantum.steps
        self.records.append(Planned(step, tuple(sorted(among)), self._quantum))
