"""shell: what the session's thread and the engine's thread share on the host: published entries and one condition.

An idle engine sleeps here (R2: the device waits on the doorbell, the host on this condition; neither spins).
Order of giving back lives here too (R3): entries may be released in any order, the consumed word moves in ring order.
Knows no bytes and no device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from common.errors import HaulierError, InvariantError
from ring.descriptor import Entry


class RingAborted(HaulierError):
    """The other side ended and rang the abort word: nothing more crosses this ring."""


class Handover:
    """Entries on their way from producer to consumer. Every method may be called from either thread."""

    def __init__(self, first_sequence: int) -> None:
        self.lock = threading.Lock()
        self.ready = threading.Condition(self.lock)
        self.published: deque[Entry] = deque()
        self.sleeping = False
        self.aborted = False
        self._taken_through = first_sequence - 1
        self._next_release = first_sequence
        self._released: set[int] = set()
        self._reasons: dict[int, str] = {}

    def abort(self) -> None:
        """Nothing more crosses; a sleeping engine wakes."""
        with self.lock:
            self.aborted = True
            self.ready.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something is published, the ring is aborted or ``timeout_s`` is over: whether something is."""
        with self.lock:
            if not self.published and not self.aborted:
                self.sleeping = True
                try:
                    self.ready.wait(timeout_s)
                finally:
                    self.sleeping = False
            return bool(self.published)

    def take(self) -> list[Entry]:
        """Everything published and not yet taken, oldest first."""
        with self.lock:
            entries = list(self.published)
            self.published.clear()
            if entries:
                self._taken_through = entries[-1].sequence
            return entries

    def is_taken(self, sequence: int) -> bool:
        """Whether the engine has taken entry ``sequence``."""
        return sequence <= self._taken_through

    def release(self, sequences: Sequence[int]) -> int | None:
        """These entries are read for good: the sequence up to which all are, if that moved, else None.

        Raises ``InvariantError`` for an entry not taken or released before; those named before it are then released.
        """
        with self.lock:
            first = next_release = self._next_release
            released = self._released
            last = first + len(sequences) - 1
            if not released and last <= self._taken_through and sequences == list(range(first, last + 1)):
                self._next_release, sequences = last + 1, ()  # all in order, as most are
                next_release = last + 1
            for sequence in sequences:
                if sequence > self._taken_through or sequence < next_release or sequence in released:
                    raise InvariantError(
                        f"entry {sequence} was released twice or never taken: "
                        f"taken up to {self._taken_through}, all released before {next_release}"
                    )
                if sequence == next_release:
                    next_release += 1
                else:
                    released.add(sequence)
                while released and next_release in released:
                    released.remove(next_release)
                    next_release += 1
                self._next_release = next_release
            if self._reasons:
                self._reasons = {held: why for held, why in self._reasons.items() if self._is_held(held)}
            return next_release - 1 if next_release != first else None

    def _is_held(self, sequence: int) -> bool:
        return self._next_release <= sequence <= self._taken_through and sequence not in self._released

    def hold(self, sequence: int, reason: str) -> None:
        """Record why a taken entry is kept (a wait reason in words)."""
        with self.lock:
            if not self._is_held(sequence):
                raise InvariantError(f"entry {sequence} cannot be held: it is not in the engine's hands")
            self._reasons[sequence] = reason

    def holder(self, sequence: int) -> str:
        """Who holds entry ``sequence``, in words (R6)."""
        with self.lock:
            if sequence > self._taken_through:
                return "the ring: published, not taken by the engine"
            if sequence < self._next_release:
                return "the device: released, its consumed word not seen yet"
            if sequence in self._released:
                return f"entry {self._next_release}: released, given back in order behind it"
            return "the engine: " + self._reasons.get(sequence, "taken, not released")
