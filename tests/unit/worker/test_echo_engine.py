"""The engine without a model keeps an engine's contract: each request ends exactly once, through the real ring."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from common.messages import LineRef
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import HostRingMemory
from ring.producer import Producer
from worker.echo_engine import EchoEngine, echoed
from worker.structures import Finished, Request, Sampling


class Table:
    def __init__(self, concurrency: int = 2, delay_s: float = 0.0) -> None:
        self.producer = Producer(HostRingMemory(4096, 16), Accounting(4096, 16), identity=lambda item: item.ref)
        self.finished: list[Finished] = []
        self.admitted: list[Request] = []
        self.engine = EchoEngine(
            Consumer(self.producer), concurrency, delay_s, self.finished.append, self.admitted.append
        )

    def publish(self, *texts: bytes, **sampling: object) -> list[Request]:
        made = []
        for text in texts:
            index = len(self.admitted) + len(made) + len(self.finished) * 100
            sample = Sampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
            request = Request(LineRef("job", index, 1), "/v1/completions", "m", len(text), sample)
            assert self.producer.publish(f"b{index}", [(request, array("i", list(text)))]) is not None
            made.append(request)
        return made


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.producer.poll()
    figures = made.producer.figures()
    assert figures.live == 0, "what was taken from the ring was given back"


def test_an_answer_is_the_prompt(table: Table) -> None:
    """Two hundred bytes in, two hundred bytes out."""
    table.publish(b"abc", b"de")
    while table.engine.step():
        pass
    assert [bytes(one.token_ids) for one in table.finished] == [b"abc", b"de"]
    assert [one.reason for one in table.finished] == ["stop", "stop"]
    assert len(table.admitted) == 2
    assert table.engine.tokens == 5


def test_limits_and_stops_end_an_echo_too() -> None:
    """A fleet test must not need a model to see max_tokens and stop obeyed."""
    request = Request(LineRef("job", 0, 1), "/v1/completions", "m", 5, Sampling(3))
    assert echoed(request, list(b"abcde")).reason == "length"
    assert bytes(echoed(request, list(b"abcde")).token_ids) == b"abc"
    stops = Request(LineRef("job", 0, 1), "/v1/completions", "m", 5, Sampling(50, stop=("cd",)))
    assert echoed(stops, list(b"abcde")).reason == "stop"


def test_no_more_run_at_once_than_concurrency_says() -> None:
    """A slow echo: the third waits, and is not counted as run."""
    table = Table(concurrency=2, delay_s=60.0)
    made = table.publish(b"a", b"b", b"c")
    table.engine.step()
    assert len(table.admitted) == 2
    table.producer.cancel(made)
    table.engine.step()
    assert {one.request.ref for one in table.finished} == {one.ref for one in made}
    assert {one.reason for one in table.finished} == {"cancelled"}
    assert not table.engine.step()
    assert len(table.finished) == 3


def test_a_cancelled_entry_that_was_not_taken_is_skipped(table: Table) -> None:
    """Cancelled before the engine looked: answered once, never run."""
    made = table.publish(b"abc")
    table.producer.cancel(made)
    while table.engine.step():
        pass
    assert [one.reason for one in table.finished] == ["cancelled"]
    assert not table.admitted
