"""Ranks in step over real socket pairs: what enters, what is compared, when ring bytes go back, and no wait for the
dead."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Iterator

import pytest

from common.messages import LineRef
from ring.accounting import Accounting
from ring.consumer import Consumer
from ring.memory import HostRingMemory
from ring.mirror import Mirror
from ring.producer import Producer
from worker.engine import lockstep
from worker.engine.lockstep import (
    Follower,
    FollowingConsumer,
    Leader,
    LeadingConsumer,
    LeadingStop,
    RankLink,
    RankLostError,
    RanksDifferError,
)
from worker.engine.rank_messages import Begin, Landed, News, Read
from worker.structures import Request, Sampling

CAPACITY, ENTRIES = 256, 16


class Rank:
    """A further rank, both ends of its link."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        self.link = RankLink(ours, f"rank {number}")
        self.end = RankLink(theirs, "rank 0")
        self.follower = Follower(self.end)
        self.memory = HostRingMemory(CAPACITY, ENTRIES)
        self.consumer = FollowingConsumer(Mirror(self.memory), self.follower)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(1), Rank(2)]
    yield made
    for one in made:
        one.link.close()
        one.end.close()


def ring() -> Producer:
    return Producer(HostRingMemory(CAPACITY, ENTRIES), Accounting(CAPACITY, ENTRIES))


def prompt(number: int) -> tuple[Request, array[int]]:
    """One of 16 tokens, all different: a quarter of the ring."""
    ids = array("i", range(100 * number, 100 * number + 16))
    return Request(LineRef("job", number, 1), "u", "m", 16, Sampling(4), None, ids), ids


def leader(ranks: list[Rank]) -> Leader:
    return Leader([one.link for one in ranks])


def test_every_rank_takes_what_rank_0_took(ranks: list[Rank]) -> None:
    """In the same plan, with the same places; a plan without news is one too."""
    producer, lead = ring(), leader(ranks)
    consumer = LeadingConsumer(producer, lead)
    for numbers in ((0, 1), (), (2,)):
        for number in numbers:
            producer.publish("b", [prompt(number)])
        mine = consumer.take()
        assert len(mine) == len(numbers)
        for rank in ranks:
            found = rank.consumer.take()
            assert [one.sequence for one in found] == [one.sequence for one in mine]
            for entry, number in zip(found, numbers, strict=True):
                (request,) = entry.requests
                at = request.offset_tokens
                assert rank.memory.payload[at : at + 16].tolist() == prompt(number)[1].tolist()


def test_the_ring_goes_back_when_the_slowest_rank_has_read_it(ranks: list[Rank]) -> None:
    """R3 over ranks: not when rank 0 has, not when some have; then at the next plan."""
    producer, lead = ring(), leader(ranks)
    consumer = LeadingConsumer(producer, lead)
    producer.publish("b", [prompt(0)])
    (entry,) = consumer.take()
    first, second = (rank.consumer.take()[0] for rank in ranks)
    consumer.release(entry)
    assert producer.poll() == 0
    ranks[1].consumer.release(second)
    consumer.take()
    assert producer.poll() == 0
    ranks[0].consumer.take()
    ranks[0].consumer.release(first)
    consumer.take()
    assert producer.poll() == 1
    assert producer.figures().live == 0


def _refill(consumer: Consumer, producer: Producer, ranks: list[Rank]) -> list[int]:
    """Rank 0 reads and gives back, new prompts come as long as the ring takes them, rank 1 is late: what it then finds
    of the first prompt."""
    producer.publish("b", [prompt(0)])
    (entry,) = consumer.take()
    (late,) = ranks[0].consumer.take()
    consumer.release(entry)
    for number in range(1, 9):
        producer.poll()
        if producer.publish("b", [prompt(number)]) is None:
            break
        for one in consumer.take():
            consumer.release(one)
        ranks[0].consumer.take()
    at = late.requests[0].offset_tokens
    return ranks[0].memory.payload[at : at + 16].tolist()


def test_a_late_rank_still_finds_its_prompt(ranks: list[Rank]) -> None:
    """The session is held back instead: the ring is full."""
    producer = ring()
    consumer = LeadingConsumer(producer, leader(ranks[:1]))
    assert _refill(consumer, producer, ranks) == prompt(0)[1].tolist()
    assert producer.publish("b", [prompt(9)]) is None


def test_control_a_ring_given_back_at_rank_0s_rate_overwrites_a_late_ranks_prompt(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with rank 0's own reads counting for all."""
    monkeypatch.setattr(Leader, "read_through", property(lambda self: 1 << 62))
    producer = ring()
    consumer = LeadingConsumer(producer, leader(ranks[:1]))
    assert _refill(consumer, producer, ranks) != prompt(0)[1].tolist()


def test_steps_are_compared(ranks: list[Rank]) -> None:
    """The same step, the same numbers: whatever a rank said about the ring before is heard too."""
    lead = leader(ranks)
    for rank in ranks:
        rank.follower.read(4)
        rank.follower.agree(7, [1, 2, 3])
    lead.agree(7, [1, 2, 3])
    assert lead.read_through == 4


@pytest.mark.parametrize(("step", "numbers"), [(7, [1, 2, 4]), (8, [1, 2, 3]), (7, [1, 2])])
def test_a_rank_with_another_step_or_other_tokens_is_named(ranks: list[Rank], step: int, numbers: list[int]) -> None:
    """Control of the test above: any difference is one."""
    ranks[0].follower.agree(7, [1, 2, 3])
    ranks[1].follower.agree(step, numbers)
    with pytest.raises(RanksDifferError, match=r"rank 2 has Landed.*rank 0 has Landed"):
        leader(ranks).agree(7, [1, 2, 3])


def test_all_end_before_the_same_step(ranks: list[Rank]) -> None:
    """Told to stop, or by an aborted ring: rank 0 asks once a step, and the others hear it there."""
    producer, lead, stop = ring(), leader(ranks), threading.Event()
    consumer = LeadingConsumer(producer, lead)
    leading = LeadingStop(stop, consumer, lead)
    assert [leading.is_set(), *(rank.follower.is_set() for rank in ranks)] == [False] * 3
    producer.handover.abort()
    assert not consumer.aborted  # nobody ends alone between two steps
    assert [leading.is_set(), *(rank.follower.is_set() for rank in ranks)] == [True] * 3
    stop.set()
    assert [LeadingStop(stop, LeadingConsumer(ring(), lead), lead).is_set(), ranks[0].follower.is_set()] == [True] * 2


def test_a_rank_that_is_somewhere_else_is_noticed(ranks: list[Rank]) -> None:
    """Each message has its place in a step; another one means that plans have parted."""
    ranks[0].link.send(News(()))
    with pytest.raises(RanksDifferError, match="says News where this rank begins a step"):
        ranks[0].follower.is_set()
    ranks[0].link.send(Begin(False))
    with pytest.raises(RanksDifferError, match="says Begin where this rank plans a step"):
        ranks[0].follower.news()
    ranks[1].end.send(Landed(3, 4))
    with pytest.raises(RanksDifferError, match=r"rank 2 says Landed.* where rank 0 is between steps"):
        LeadingConsumer(ring(), leader(ranks)).take()


def test_nobody_waits_for_a_rank_that_ended(ranks: list[Rank]) -> None:
    """Its closed socket is an error at once, wherever it is waited for, on both sides."""
    lead = leader(ranks)
    ranks[1].end.close()
    ranks[0].follower.agree(1, [])
    with pytest.raises(RankLostError, match="rank 2 ended"):
        lead.agree(1, [])
    with pytest.raises(RankLostError, match="rank 2 ended"):
        lead.hear()
    with pytest.raises(RankLostError, match="rank 2 takes no messages"):
        lead.tell(Begin(False))
    ranks[0].link.close()
    assert ranks[0].follower.is_set() is False  # what was said before is heard
    with pytest.raises(RankLostError, match="rank 0 ended"):
        ranks[0].follower.is_set()
    with pytest.raises(RankLostError, match="rank 0 takes no messages"):
        ranks[0].follower.agree(2, [])


def test_a_rank_that_does_not_answer_is_given_up(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has a deadline."""
    monkeypatch.setattr(lockstep, "STEP_DEADLINE_S", 0.05)
    with pytest.raises(RankLostError, match="rank 1 does not answer: timed out"):
        leader(ranks).agree(1, [])
    with pytest.raises(RankLostError, match="takes no messages"):
        _fill(ranks[0].link)


def _fill(link: RankLink) -> None:
    """Send until the socket has no room."""
    for _ in range(1_000_000):
        link.send(News(()))


def test_a_link_carries_messages_of_any_length(ranks: list[Rank]) -> None:
    """Longer than the socket takes at once; the reader puts it together."""
    ids = array("i", range(300_000))
    request = Request(LineRef("job", 0, 1), "u", "m", len(ids), Sampling(4), None, ids)
    producer = Producer(HostRingMemory(1 << 21, 16), Accounting(1 << 21, 16))
    producer.publish("b", [(request, ids)])
    heard: list[object] = []
    reading = threading.Thread(target=lambda: heard.append(ranks[0].end.receive()))
    reading.start()
    LeadingConsumer(producer, leader(ranks[:1])).take()
    reading.join(30)
    (news,) = heard
    assert isinstance(news, News)
    assert news.entries[0].ids == ids
    ranks[0].end.send(Read(1))
    assert ranks[0].link.waiting()
