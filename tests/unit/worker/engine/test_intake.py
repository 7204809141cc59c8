"""The ring's entries in the engine's hands: released after their last prompt is read, cancels and skips at once."""

from __future__ import annotations

from array import array

import pytest

from common.errors import InvariantError
from common.messages import LineRef
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import HostRingMemory
from ring.producer import Producer
from worker.engine.contexts import Context
from worker.engine.intake import Intake, Prompts
from worker.structures import Request, Sampling


def ring() -> tuple[Producer, Intake]:
    """64 KiB, 16 entries."""
    memory = HostRingMemory(1 << 16, 16)
    producer = Producer(memory, Accounting(1 << 16, 16), identity=lambda item: getattr(item, "ref", item))
    return producer, Intake(Consumer(producer), None)


def request(number: int, tokens: int = 3) -> Request:
    return Request(LineRef("j", number, 1), "u", "m", tokens, Sampling(2))


def test_an_entry_is_released_after_its_last_prompt() -> None:
    """R3, in life: two prompts of one batch are read in different steps."""
    producer, intake = ring()
    producer.publish("b", [(request(0), array("i", [7, 8, 9])), (request(1), array("i", [4, 5, 6]))])
    news = intake.look()
    assert [one.request.ref.index for one in news.arrivals] == [0, 1]
    first, second = news.arrivals
    assert intake.payload[second.offset : second.offset + 3].tolist() == [4, 5, 6]
    intake.before_reading(first.entry)
    intake.read(first.entry)
    producer.poll()
    assert producer.figures().live > 0
    intake.hold(second.entry, "waits")
    intake.read(second.entry)
    producer.poll()
    assert producer.figures().live == 0
    with pytest.raises(InvariantError):
        intake.read(second.entry)


def test_cancels_hold_nothing_and_name_lines() -> None:
    """In life: a cancel of a running line, and of one that the engine has not taken (a skip: it is told of both)."""
    producer, intake = ring()
    producer.publish("b", [(request(0), array("i", [7, 8, 9]))])
    intake.look()
    producer.publish("c", [(request(1), array("i", [1, 2, 3]))])
    producer.cancel([LineRef("j", 0, 1), LineRef("j", 1, 1)])
    news = intake.look()
    assert {ref.index for ref in news.cancels} == {0, 1}
    assert [(one.request.ref.index, one.entry) for one in news.arrivals] == [(1, -1)]
    assert intake.entries == 1


def test_what_is_no_request_is_a_bug() -> None:
    """Ours to raise: the session put something else into the ring, or ids that are not what the request says."""
    producer, intake = ring()
    producer.publish("b", [("no request", array("i", [1]))])
    with pytest.raises(InvariantError, match="not a Request"):
        intake.look()
    producer, intake = ring()
    producer.publish("b", [(request(0, tokens=2), array("i", [1, 2, 3]))])
    with pytest.raises(InvariantError, match="3 ids"):
        intake.look()


def test_a_shared_history_reads_the_prompt_of_who_brought_it() -> None:
    """H5 and R3, in life: the request that brought a document is cancelled before it is prefilled: its entry stays
    until the document is whole and has landed, or is let go; then it is released, once."""
    for over in ("whole", "let go"):
        producer, intake = ring()
        producer.publish("b", [(request(0, 6), array("i", range(6)))])
        (arrival,) = intake.look().arrivals
        prompts = Prompts(intake)
        context = Context(0, arrival.request, arrival.entry, arrival.offset)
        history = Context(1, request(0, 4), arrival.entry, arrival.offset, in_flight=1)
        prompts.came(context)
        prompts.look([history])
        prompts.read(context)
        prompts.read(context)
        assert intake.entries == 1
        history.prefilled = 4 if over == "whole" else 2
        history.ended = over == "let go"
        prompts.look([history])
        assert intake.entries == 1, "its last rows are still in flight"
        history.in_flight = 0
        prompts.look([history] if over == "whole" else [])
        assert intake.entries == 0
        prompts.look([history])
        producer.poll()
        assert producer.figures().live == 0
