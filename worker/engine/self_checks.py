"""shell: the engine's part of the self-check beside its races: the event pool, and bits of staged against resident.

Each check returns words on success and raises ``CheckFailed`` otherwise. Knows no table and no command.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from common.config import EngineSettings
from worker.engine.cells import Outcome, Scenario, play
from worker.engine.device import Device, QueueName
from worker.engine.event_pool import (
    DoubleReleaseError,
    Event,
    EventBoundsError,
    EventPoolError,
    EventsExhaustedError,
    ForeignThreadError,
    StaleEventError,
)
from worker.engine.lanes import Temperament
from worker.engine.model import from_config
from worker.engine.race_checks import CheckFailed, Make
from worker.engine.virtual_device import VirtualDevice
from worker.structures import Sampling

HEAD_DIMS = (64, 128, 256)
CONTEXT_TOKENS, VOCABULARY = 256, 128
PROMPTS, ANSWER_TOKENS, CANCELLED, CANCEL_AT = (1, 63, 64, 65, 130), 6, 3, 7


# -- event pool -------------------------------------------------------------------------------------------------------
def event_pool(make: Make) -> str:
    """Q4 on this device: bounds, generations, owner thread, exhaustion; the books agree afterwards."""
    device = make(events=8)
    queue = device.queue(QueueName.H2D)
    held = [device.record(queue) for _ in range(device.events_capacity)]
    _refused(EventsExhaustedError, lambda: device.record(queue))
    first = held.pop(0)
    device.release(first)
    _refused(DoubleReleaseError, lambda: device.release(first))
    again = device.record(queue)
    if again.index != first.index or again.generation <= first.generation:
        raise CheckFailed(f"{first} came back as {again}")
    _refused(StaleEventError, lambda: device.done(first))
    _refused(EventBoundsError, lambda: device.done(Event(device.events_capacity, 1)))
    _refused(ForeignThreadError, lambda: device.done(again), elsewhere=True)
    for event in [*held, again]:
        device.release(event)
    device.check()
    device.begin_teardown("the check is over")
    return f"{device.events_capacity} events made, held and given back; five misuses refused"


def _refused(expected: type[EventPoolError], misuse: Callable[[], object], *, elsewhere: bool = False) -> None:
    seen: list[BaseException] = []

    def attempt() -> None:
        try:
            misuse()
        except EventPoolError as error:
            seen.append(error)

    if elsewhere:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    else:
        attempt()
    if not seen or type(seen[0]) is not expected:
        raise CheckFailed(f"expected {expected.__name__}, saw {seen[0]!r}" if seen else f"no {expected.__name__}")


# -- bits -------------------------------------------------------------------------------------------------------------
def bits(make: Make, head_dim: int) -> str:
    """H4 for one head size: a small random model under churn, streamed and retained against ``--residency full``,
    ``torch.equal`` at every step; resident against resident first. On the CPU under every temperament."""
    if make is not VirtualDevice:
        ways: list[tuple[str, Callable[[], Device]]] = [("one device", lambda: make(events=2_048))]
        dtype = torch.bfloat16
    else:
        ways = [(one.value, lambda one=one: VirtualDevice(one)) for one in Temperament]  # type: ignore[misc]
        dtype = torch.float32
    fresh = ways[0][1]
    reference = _answers(fresh(), dtype, head_dim, "full")
    _same(reference, _answers(fresh(), dtype, head_dim, "full"), "resident against resident")
    for words, open_one in ways:
        for route, retain in (("streamed", "off"), ("retained", "on")):
            _same(reference, _answers(open_one(), dtype, head_dim, "staged", retain), f"{route}, {words}")
    how = "streamed and retained, " + ", ".join(words for words, _ in ways)
    return f"{len(reference.steps)} steps of {str(dtype).removeprefix('torch.')} equal: {how}"


def _same(one: Outcome, other: Outcome, words: str) -> None:
    if [plan for plan, _ in one.steps] != [plan for plan, _ in other.steps]:
        raise CheckFailed(f"{words}: the schedules differ")
    steps = len(one.steps)
    wrong = [step for step in range(steps) if not torch.equal(one.steps[step][1], other.steps[step][1])]
    if wrong:
        raise CheckFailed(f"{words}: logits differ at {len(wrong)} of {steps} steps, first at step {wrong[0]}")


def _answers(device: Device, dtype: torch.dtype, head_dim: int, residency: str, retain: str = "off") -> Outcome:
    """Five requests over three segments, one cancelled."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3", num_hidden_layers=3, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        intermediate_size=128, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT_TOKENS, bos_token_id=0,
        eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    settings = EngineSettings(
        "random", device=device.name, host_pool_gib=0.05, concurrency=3, context_tokens=CONTEXT_TOKENS, page_tokens=32,
        chunk_tokens=48, residency=residency, retain=retain,
    )  # fmt: skip
    prompts = tuple(
        (length, Sampling(ANSWER_TOKENS, temperature=0.5 * (one % 2), seed=one)) for one, length in enumerate(PROMPTS)
    )
    script = Scenario(prompts, {0: tuple(range(len(prompts)))}, {CANCEL_AT: (CANCELLED,)})
    return play(from_config(config, device, dtype, CONTEXT_TOKENS), settings, script)
