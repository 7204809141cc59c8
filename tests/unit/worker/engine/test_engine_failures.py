"""The engine when its device fails: nothing is published after it, nothing reused, and its thread ends with the reason
(L4, L6, L7, L8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.worker.engine import rigs
from worker.engine import landing
from worker.engine.device import DeviceError, Queue, QueueName
from worker.engine.engine import UnprovenError
from worker.engine.landing import StepLateError
from worker.engine.lanes import Temperament
from worker.engine.leases import State
from worker.engine.local import LocalEngine
from worker.engine.page_leases import PageHeldError
from worker.engine.transport import TransportFailedError
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

PROMPTS = (9, 5)


def started(temperament: Temperament = Temperament.EARLY, steps: int = 3) -> LocalEngine:
    """Two requests in the middle of their answers."""
    local = LocalEngine(rigs.model(temperament), rigs.settings())
    local.submit([rigs.prompt(length, length) for length in PROMPTS], [Sampling(20), Sampling(20)])
    for _ in range(steps):
        assert local.step()
    assert not local.finished
    return local


def device_of(local: LocalEngine) -> VirtualDevice:
    device = local.engine.device
    assert isinstance(device, VirtualDevice)
    return device


def on_its_thread(local: LocalEngine) -> BaseException | None:
    """Run the engine as a worker does: what its thread ends with."""
    ended: list[BaseException] = []

    def body() -> None:
        try:
            local.engine.run(threading.Event())
        except BaseException as failure:  # noqa: BLE001 (handed to the test's own thread)
            ended.append(failure)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the engine never ended"
    return ended[0] if ended else None


def fail_after(device: VirtualDevice, name: str, calls: int, when: Callable[..., bool] = lambda *_: True) -> None:
    """From its ``calls``-th matching call on, the device's method raises."""
    real = getattr(device, name)
    seen = 0

    def method(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += when(*arguments)
        if seen >= calls:
            raise DeviceError(f"{name}: unspecified launch failure")
        return real(*arguments, **named)

    setattr(device, name, method)


def is_history(queue: Queue, *_: Any) -> bool:
    return queue.name is QueueName.H2D


@pytest.mark.parametrize("method", ["copy", "launch", "record", "wait", "done"])
@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_wherever_the_device_raises_nothing_is_published_after_it(method: str, call: int) -> None:
    """L6, L8, in life: a copy or launch is refused by the driver in any place of a step. Publication ends at once, the
    leases stay until a drain proves completion, and the engine accepts nothing more."""
    local = started()
    engine, device = local.engine, device_of(local)
    fail_after(device, method, call)
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        local.run()
    assert "unspecified launch failure" in str(engine.transport.failed)
    assert not local.finished
    assert all(lease.state is State.QUARANTINED for lease in engine.transport.book.live)
    with pytest.raises(TransportFailedError):
        local.step()
    held = [page for page in (engine.pages.current(index) for index in range(3)) if engine.pages.held(page.index)]
    for page in held:
        with pytest.raises(PageHeldError):
            engine.pages.recycle(page)
    delattr(device, method)
    assert local.close().proved
    assert engine.pages.holds == 0
    assert not local.finished


def test_a_partial_submission_is_quarantined_until_a_drain_proves_it_over() -> None:
    """L6, in life: the second of a stage's copies fails while the first is on its way."""
    local = started(Temperament.LATE)
    fail_after(device_of(local), "copy", 2, is_history)
    with pytest.raises(DeviceError):
        local.run()
    engine = local.engine
    assert engine.transport.book.live
    assert engine.pages.holds > 0
    delattr(device_of(local), "copy")
    ended = local.close()
    assert ended.proved
    assert ended.established == ("h2d", "d2h", "materialise", "device")


def test_a_cancelled_context_in_the_middle_of_a_failing_copy_is_not_answered_twice() -> None:
    """L8: cancelled while its history is on its way, then the copy engine dies: one answer, cancelled; the other
    request gets none from this worker."""
    local = started(Temperament.LATE)
    local.cancel([0])
    device_of(local).break_queue(QueueName.H2D, "uncorrectable error")
    with pytest.raises(DeviceError, match="uncorrectable"):
        local.run()
    assert [(number, one.reason) for number, one in local.finished.items()] in ([], [(0, "cancelled")])
    ended = local.close()
    assert not ended.proved
    assert local.engine.pages.holds > 0


@pytest.mark.parametrize("drains", [True, False], ids=["drains", "hangs"])
def test_an_event_that_never_completes_ends_the_engine_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """L4, in life: a queue that hangs. The engine names the step instead of polling for ever (LMCache 2942), rings the
    ring's abort word, and its thread ends, whether or not anything proves that the device is done."""

    def hang(queue: Queue) -> None:
        raise DeviceError(f"{queue.name.value} does not answer")

    monkeypatch.setattr(landing, "STEP_DEADLINE_S", 0.05)
    local = started(Temperament.EARLY, steps=0)
    monkeypatch.setattr(local.engine.device, "done", lambda event: False)
    if not drains:
        monkeypatch.setattr(local.engine.device, "synchronise", hang)
    failure = on_its_thread(local)
    assert "step 0 is not over after 0.05 s" in str(failure)
    assert local.producer.handover.aborted
    assert not local.finished
    if drains:
        assert isinstance(failure, StepLateError)
        assert local.engine.pages.holds == 0
        return
    assert isinstance(failure, UnprovenError)
    assert isinstance(failure.__context__, StepLateError)
    assert "d2h does not answer" in str(failure)
    assert local.engine.device.events_held > 0
    assert local.engine.transport.book.live


def test_an_engine_that_fails_and_drains_ends_with_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """L6, in life: one launch fails, the device answers: proof, everything is given back, and the thread still ends."""
    local = started(steps=0)
    fail_after(device_of(local), "launch", 40)
    failure = on_its_thread(local)
    assert isinstance(failure, DeviceError)
    assert not isinstance(failure, UnprovenError)
    assert local.engine.close().proved
    assert local.engine.pages.holds == 0
    assert not local.finished


def test_a_failure_outside_of_the_device_is_the_transports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: the model itself raises (no memory for its activations) with copies of the next layer under way."""

    def forward(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for activations")

    local = started(steps=0)
    monkeypatch.setattr(local.engine, "_forward", forward)
    failure = on_its_thread(local)
    assert isinstance(failure, torch.OutOfMemoryError)
    assert "no memory for activations" in str(local.engine.transport.failed)
    assert not local.finished


def test_told_to_stop_it_ends_proved() -> None:
    """The control: without a failure the same end is a proof, and no error."""
    local = started(steps=0)
    stop = threading.Event()
    stop.set()
    thread = threading.Thread(target=local.engine.run, args=(stop,))
    thread.start()
    thread.join(60)
    assert local.engine.close().proved
