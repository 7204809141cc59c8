"""shell: the ranks of one engine in step: rank 0 says what enters before each plan, and compares what each step gave.

Plans are functions of what they are made from, so every rank makes the same ones from the same news. Rank 0's ring
gives an entry back when the slowest rank has read it. All of this is said on host sockets, so that nothing here waits
for a device. Nobody waits for a rank that ended: its socket is closed, which is an error at once. One thread each, the
engine's.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence

from common.errors import HaulierError
from common.limits import STEP_DEADLINE_S
from ring.consumer import Consumer, Source
from ring.descriptor import Entry
from ring.mirror import Mirror, MirrorConsumer
from worker.engine.callbacks import Stop
from worker.engine.rank_messages import Begin, Landed, Message, News, Read, carried, digest, pack, unpack

_LENGTH = struct.Struct("<Q")


class RankLostError(HaulierError):
    """Another rank of this engine ended, or does not answer."""


class RanksDifferError(HaulierError):
    """Two ranks sampled different tokens in a step, or made another step of it: no answer of theirs can be trusted."""


class RankLink:
    """One socket between rank 0 and another rank; ``name`` is the other end's, in words."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket, self.name = connection, name

    def send(self, message: Message) -> None:
        """Raises ``RankLostError`` when the other end is gone, or takes nothing for ``STEP_DEADLINE_S``."""
        data = pack(message)
        self._socket.settimeout(STEP_DEADLINE_S)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankLostError(f"{self.name} takes no messages: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; waits for it, at most ``timeout_s``. Raises ``RankLostError``."""
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return unpack(self._exactly(length))

    def waiting(self) -> bool:
        """Whether a message, or the other end's end, is there to be received."""
        looking = select.poll()
        looking.register(self._socket, select.POLLIN)
        return bool(looking.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts, missing = [], count
        while missing:
            try:
                part = self._socket.recv(missing)
            except OSError as error:
                raise RankLostError(f"{self.name} does not answer: {error}") from error
            if not part:
                raise RankLostError(f"{self.name} ended")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Leader:
    """Rank 0's end of it: ``links`` to the other ranks, in order."""

    def __init__(self, links: Sequence[RankLink]) -> None:
        self._links = tuple(links)
        self._read = [-1] * len(self._links)

    def tell(self, message: Message) -> None:
        """To every rank."""
        for link in self._links:
            link.send(message)

    def hear(self) -> None:
        """What came meanwhile about the ring; waits for nothing."""
        for at, link in enumerate(self._links):
            while link.waiting():
                self._note_read(at, link.receive(STEP_DEADLINE_S))

    def agree(self, step: int, numbers: Sequence[int]) -> None:
        """Every rank has landed ``step`` with these very numbers. Raises ``RanksDifferError``, ``RankLostError``."""
        mine = Landed(step, digest(numbers))
        for at, link in enumerate(self._links):
            while isinstance(said := link.receive(STEP_DEADLINE_S), Read):
                self._note_read(at, said)
            if said != mine:
                raise RanksDifferError(
                    f"{link.name} has {said}, rank 0 has {mine}: they computed other rows or other tokens, and "
                    "neither can be trusted"
                )

    @property
    def read_through(self) -> int:
        """All entries up to this sequence are read by every other rank."""
        return min(self._read)

    def _note_read(self, at: int, said: Message) -> None:
        if not isinstance(said, Read):
            raise RanksDifferError(f"{self._links[at].name} says {said} where rank 0 is between steps")
        self._read[at] = said.through


class LeadingConsumer(Consumer):
    """Rank 0's side of the worker's ring: what is taken is passed on, and goes back when every rank has read it."""

    def __init__(self, producer: Source, leader: Leader) -> None:
        super().__init__(producer)
        self._leader = leader
        self._mine = self._given = -1

    def take(self) -> list[Entry]:
        """See ``Consumer``; once a plan."""
        entries = super().take()
        self._leader.hear()  # before the news: behind them a rank may say what it landed
        self._settle()
        self._leader.tell(News(tuple(carried(entry) for entry in entries)))
        return entries

    @property
    def aborted(self) -> bool:
        """``LeadingStop`` asks for all ranks (``rung``): nobody ends between two steps alone."""
        return False

    def rung(self) -> bool:
        """Whether either side rang the abort word."""
        return super().aborted

    def _give_back(self, through: int) -> None:
        self._mine = through
        self._settle()

    def _settle(self) -> None:
        through = min(self._mine, self._leader.read_through)
        if through > self._given:
            self._given = through
            super()._give_back(through)


class LeadingStop:
    """``stop`` or an aborted ring ends the engine; every rank hears of it before the same step."""

    def __init__(self, stop: Stop, consumer: LeadingConsumer, leader: Leader) -> None:
        self._stop, self._consumer, self._leader = stop, consumer, leader

    def is_set(self) -> bool:
        """Asked once a step."""
        stop = self._stop.is_set() or self._consumer.rung()
        self._leader.tell(Begin(stop))
        return stop


class Follower:
    """Another rank's end of it: one ``link``, to rank 0."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def agree(self, step: int, numbers: Sequence[int]) -> None:
        """Say what ``step`` gave here; rank 0 compares."""
        self._link.send(Landed(step, digest(numbers)))

    def read(self, through: int) -> None:
        """The ring is read up to there."""
        self._link.send(Read(through))

    def news(self) -> News:
        """What enters before this plan; waits for rank 0."""
        said = self._link.receive()
        if not isinstance(said, News):
            raise RanksDifferError(f"rank 0 says {type(said).__name__} where this rank plans a step")
        return said

    def is_set(self) -> bool:
        """Whether the engine ends here; waits for rank 0. Asked once a step."""
        said = self._link.receive()
        if not isinstance(said, Begin):
            raise RanksDifferError(f"rank 0 says {type(said).__name__} where this rank begins a step")
        return said.stop


class FollowingConsumer(MirrorConsumer):
    """Another rank's side: takes what rank 0 passes on, into the same places."""

    def __init__(self, mirror: Mirror, follower: Follower) -> None:
        super().__init__(mirror)
        self._mirror, self._follower = mirror, follower
        self._said = -1

    def wait(self, timeout_s: float) -> bool:
        """Rank 0 sleeps for all."""
        return True

    def take(self) -> list[Entry]:
        """See ``Consumer``; once a plan."""
        for entry, ids in self._follower.news().entries:
            self._mirror.put(entry, ids)
        self._say_read()
        return super().take()

    def _give_back(self, through: int) -> None:
        super()._give_back(through)
        self._say_read()

    def _say_read(self) -> None:
        through = self.read_through
        if through > self._said:
            self._said = through
            self._follower.read(through)
