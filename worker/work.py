"""rules: what is done about each line a worker holds: taken, stopped, handed back, answered, delivered, acknowledged.

The session (``worker.session``) decides who may speak; this decides what becomes of lines. A result is told to
``delivery`` only once it is stored (D1), a line is answered once, whoever stops it (D4), and a line the worker merely
leaves behind is handed back, not answered. Knows no state of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from common import limits
from common.messages import BatchLine, BodyPart, Fence, LineRef, PartTaken, Verdict
from worker import effects as do
from worker.delivery import Delivery, Whole
from worker.lines import Line, Lines, Stage, Wanted
from worker.responses import cancelled
from worker.structures import Outcome, Prepared

COUNTS = ("stale", "duplicate", "late", "unjudged", "suspended", "logins")
"""What a session counts: messages of another fence; lines that came twice; answers nobody waits for any more; held
lines a WELCOME said nothing about; times this process was stopped and went on; sessions that stood."""

_IN_RING, _ENDED, _DURABLE, _DELIVER = Stage.IN_RING, Stage.ENDED, Stage.DURABLE, Wanted.DELIVER
_ONE_ENDED = do.Resolve(1)
"""Needed several times a line, and slow to look up or to make."""


class Work:
    """Held lines, their way down and their results' way back. One thread; effects go to ``emit``."""

    def __init__(
        self,
        rows: Iterable[tuple[LineRef, str, int]],
        emit: Callable[[do.Effect], None],
        counts: dict[str, int],
    ) -> None:
        self.lines = Lines(rows)
        self.delivery = Delivery()
        self.handed_back: list[LineRef] = []
        self._emit = emit
        self._counts = counts

    def check(self) -> None:
        """Raise ``InvariantError`` unless the books agree."""
        self.lines.check()
        self.delivery.check()

    # -- down ---------------------------------------------------------------------------------------------------

    def receive(self, lines: Iterable[BatchLine], store_id: str, *, refuse: bool) -> int | str:
        """Take an assignment's lines, or hand them back at once (``refuse``): how many it took, or why it cannot."""
        taken = 0
        for line in lines:
            ref, _, total, body = line
            if total > limits.LINE_MAX_BYTES or len(body) > total:
                return "protocol broken by the broker: a body that is not as long as it says, or longer than a line"
            held = self.lines.get(ref)
            if held is not None and held.store_id != store_id:
                if held.stage != Stage.DURABLE:  # the next assignment will have another number
                    return f"another store gave out {ref.line} before, and it still runs"
                self._put_aside(held)
            elif held is not None:
                self._counts["duplicate"] += 1
                continue
            if refuse:
                self.handed_back.append(ref)
            else:
                taken += 1
                job = self.lines.receive(line, store_id)
                if job is not None:
                    self._emit(do.Tokenize(job))
        return taken

    def _put_aside(self, held: Line) -> None:
        """A store that is not this one gave the same line out: its job was submitted again after the store was lost.
        The old answer is kept, and is in nobody's way.
        """
        self.lines.forget(held.ref)
        reason = f"store {held.store_id} is gone, and another one gave this line out again"
        self._emit(do.Note("result_of_lost_store", "warning", {"line": str(held.ref.line), "store": held.store_id}))
        self._emit(do.SetAside(held.ref, reason))

    def receive_part(self, message: BodyPart) -> None:
        """The next part of a long body. One that does not fit is of a line that ended half way: dropped and counted."""
        fits = self.lines.receive_part(message.ref, message.offset, message.data)
        if fits is False:
            self._counts["late"] += 1
        elif fits is not True:
            self._emit(do.Tokenize(fits))

    def tokenized(self, prepared: Prepared) -> None:
        """A line is ready for the ring, unless it ended meanwhile."""
        if not self.lines.tokenized(prepared):
            self._counts["late"] += 1

    def admitted(self, refs: Iterable[LineRef]) -> None:
        """The engine runs these."""
        news = self.lines.admitted(refs)
        if news:
            self._emit(do.NoteRunning(news))

    # -- stopping -----------------------------------------------------------------------------------------------

    def cancel(self, refs: Iterable[LineRef], store_id: str) -> None:
        """The broker wants these to end: each is answered, with its result or as cancelled; unknown ones too."""
        held = []
        for ref in refs:
            line = self.lines.get(ref)
            if line is None:
                self.lines.owe(ref, store_id)
                self._emit(do.Save(cancelled(ref), store_id))
            else:
                held.append(line)
        self._stop(held)

    def hand_back_unrun(self) -> None:
        """This worker leaves: what its engine has not begun goes back unanswered, except what was cancelled."""
        unrun = self.lines.before(Stage.RUNNING)
        for line in unrun:
            if line.wanted == Wanted.DELIVER and not line.stopping:
                line.wanted = Wanted.HAND_BACK
        self._stop(unrun)

    def link_lost(self) -> None:
        """Nothing is on its way any more, and bodies half received will not be completed: the broker has them."""
        self.delivery.reset()
        for line in self.lines.before(Stage.TOKENIZING):
            self.lines.forget(line.ref)

    def settle(self, verdicts: Mapping[LineRef, str], store_id: str) -> None:
        """The broker's word on what the HELLO listed. A line without a verdict is kept or sent: both are safe."""
        for line in self.lines.durable(store_id):
            verdict = verdicts.get(line.ref, "")
            if verdict == "stored":
                self._discard(line.ref)
            else:
                self._counts["unjudged"] += not verdict
                self.delivery.add(line.ref, line.size)
        unwanted = []
        for ref, verdict in verdicts.items():
            held = self.lines.get(ref)
            if held is None or held.stage >= Stage.ENDED or verdict not in ("cancel", "stored"):
                continue
            if verdict == "stored":
                held.wanted = Wanted.DROP
            unwanted.append(held)
        self._stop(unwanted)

    def _stop(self, lines: Iterable[Line]) -> None:
        """End these: those in the ring through the engine, the others here and now."""
        requests = []
        for line in lines:
            if line.stage < Stage.IN_RING:
                self._end_unrun(line)
            elif line.stage < Stage.ENDED and not line.stopping and line.request is not None:
                line.stopping = True
                requests.append(line.request)
        if requests:
            self._emit(do.StopRequests(tuple(requests)))

    def _end_unrun(self, line: Line) -> None:
        if line.wanted == Wanted.DELIVER:
            self.lines.ended(line.ref, 0)
            self._emit(do.Save(cancelled(line.ref), line.store_id))
            return
        if line.wanted == Wanted.HAND_BACK:
            self.handed_back.append(line.ref)
        self.lines.forget(line.ref)

    # -- back ---------------------------------------------------------------------------------------------------

    def ended(self, outcome: Outcome) -> None:
        """A result, from engine or tokenizer: the first one of its line counts, any other is dropped and counted."""
        line = self.lines.get(outcome.ref)
        if line is None or line.stage >= _ENDED:
            self._counts["late"] += 1
            return
        if line.stage >= _IN_RING:
            self._emit(_ONE_ENDED)
        if line.wanted is _DELIVER or (line.wanted == Wanted.HAND_BACK and outcome.status != "cancelled"):
            line.wanted = _DELIVER
            self.lines.ended(line.ref, outcome.size)
            self._emit(do.Save(outcome, line.store_id))
            return
        if line.wanted == Wanted.HAND_BACK:
            self.handed_back.append(line.ref)
        self.lines.forget(line.ref)
        self._emit(do.NoteStopped((line.ref,)))

    def stored(self, refs: Iterable[LineRef], store_id: str | None) -> None:
        """These are durable; those of ``store_id``, the session's store if there is a session, want to go."""
        for ref in refs:
            line = self.lines.stored(ref)
            if line.store_id == store_id:
                self.delivery.add(ref, line.size)

    def deliver(self, fence: Fence) -> None:
        """Send what may be on its way now."""
        for step in self.delivery.next():
            if isinstance(step, Whole):
                self._emit(do.SendResults(fence, step.refs))
            else:
                self._emit(do.SendPart(fence, step.ref, step.offset, step.length))

    def acknowledged(self, verdicts: Iterable[Verdict]) -> None:
        """The broker has these durably, or knows a better one, or refuses: rows go, or are set aside."""
        gone = []
        for verdict in verdicts:
            ref, word, reason = verdict
            line = self.lines.get(ref)
            if line is None or line.stage is not _DURABLE or not self.delivery.settle(ref):
                self._counts["late"] += 1
                continue
            self.lines.forget(ref)
            if word == "refused":
                fields: dict[str, object] = {"line": str(ref.line), "reason": reason}
                self._emit(do.Note("result_refused", "error", fields))
                self._emit(do.SetAside(ref, reason))
            else:
                gone.append(ref)
        if gone:
            self._emit(do.Discard(tuple(gone)))

    def part_taken(self, message: PartTaken) -> None:
        """The broker holds a long result so far."""
        if not self.delivery.part_taken(message.ref, message.offset):
            self._counts["late"] += 1

    def _discard(self, ref: LineRef) -> None:
        self.lines.forget(ref)
        self._emit(do.Discard((ref,)))
