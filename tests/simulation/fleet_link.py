"""Connections of the simulated fleet: messages are dropped, delayed, duplicated, reordered, and go on after a cut.

A connection that lost a message is ``faulty``: real ones do not heal either, so the calm part of a schedule cuts it.
The broker's end splits long bodies in parts, as its real link does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.effects import SendBatch
from broker.inputs import Came
from common import limits, messages

if TYPE_CHECKING:
    from tests.simulation.fleet_world import FleetWorld


@dataclass(eq=False)
class Wire:
    """One connection between one login of a worker and one broker."""

    peer: bytes
    link: FakeLink
    worker: str
    up: deque[tuple[float, Any]] = field(default_factory=deque)
    down: deque[tuple[float, Any]] = field(default_factory=deque)
    cut: bool = False
    """Closed, and both ends know."""
    dark: bool = False
    """Nothing passes, and no end knows."""
    faulty: bool = False
    carried_at: float = 0.0
    """When the broker last got something of its session through it."""
    sent: deque[tuple[bool, Any]] = field(default_factory=lambda: deque(maxlen=6))
    """What was last sent, with whether it went up: it may come out of the next connection, arrived or not."""
    late: tuple[list[tuple[float, Any]], list[tuple[float, Any]]] | None = None
    """What the connection before it had not delivered, up and down, and when it comes out of this one."""


def put(world: FleetWorld, wire: Wire, queue: deque[tuple[float, Any]], message: Any) -> None:
    """Send, as far as chance lets it."""
    if hasattr(message, "fence") and not isinstance(message, messages.Welcome):
        wire.sent.append((queue is wire.up, message))
    if wire.dark:
        wire.faulty = True
        return
    chance, faults = world.chance, world.faults
    due = world.clock.mono
    if not world.calm and faults.link and chance.random() < faults.link:
        how = chance.random()
        world.counts["link_faults"] += 1
        if how < 0.25:
            wire.faulty = True
            return
        if how < 0.5:
            due += chance.uniform(0.0, 4.0)
        elif how < 0.75:
            queue.append((due, message))
        elif queue:
            wire.faulty = True
            queue.append(queue[-1])
            queue[-2] = (due, message)
            return
    queue.append((due, message))


def take(world: FleetWorld, queue: deque[tuple[float, Any]]) -> Any:
    """The next message if it has arrived, else None."""
    if queue and queue[0][0] <= world.clock.mono:
        return queue.popleft()[1]
    return None


class FakeLink:
    """What the broker's ``Link`` is to its server."""

    busy = False

    def __init__(self, world: FleetWorld) -> None:
        self.world = world
        self.parts: dict[bytes, deque[messages.BodyPart]] = {}

    def wait(self, seconds: float) -> None:
        pass

    def receive(self) -> Iterator[Came]:
        world = self.world
        for message in world.asked:
            yield Came(b"client", "", True, message)
        world.asked = []
        for wire in [one for one in world.wires.values() if one.link is self and one.up]:
            for _ in range(int(world.chance.random() * (len(wire.up) + 1.5))):
                message = take(world, wire.up)
                if message is None:
                    break
                if world.broker is not None and wire.peer in world.broker.state.sessions:
                    wire.carried_at = world.clock.mono
                yield Came(wire.peer, "", True, message)
            if wire.cut and not wire.up:
                world.wires.pop(wire.peer, None)

    def send(self, peer: bytes, message: Any) -> bool:
        world = self.world
        if isinstance(message, messages.Ack | messages.Welcome):
            world.check_said(message)
        if peer == b"client":
            return True
        wire = world.wires.get(peer)
        if wire is None or wire.cut or wire.link is not self:
            return False
        if not world.calm and world.faults.blocking and world.chance.random() < world.faults.blocking:
            return False
        put(world, wire, wire.down, message)
        world.point("broker.between_sends")
        return True

    def send_batch(self, batch: SendBatch) -> bool:
        size = limits.PART_MAX_BYTES
        lines = []
        for one in batch.lines:
            body = self.world.spool.read(one.ref.job, one.offset, one.size)
            lines.append(messages.BatchLine(one.ref, one.url, one.size, body[:size]))
            for offset in range(size, one.size, size):
                part = messages.BodyPart(batch.fence, one.ref, offset, body[offset : offset + size])
                self.parts.setdefault(batch.peer, deque()).append(part)
        return self.send(batch.peer, messages.Batch(batch.fence, batch.assignment, tuple(lines)))

    def send_parts(self, mono: float) -> list[bytes]:
        failed = []
        for peer, parts in list(self.parts.items()):
            if not self.send(peer, parts.popleft()):
                failed.append(peer)
                parts.clear()
            if not parts:
                del self.parts[peer]
        return failed

    def forget(self, job: str) -> None:
        for parts in self.parts.values():
            for part in [one for one in parts if one.ref.job == job]:
                parts.remove(part)
        self.parts = {peer: parts for peer, parts in self.parts.items() if parts}
