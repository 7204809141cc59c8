"""shell: an engine without a model: each request is answered with its own prompt, through the real ring.

For measuring and testing the fleet alone. Its tokens are the bytes of the last message's text. Same interface as
``worker.engine.engine.Engine``; needs no torch.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common import limits
from common.messages import LineRef
from ring.consumer import Consumer
from ring.descriptor import Entry
from worker.engine.stopping import Answer
from worker.parameters import unsupported
from worker.structured import Structure
from worker.structures import Choice, EngineFigures, Finished, Guide, Request, TokenLogprob

VOCABULARY = 256
INT32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
"""The encoding that makes an int32 of each character, and so, over Latin-1, of each byte."""


class EchoCodec:
    """Bytes as tokens; a conversation is its last message."""

    vocabulary = VOCABULARY

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        return str(messages[-1]["content"])

    def encode(self, texts: Sequence[str], special: bool) -> list[Sequence[int]]:
        return [array("i", text.encode().decode("latin-1").encode(INT32)) for text in texts]

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return [text_of(one) for one in answers]

    def pieces(self, ids: Iterable[int]) -> dict[int, bytes]:
        return {one: bytes([one]) for one in ids}

    def guide(self, structure: Structure, stop_ids: Sequence[int]) -> Guide:
        raise unsupported(f"{structure.param} is not supported by an echo", structure.param)


def text_of(ids: Sequence[int]) -> str:
    """What byte tokens say."""
    return bytes(ids).decode(errors="replace")


class EchoEngine:
    """Runs at most ``concurrency`` requests at once, each for ``delay_s``. One thread."""

    def __init__(
        self,
        consumer: Consumer,
        concurrency: int,
        delay_s: float,
        on_finished: Callable[[Finished], None],
        on_admitted: Callable[[Request], None],
    ) -> None:
        self.concurrency = concurrency
        self.steps = self.layers = self.tokens = 0
        self.step_seconds: deque[float] = deque()
        """Always empty: an echo is no pass over layers."""
        self._consumer = consumer
        self._delay_s = delay_s
        self._on_finished = on_finished
        self._on_admitted = on_admitted
        self._waiting: deque[tuple[Request, bytes]] = deque()
        self._running: deque[tuple[float, Request, bytes]] = deque()

    def figures(self) -> EngineFigures:
        """Any thread."""
        return EngineFigures(
            self.steps, self.tokens, contexts_running=len(self._running), contexts_waiting=len(self._waiting)
        )

    def run(self, stop: Any) -> None:
        """Step until ``stop`` is set or the ring is aborted."""
        while not stop.is_set() and not self._consumer.aborted:
            if not self.step():
                self._consumer.wait(self._idle_s())

    def _idle_s(self) -> float:
        if not self._running:
            return limits.ENGINE_IDLE_S
        return max(0.0, min(limits.ENGINE_IDLE_S, self._running[0][0] - time.monotonic()))

    def step(self) -> bool:
        """Take what is published, begin what fits, end what is due; False when there was nothing to do."""
        news = self._consumer.take()
        for entry in news:
            self._take(entry)
        begun = self._begin()
        ended = self._end()
        self.steps += bool(begun or ended)
        return bool(news or begun or ended)

    def _take(self, entry: Entry) -> None:
        if entry.is_cancel:
            self._cancel({one.item.ref for one in entry.requests if isinstance(one.item, Request)})
        else:
            payload = self._consumer.memory.payload
            for one in entry.requests:
                request = one.item
                if not isinstance(request, Request):
                    raise TypeError(f"entry {entry.sequence} carries {type(request).__name__}, not a Request")
                if entry.is_skip:
                    self._on_finished(Finished(request, (), "cancelled"))
                else:
                    piece = payload[one.offset_tokens : one.offset_tokens + one.token_count]
                    self._waiting.append((request, piece.tobytes().decode(INT32).encode("latin-1")))
        self._consumer.release(entry)

    def _begin(self) -> int:
        begun = 0
        due = time.monotonic() + self._delay_s
        while self._waiting and len(self._running) < self.concurrency:
            request, ids = self._waiting.popleft()
            self._on_admitted(request)
            self._running.append((due, request, ids))
            begun += 1
        return begun

    def _end(self) -> int:
        ended = 0
        now = time.monotonic()
        while self._running and self._running[0][0] <= now:
            _, request, ids = self._running.popleft()
            finished = echoed(request, ids)
            self.tokens += len(finished.token_ids)
            self._on_finished(finished)
            ended += 1
        return ended

    def _cancel(self, refs: set[LineRef]) -> None:
        for request, _ in [one for one in self._waiting if one[0].ref in refs]:
            self._on_finished(Finished(request, (), "cancelled"))
        for _, request, _ids in [one for one in self._running if one[1].ref in refs]:
            self._on_finished(Finished(request, (), "cancelled"))
        self._waiting = deque(one for one in self._waiting if one[0].ref not in refs)
        self._running = deque(one for one in self._running if one[1].ref not in refs)


def echoed(request: Request, ids: Sequence[int]) -> Finished:
    """The prompt as each answer, ended as a model's answer would be: at a stop string, or at ``max_tokens``. What is
    sure has a log probability of 0. Of an input to be embedded, how many tokens it has."""
    sampling = request.sampling
    shape = sampling.shape
    if request.pieces:
        counted = tuple(Choice((), "length", vector=(float(count),)) for count in request.pieces)
        return Finished(request, (), "length", others=counted[1:], vector=counted[0].vector)
    if not sampling.stop and not sampling.stop_ids and shape is None and sampling.choices == 1:
        reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        return Finished(request, ids[: sampling.max_tokens], reason)
    sure = None if shape is None or shape.logprobs < 0 else TokenLogprob(0.0, ())
    answer = Answer(sampling, text_of)
    for token in ids:
        if answer.add(token, sure) is not None:
            break
    choice = answer.choice._replace(reason=answer.reason or "stop")
    others = (choice,) * (sampling.choices - 1)
    return Finished(
        request, choice.token_ids, choice.reason, text_chars=choice.text_chars, logprobs=choice.logprobs, others=others
    )
