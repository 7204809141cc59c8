"""The clock on the transport: it counts the doors and the device calls in them, and leaves everything as it was."""

from __future__ import annotations

from worker.engine.lifecycle_clock import DEVICE_CALLS, DOORS, LifecycleClock
from worker.engine.staged_program import DEEP, EVENTS_COUNT, Program
from worker.engine.virtual_device import VirtualDevice


def test_it_times_the_doors_and_goes_away() -> None:
    """In life: some steps of a bench. What runs under it gives the same bytes; afterwards nothing is wrapped."""
    device = VirtualDevice(events=EVENTS_COUNT)
    program = Program(device, DEEP)
    clock = LifecycleClock(program.transport)
    program.run()
    assert 0 < clock.device_s < clock.doors_s
    assert clock.lifecycle_s == clock.doors_s - clock.device_s
    before = clock.doors_s
    clock.stop()
    program.finish()
    assert program.equal()
    assert clock.doors_s == before
    assert not any(name in vars(program.transport) for name in DOORS)
    assert not any(name in vars(device) for name in DEVICE_CALLS)


def test_device_calls_elsewhere_are_not_the_lifecycles() -> None:
    """The model's own launches are no part of it."""
    device = VirtualDevice(events=EVENTS_COUNT)
    clock = LifecycleClock(Program(device, DEEP).transport)
    device.release(device.record(next(iter(device._queues.values()))))
    assert clock.device_s == 0
    clock.stop()
