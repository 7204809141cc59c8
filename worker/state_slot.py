"""shell: a worker's own place in a shared ``--state`` folder: the first free numbered slot, locked while it lives.

So that any number of workers may share one volume. Slots of dead workers with results in them are adopted by whoever
starts next. Knows nothing of sessions.
"""

from __future__ import annotations

from pathlib import Path

from common.database import refuse_unsafe
from common.errors import RefusedError
from common.locks import Lock
from worker.outbox import FILE, WHAT, Outbox

SLOTS_MAX_COUNT = 1024
"""Workers that share one state folder."""


class StateSlot:
    """A locked slot. ``folder`` is this worker's own until ``release`` or the end of the process."""

    def __init__(self, parent: Path, number: int, lock: Lock) -> None:
        self.parent = parent
        self.number = number
        self.folder = parent / str(number)
        self._lock = lock

    def release(self) -> None:
        """Let another worker have it."""
        self._lock.release()


def take(parent: Path) -> StateSlot:
    """Lock the first free slot in ``parent``. Raises ``RefusedError`` when the folder cannot be used."""
    refuse_unsafe(parent, WHAT)
    for number in range(SLOTS_MAX_COUNT):
        lock = Lock(parent / str(number) / "lock")
        if lock.try_take():
            return StateSlot(parent, number, lock)
    raise RefusedError(f"all {SLOTS_MAX_COUNT} slots of {parent} are held by live workers; give --state another folder")


def adopt_orphans(slot: StateSlot, outbox: Outbox) -> dict[int, int]:
    """Move the results of slots that nobody holds into ``outbox``: how many from which slot.

    A slot that cannot be opened is left as it is: its owner will say why when it starts there.
    """
    found = {}
    for path in sorted(slot.parent.glob(f"*/{FILE}")):
        if not path.parent.name.isdigit() or path.parent == slot.folder:
            continue
        lock = Lock(path.parent / "lock")
        if not lock.try_take():
            continue
        try:
            count = _adopt_from(path.parent, outbox)
        except RefusedError:
            count = 0
        finally:
            lock.release()
        if count:
            found[int(path.parent.name)] = count
    return found


def _adopt_from(folder: Path, outbox: Outbox) -> int:
    orphan = Outbox(folder)
    try:
        return outbox.adopt(orphan)
    finally:
        orphan.close()
