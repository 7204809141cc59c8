"""shell: moves staged layers: puts each lease's copies, launches and waits on the device's queues (Q1, L2, L4, L6, L8).

The order of every edge in ``Edge`` is made here, on the device; what may happen when is ``leases``' to say. Any failure
marks the transport failed: nothing more is submitted, nothing is published, nothing is given back until a quarantine
proves that the device is done. No destructor does anything (L7): only ``retire`` and ``quarantine`` give back. Knows no
model and no pool: what to copy where comes as tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from common.errors import HaulierError
from common.limits import QUARANTINE_DEADLINE_S, RETIRE_DEADLINE_S, STAGING_SLOTS_MIN_COUNT
from worker.engine.device import COPY_QUEUES, MATERIALISE_QUEUES, Device, DeviceError, Event, Queue, QueueName, Work
from worker.engine.leases import CopyTicket, Lease, LeaseBook, Receipt
from worker.engine.page_leases import ContextSet, PageLeases

Copy = tuple[torch.Tensor, torch.Tensor, Hashable]
"""Destination, source, and the host owner of whichever of the two is host memory."""


class Edge(StrEnum):
    """What must come before what. Tests leave one out to see the corruption it prevents; settings cannot."""

    COPY_BEFORE_ATTENTION = "history copy before attention"
    MATERIALISE_BEFORE_ATTENTION = "retained pages are in place before attention"
    ATTENTION_BEFORE_REUSE = "attention before its slot is filled again"
    WRITE_BACK_BEFORE_REUSE = "write-back from a slot before it is filled again"
    ATTENTION_BEFORE_WRITE_BACK = "attention before the changed rows are written back"
    WRITE_BACK_BEFORE_NEXT_COPY = "write-back before the same layer's next history copy"
    ATTENTION_BEFORE_MATERIALISE = "rows appended to device pages before these are materialised again"
    TICKETS_BEFORE_PAGE_REUSE = "copies and write-backs before their host pages get a new owner"


READERS = (Edge.ATTENTION_BEFORE_REUSE, Edge.WRITE_BACK_BEFORE_REUSE)
"""The edges of ``LeaseBook.prior_readers``, in its order."""
STAGED = (Edge.COPY_BEFORE_ATTENTION, Edge.MATERIALISE_BEFORE_ATTENTION)
"""The edges of the tickets that ``stage`` makes, in its order."""


class TransportFailedError(HaulierError):
    """The transport failed earlier: no submission is accepted. The message has the first reason."""


class RetirementLateError(DeviceError):
    """A sealed stage was not over by its deadline (L4)."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How a quarantine ended. ``proved`` False: all is retained and the process must end (L6)."""

    proved: bool
    established: tuple[str, ...]
    """What was seen to be over, in the order tried: the copy queues, the materialisation queues, the device."""
    retained: int
    """Leases that stay."""
    reason: str


class Transport:
    """Stages layers through ``slots`` slots in turn. All methods belong to the engine's thread.

    ``pages`` counts holds on host pages, if the host pool recycles any. ``omit`` is for race tests alone.
    """

    def __init__(
        self,
        device: Device,
        slots: int = STAGING_SLOTS_MIN_COUNT,
        pages: PageLeases | None = None,
        *,
        retire_deadline_s: float = RETIRE_DEADLINE_S,
        omit: Collection[Edge] = (),
    ) -> None:
        self.device = device
        self.book = LeaseBook(slots)
        self.pages = pages
        self.bytes_in = 0
        self.bytes_back = 0
        self.failed: str | None = None
        self._h2d = device.queue(QueueName.H2D)
        self._d2h = device.queue(QueueName.D2H)
        self._compute = device.queue(QueueName.COMPUTE)
        self._materialise = device.queue(QueueName.MATERIALISE)
        self._deadline_s = retire_deadline_s
        self._omit = frozenset(omit)
        self._turn = 0
        self._written: dict[int, Event] = {}
        self._attended: dict[int, Event] = {}
        self._revoked: set[int] = set()

    @property
    def next_slot(self) -> int:
        """The slot that the next ``stage`` will use: copies must go there."""
        return self._turn % self.book.slots

    def may_stage(self, layer: int) -> bool:
        """Whether the layer can be staged now: its next slot's last lease and its own last lease are sealed. So a
        prefetch goes as far ahead as this allows, and no further."""
        return self.failed is None and self.book.may_begin(self.next_slot, layer)

    # -- one staged layer, in the order of a step -----------------------------------------------------------------
    def stage(
        self, step: int, layer: int, contexts: ContextSet, copies: Sequence[Copy] = (), materialise: Work | None = None
    ) -> Lease:
        """Begin a lease in ``next_slot`` and put its history copies (host to device) and the materialisation of
        retained pages on their queues. With no copies (history of length 0, or attended in place) the lease still
        orders the layer's rows. Raises ``LeaseError`` for a use against the rules, ``DeviceError`` for a failure."""
        self.accept()
        slot = self.next_slot
        try:
            lease = self.book.begin(step, layer, slot, contexts, self.book.prior_readers(slot))
            self._turn += 1
            self._hold_pages(lease)
            self._stage_history(lease, copies)
            if materialise is not None:
                self._stage_retained(lease, materialise)
            return lease
        except Exception as error:
            self.fail(f"stage of step {step}, layer {layer}: {error}")
            raise

    def begin_whole(self, step: int, layers: Sequence[int], contexts: ContextSet) -> Lease:
        """Begin the one lease of a step whose histories are all in place: nothing is copied for it, and what it reads
        the compute queue wrote, or has waited for. ``before_attention`` is not for it."""
        self.accept()
        try:
            lease = self.book.begin_whole(step, layers, contexts)
            self._hold_pages(lease)
            return lease
        except Exception as error:
            self.fail(f"step {step}: {error}")
            raise

    def before_attention(self, lease: Lease) -> None:
        """Put before the lease's first use of its slot on the compute queue: it waits for the copies there."""
        self.accept()
        try:
            for ticket, edge in zip(lease.tickets, STAGED, strict=False):
                if self._edge(edge):
                    self.device.wait(self._compute, ticket.event)
        except Exception as error:
            self.fail(f"attention of the {lease}: {error}")
            raise

    def attended(self, lease: Lease) -> Event:
        """Record the consumer event: right after the launch of attention on the compute queue."""
        self.accept()
        try:
            event = self.device.record(self._compute)
            self.book.attend(lease, event)
            self._attended.update(dict.fromkeys(lease.layers, event))
            return event
        except Exception as error:
            self.fail(f"attention of the {lease}: {error}")
            raise

    def write_back(
        self,
        lease: Lease,
        contexts: ContextSet,
        tail: Hashable,
        work: Work | None = None,
        copies: Sequence[Copy] = (),
        nbytes: int | None = None,
    ) -> None:
        """Put the changed rows on their way to the host rows of ``contexts``: ``work`` is one grouped launch (its
        ``writes`` are ``host_rows``), ``copies`` are contiguous pieces (host memory first). ``tail`` names how far the
        rows now reach, the same value ``seal`` gets. ``nbytes``: what crosses the link; default the bytes of
        ``work.reads`` and the pieces."""
        self.accept()
        device, queue = self.device, self._d2h
        try:
            self.book.owner(lease, [owner for _, _, owner in copies])
            if lease.attention is not None and self._edge(Edge.ATTENTION_BEFORE_WRITE_BACK):
                device.wait(queue, lease.attention)
            moved = 0
            for dst, src, _ in copies:
                device.copy(queue, dst, src, f"write back step {lease.step} layer {lease.layer}")
                moved += src.nbytes
            if work is not None:
                label = work.label or f"write back step {lease.step} layer {lease.layer}"
                device.launch(queue, work.fn, work.reads, work.writes, label)
                moved += sum(tensor.nbytes for tensor in work.reads)
            event = device.record(queue)
            ticket = CopyTicket(event, (work, copies), moved if nbytes is None else nbytes)
            self.book.write(lease, contexts, ticket, tail)
            self._written.update(dict.fromkeys(lease.layers, event))
            self.bytes_back += ticket.nbytes
        except Exception as error:
            self.fail(f"write-back of the {lease}: {error}")
            raise

    def seal(self, lease: Lease, tail: Hashable, attention: Event) -> None:
        """Close the lease to further work (L3): ``tail`` as written back, ``attention`` as ``attended`` returned."""
        self.accept()
        try:
            self.book.seal(lease, tail, attention)
        except Exception as error:
            self.fail(f"seal of the {lease}: {error}")
            raise

    # -- step boundaries ------------------------------------------------------------------------------------------
    def retire(self, now: float) -> list[Receipt]:
        """At a step boundary: retire sealed leases whose every event is polled over, oldest first, never blocking.
        ``now`` in seconds, monotonic. Raises ``RetirementLateError`` once the oldest is past its deadline."""
        self.accept()
        receipts = []
        try:
            while self.book.sealed:
                lease = self.book.sealed[0]
                events = self.book.events(lease)
                if not all(self.device.done(event) for event in events):
                    self._await(lease, now)
                    break
                receipts.append(self._give_back(lease, events))
        except Exception as error:
            self.fail(f"retirement: {error}")
            raise
        return receipts

    def revoke(self, context: int) -> None:
        """The context is cancelled: no receipt publishes it from here on; its memory waits for every fence (L8)."""
        self._revoked.add(context)

    def forget(self, context: int) -> None:
        """The context has left: its id is not remembered any more."""
        self._revoked.discard(context)

    def accept(self) -> None:
        """Raise ``TransportFailedError`` after a failure: every door asks first."""
        if self.failed is not None:
            raise TransportFailedError(f"the transport failed: {self.failed}")

    def check(self) -> None:
        """Raise unless the books of leases, page holds and events agree."""
        self.book.check()
        self.device.check()
        if self.pages is not None:
            self.pages.check()

    # -- failure and end ------------------------------------------------------------------------------------------
    def fail(self, reason: str) -> None:
        """Mark the transport failed: submission stops, publication is revoked, everything is held (L6). The first
        reason stays."""
        if self.failed is None:
            self.failed = reason
            self.device.begin_teardown(reason)
            self.book.quarantine()

    def quarantine(
        self, reason: str, abort: Callable[[], None] | None = None, deadline_s: float = QUARANTINE_DEADLINE_S
    ) -> Quarantine:
        """Stop submission, ring ``abort`` (the ring's abort word, so that no queue waits for a batch that will not
        come), and wait on a watched thread for both copy queues, each materialisation queue, then the device. Proof
        frees all leases, unpublished; without it all is retained and the caller ends the process. Also how to close."""
        self.fail(reason)
        if abort is not None:
            abort()
        established: list[str] = []
        trouble: list[str] = []
        watched = threading.Thread(target=self._drain, args=(established, trouble), name="quarantine", daemon=True)
        watched.start()
        watched.join(deadline_s)
        if watched.is_alive():
            trouble.append(f"no proof of completion within {deadline_s} s")
        if trouble:
            words = "; ".join(trouble)
            self.device.retain_everything(words)
            return Quarantine(False, tuple(established), len(self.book.live), words)
        for lease in self.book.live:
            self._give_back(lease, self.book.events(lease))
        return Quarantine(True, tuple(established), len(self.book.live), self.failed or reason)

    def _drain(self, established: list[str], trouble: list[str]) -> None:
        for name in (*COPY_QUEUES, *MATERIALISE_QUEUES):
            try:
                self.device.synchronise(self.device.queue(name))
                established.append(name.value)
            except Exception as error:  # noqa: BLE001 - whatever it is, completion is unproved: that is the result
                trouble.append(f"{name.value}: {error}")
        try:
            self.device.synchronise_everything()
            established.append("device")
        except Exception as error:  # noqa: BLE001 - the same
            trouble.append(f"device: {error}")

    # -- parts ----------------------------------------------------------------------------------------------------
    def _hold_pages(self, lease: Lease) -> None:
        if self.pages is not None and self._edge(Edge.TICKETS_BEFORE_PAGE_REUSE):
            self.pages.hold(lease.contexts)
            lease.holds_pages = True

    def _stage_history(self, lease: Lease, copies: Sequence[Copy]) -> None:
        device, queue = self.device, self._h2d
        self.book.owner(lease, [owner for _, _, owner in copies])
        self._wait_for_readers(lease, queue)
        written = self._written.get(lease.layer)
        if written is not None and written not in lease.prior_readers and self._edge(Edge.WRITE_BACK_BEFORE_NEXT_COPY):
            device.wait(queue, written)
        moved = 0
        for dst, src, _ in copies:
            device.copy(queue, dst, src, f"history step {lease.step} layer {lease.layer}")
            moved += src.nbytes
        event = device.record(queue)
        self.book.ticket(lease, CopyTicket(event, (copies,), moved))
        self.bytes_in += moved

    def _stage_retained(self, lease: Lease, work: Work) -> None:
        device, queue = self.device, self._materialise
        self._wait_for_readers(lease, queue)
        appended = self._attended.get(lease.layer)
        if appended is not None and self._edge(Edge.ATTENTION_BEFORE_MATERIALISE):
            device.wait(queue, appended)
        device.launch(queue, work.fn, work.reads, work.writes, work.label or f"materialise layer {lease.layer}")
        self.book.ticket(lease, CopyTicket(device.record(queue), (work,), 0))

    def _wait_for_readers(self, lease: Lease, queue: Queue) -> None:
        for event, edge in zip(lease.prior_readers, READERS, strict=False):
            if self._edge(edge):
                self.device.wait(queue, event)

    def _give_back(self, lease: Lease, over: Sequence[Event]) -> Receipt:
        """The receipt, then the tickets and the layer, then what they held (L4)."""
        if self.failed is None:
            receipt = self.book.retire(lease, over, frozenset(self._revoked))
        else:
            receipt = self.book.release(lease)
        for event in over:
            self.device.release(event)
        for layer in lease.layers:
            if self._written.get(layer) == lease.written:
                self._written.pop(layer, None)
            if self._attended.get(layer) == lease.attention:
                self._attended.pop(layer, None)
        if self.pages is not None and lease.holds_pages:
            self.pages.drop(lease.contexts)
        return receipt

    def _await(self, lease: Lease, now: float) -> None:
        if lease.awaited_s is None:
            lease.awaited_s = now
        elif now - lease.awaited_s > self._deadline_s:
            raise RetirementLateError(f"the {lease} is not over after {now - lease.awaited_s:.1f} s")

    def _edge(self, edge: Edge) -> bool:
        return edge not in self._omit
