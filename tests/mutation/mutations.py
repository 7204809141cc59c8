"""values: one guard removed at a time: which file, which text, what stands there instead, and the tests that must fail.

Each takes out one wait, lease check, generation check or ring book. ``python -m tests.mutation`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "tests/unit/worker/engine/test_"


@dataclass(frozen=True)
class Mutation:
    """``tests`` are short names of files beside ``ENGINE``, or paths."""

    rule: str
    what: str
    path: str
    text: str
    instead: str
    tests: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return [name if "/" in name else f"{ENGINE}{name}.py" for name in self.tests]


def _engine(rule: str, what: str, file: str, text: str, instead: str, *tests: str) -> Mutation:
    return Mutation(rule, what, f"worker/engine/{file}.py", text, instead, tests)


def _ring(rule: str, what: str, file: str, text: str, instead: str) -> Mutation:
    tests = tuple(f"tests/unit/ring/test_{name}.py" for name in ("accounting", "producer", "handover", "consumer"))
    return Mutation(rule, what, f"ring/{file}.py", text, instead, tests)


EDGES = ("edges",)
WAITS = [
    _engine(
        "Q1",
        "attention waits for its copies",
        "transport",
        "self.device.wait(self._compute, ticket.event)",
        "pass",
        *EDGES,
    ),
    _engine("Q1", "write-back waits for attention", "transport", "device.wait(queue, lease.attention)", "pass", *EDGES),
    _engine("L1", "a copy waits for its slot's readers", "transport", "self.device.wait(queue, event)", "pass", *EDGES),
    _engine(
        "L1", "a copy waits for the layer's write-back", "transport", "device.wait(queue, written)", "pass", *EDGES
    ),
    _engine(
        "L1", "materialisation waits for appended rows", "transport", "device.wait(queue, appended)", "pass", *EDGES
    ),
    _engine("Q1", "sampled tokens wait for sampling", "engine", "self.device.wait(back, sampled)", "pass", "engine"),
    _engine(
        "Q1",
        "tables wait for their copy",
        "tables",
        "self._gpu.wait(compute, upload.event)",
        "pass",
        "engine",
        "tables",
    ),
]
LEASES = [
    _engine(
        "L1",
        "a slot's last lease is settled",
        "leases",
        "if last is not None and last.state not in SETTLED:",
        "if False:",
        "leases",
        "transport",
    ),
    _engine(
        "L1",
        "a layer's last lease is settled",
        "leases",
        "if earlier is not None and earlier.state not in SETTLED:",
        "if False:",
        "leases",
    ),
    _engine("L1", "prior readers are listed", "leases", "if event not in listed:", "if False:", "leases"),
    _engine(
        "L2",
        "copies come from the lease's owners",
        "leases",
        "if owner not in lease.contexts.owner_set:",
        "if False:",
        "leases",
        "transport",
    ),
    _engine(
        "L2",
        "rows go back to the lease's owners",
        "leases",
        "if contexts is not lease.contexts and contexts.owner_set != lease.contexts.owner_set:",
        "if False:",
        "leases",
    ),
    _engine(
        "L3", "sealed with the recorded event", "leases", "if attention != lease.attention:", "if False:", "leases"
    ),
    _engine(
        "L3", "sealed with the current tail", "leases", "if tail != lease.tail:", "if False:", "leases", "transport"
    ),
    _engine(
        "L3",
        "a door in the wrong state",
        "leases",
        "        if after is None:\n            raise",
        "        if after is None:\n            return\n            raise",
        "leases",
    ),
    _engine(
        "L4",
        "retired with every event over",
        "leases",
        "if events != over and (missing := set(events) - set(over)):",
        "if missing := set():",
        "leases",
    ),
    _engine(
        "L4",
        "retirement polls every event",
        "transport",
        "if not all(self.device.done(event) for event in events):",
        "if False:",
        "transport",
        "edges",
    ),
    _engine(
        "L4",
        "retirement has a deadline",
        "transport",
        "elif now - lease.awaited_s > self._deadline_s:",
        "elif False:",
        "transport",
    ),
    _engine(
        "L4", "tickets are dropped with the lease", "leases", "        lease.tickets = []\n", "", "leases", "transport"
    ),
    _engine("L1", "a lease of another book", "leases", "if id(lease) not in self._live:", "if False:", "leases"),
    _engine(
        "L8",
        "a cancelled context is not published",
        "leases",
        "else tuple(one for one in ids if one not in revoked)",
        "else ids",
        "leases",
        "transport",
    ),
    _engine(
        "L8",
        "a segment waits for its fences",
        "scheduler",
        " and self.segments.may_recycle(page)",
        "",
        "scheduler",
        "cases",
        "engine",
    ),
    _engine(
        "L8",
        "a segment waits for steps in flight",
        "scheduler",
        "context.ended and not context.in_flight and",
        "context.ended and",
        "scheduler",
        "engine",
    ),
]
GENERATIONS = [
    _engine(
        "L5",
        "a hold needs the present generation",
        "page_leases",
        "if self._generations[page.index] != page.generation:\n                    now",
        "if False:\n                    now",
        "page_leases",
        "transport",
    ),
    _engine(
        "L5",
        "a held page is not recycled",
        "page_leases",
        "if self._holds[page.index]:",
        "if False:",
        "page_leases",
        "edges",
    ),
    _engine(
        "L5",
        "a page is recycled once",
        "page_leases",
        'page.generation:\n            raise StaleGenerationError(f"host page {page.index} was',
        'self._generations[page.index]:\n            raise StaleGenerationError(f"host page {page.index} was',
        "page_leases",
    ),
    _engine(
        "L5",
        "recycling passes the generation",
        "page_leases",
        "        self._generations[page.index] += 1\n        return",
        "        return",
        "page_leases",
    ),
    _engine(
        "L5",
        "a stage holds its pages",
        "transport",
        "            self.pages.hold(lease.contexts)\n            lease.holds_pages = True",
        "            pass",
        "transport",
        "edges",
    ),
    _engine(
        "L5",
        "a hold is dropped once",
        "page_leases",
        'if count == 0:\n            raise LeaseBooksError("host pages given',
        'if False:\n            raise LeaseBooksError("host pages given',
        "page_leases",
    ),
    _engine(
        "L5",
        "two contexts never share a page",
        "page_leases",
        "if len(set(self.owners)) != len(self.owners):",
        "if False:",
        "cases",
    ),
    _engine(
        "Q4",
        "an event given back is stale",
        "event_pool",
        '        raise StaleEventError(f"{event} was given back; its',
        '        return\n        raise StaleEventError(f"{event} was given back; its',
        "event_pool",
    ),
    _engine(
        "Q4",
        "taking passes the generation",
        "event_pool",
        "        self._generations[index] += 1\n        held",
        "        held",
        "event_pool",
    ),
    _engine(
        "Q4",
        "giving back passes the generation",
        "event_pool",
        "        self._generations[event.index] += 1\n        self._free.append",
        "        self._free.append",
        "event_pool",
    ),
    _engine(
        "Q4",
        "an index is in bounds",
        "event_pool",
        "if not 0 <= event.index < len(self._raws):",
        "if False:",
        "event_pool",
    ),
    _engine(
        "Q4",
        "a generation was handed out",
        "event_pool",
        "if event.generation % 2 == 0 or event.generation > self._generations[event.index]:",
        "if False:",
        "event_pool",
    ),
    _engine(
        "Q4",
        "one thread owns the pool",
        "event_pool",
        "        if caller != self._owner:",
        "        if False:",
        "event_pool",
    ),
    _engine(
        "Q4",
        "held events keep their owner",
        "event_pool",
        "        if self.held:\n",
        "        if False:\n",
        "event_pool",
    ),
    _engine(
        "L7",
        "a frozen pool recycles nothing",
        "event_pool",
        'if self._frozen is not None:\n            raise EventsFrozenError(f"{event} is',
        'if False:\n            raise EventsFrozenError(f"{event} is',
        "event_pool",
        "transport",
    ),
    _engine(
        "L5",
        "a step table in flight is not written",
        "tables",
        "if self._busy[index] is not None:",
        "if False:",
        "tables",
        "cases",
    ),
]
FAILURES = [
    _engine(
        "L6",
        "a failed transport accepts nothing",
        "transport",
        "        if self.failed is not None:\n            raise TransportFailedError",
        "        if False:\n            raise TransportFailedError",
        "transport",
    ),
    _engine(
        "L6",
        "a failure quarantines every lease",
        "transport",
        "            self.book.quarantine()\n",
        "",
        "transport",
        "engine_failures",
    ),
    _engine(
        "L6",
        "a failure stops the device's intake",
        "transport",
        "            self.device.begin_teardown(reason)\n",
        "",
        "transport",
        "engine_failures",
    ),
    _engine(
        "L6",
        "quarantine rings the abort word",
        "transport",
        "            abort()\n",
        "            pass\n",
        "transport",
        "engine_failures",
    ),
    _engine(
        "L6", "no proof by the deadline retains all", "transport", "if watched.is_alive():", "if False:", "transport"
    ),
    _engine(
        "L6", "no proof retains all", "transport", "            self.device.retain_everything(words)\n", "", "transport"
    ),
    _engine(
        "L6",
        "a step that fails fails the transport",
        "engine",
        '            self.transport.fail(f"step {self.steps}: {error}")\n',
        "",
        "engine_failures",
    ),
    _engine(
        "L6",
        "an unproved end is an error",
        "engine",
        "        if not ended.proved:\n            failed",
        "        if False:\n            failed",
        "engine_failures",
    ),
    _engine(
        "L4",
        "a step has a deadline",
        "landing",
        "if time.monotonic() - since > STEP_DEADLINE_S:",
        "if time.monotonic() - since > 20:\n            raise DeviceError('late')\n        if False:",
        "engine_failures",
    ),
    _engine(
        "Q2",
        "a compute queue is not synchronised",
        "virtual_device",
        "if queue.name is QueueName.COMPUTE:\n            raise",
        "if False:\n            raise",
        "virtual_device",
    ),
    _engine(
        "Q3",
        "everything only at teardown",
        "virtual_device",
        '        if self._teardown is None:\n            raise TeardownError("everything',
        '        if False:\n            raise TeardownError("everything',
        "virtual_device",
    ),
    _engine("Q2", "capture is refused", "streams", "    if capturing:\n", "    if False:\n", "streams"),
    _engine(
        "Q5", "handles are distinct", "streams", "        if handle in owners:\n", "        if False:\n", "streams"
    ),
    _engine(
        "Q5",
        "no stream that is not ours",
        "streams",
        "        if handle in reserved:\n",
        "        if False:\n",
        "streams",
    ),
]
RING = [
    _ring("R3", "padding comes back", "accounting", "        return length + padding\n", "        return length\n"),
    _ring("R4", "the identity is checked", "accounting", "if held != self._held or not 0", "if False and not 0"),
    _ring(
        "R5",
        "an empty ring passes the lap over",
        "accounting",
        "        if free == capacity:\n            # R5",
        "        if False:\n            # R5",
    ),
    _ring("R3", "back in order", "accounting", "if not live or live[0][0] != sequence:", "if not live:"),
    _ring(
        "R3",
        "a consumed word that nobody could write",
        "accounting",
        "        if count > len(live):\n",
        "        if False:\n",
    ),
    _ring(
        "R2", "no wait for what nobody took", "consumer", "if not self._handover.is_taken(entry.sequence):", "if False:"
    ),
    _ring("R3", "releases come from one stream", "consumer", "elif stream != self._stream:", "elif False:"),
    _ring(
        "R3",
        "released once",
        "handover",
        "if sequence > self._taken_through or sequence < next_release or sequence in released:",
        "if False:",
    ),
    _ring(
        "R2",
        "doorbell after payload and descriptor",
        "producer",
        "        _pack_into(self._table, at, sequence, position, length, padding, items, tokens, name, 0, 0)\n",
        "",
    ),
    _ring(
        "R1",
        "nothing after an abort",
        "producer",
        "            raise RingAborted(_ABORTED)\n        want = ",
        "            pass\n        want = ",
    ),
    _ring(
        "R1",
        "no burst after an abort",
        "producer",
        "            raise RingAborted(_ABORTED)\n        wants = ",
        "            pass\n        wants = ",
    ),
    _ring(
        "R6",
        "a finding needs an idle engine",
        "accounting",
        "if not engine_idle or not unresolved or self._tokens_pending:",
        "if not unresolved or self._tokens_pending:",
    ),
    _ring(
        "R6",
        "a finding needs no token pending",
        "accounting",
        "if not engine_idle or not unresolved or self._tokens_pending:",
        "if not engine_idle or not unresolved:",
    ),
]
HEADROOM = [
    _engine(
        "H2",
        "a page of headroom cools",
        "headroom",
        "            if until <= self._landed:\n                del",
        "            if True:\n                del",
        "headroom",
    ),
    _engine(
        "H2",
        "a chunk cools before it is the device's",
        "headroom",
        "if until <= self._landed and chunk not in held]",
        "if chunk not in held]",
        "headroom",
    ),
    _engine(
        "H2",
        "a page dropped from a closing chunk keeps it warm",
        "headroom",
        "                self._closing[spot[0]] = self._planned\n",
        "                pass\n",
        "headroom",
    ),
    _engine(
        "H2",
        "whole idle contexts are dropped first",
        "headroom",
        "while before - self.held < count and self._reclaim_idle(Cause.REVOKED_IDLE, step, None):",
        "while False:",
        "headroom",
    ),
    _engine(
        "H2",
        "pages that leave a chunk are copied",
        "step",
        "captures=bool(plan.shifts) or any(",
        "captures=any(",
        "headroom_routes",
    ),
    _engine(
        "H2",
        "a chunk given back is not taken again at once",
        "headroom_fit",
        " and quiet <= 0 and",
        " and",
        "headroom_fit",
    ),
]
SHARING = [
    _engine("H5", "a shared history is read once whole", "shared", "and self.whole_at < step", "", "shared", "sharing"),
    _engine(
        "H5",
        "a shared history with members is not let go",
        "shared",
        "not one.members and not one.context.in_flight",
        "not one.context.in_flight",
        "shared",
    ),
    _engine(
        "H5",
        "a shared history in flight is not let go",
        "shared",
        "not one.members and not one.context.in_flight",
        "not one.members",
        "shared",
        "sharing",
    ),
    _engine("H5", "who left is no member", "shared", "one.members.pop(context.number, None)", "None", "shared"),
    _engine(
        "H5", "a ring entry waits for its shared history", "intake", ".unread += 1", ".unread += 0", "intake", "sharing"
    ),
    _engine(
        "H5",
        "a slot has room for shared rows",
        "scheduler",
        "return own + self.shared.reserved",
        "return own",
        "shared",
    ),
    _engine("H5", "every query sees all shared rows", "joined", "scale, causal=False", "scale, causal=True", "joined"),
    _engine("H5", "a shared history is parked with its members", "shared", "kept.park(one", "int(one", "turns"),
    Mutation(
        "H5",
        "members begin with what they share",
        "worker/prefixes.py",
        "        return bool(np.array_equal(prompt[:tokens], known.ids))",
        "        return True",
        ("tests/unit/worker/test_prefixes.py",),
    ),
]
_STATES = "linear_states"
MODELS = [
    _engine(
        "H4",
        "a slot's last state is gone",
        _STATES,
        "if chunk.begins:",
        "if chunk.begins and chunk.source >= 0:",
        _STATES,
    ),
    _engine("H5", "members begin with the state", _STATES, "source if begins else -1", "-1", _STATES),
    _engine("H4", "a convolution's state is kept", _STATES, "conv.index_copy_(0, slots, states.conv)", "pass", _STATES),
    _engine(
        "H4", "a recurrent state is kept", _STATES, "recurrent.index_copy_(0, slots, states.recurrent)", "pass", _STATES
    ),
    _engine("H4", "no position moves", "model", 'part.rope_type = "default"', "pass", "families"),
    _engine("H4", "no weight is made up", "model", 'sorted(found["missing_keys"])', "[]", "model"),
]
WHOLE = [
    _engine(
        "L1",
        "a step in place settles every layer",
        "leases",
        "        self._settled(step, layers)\n        return self._began(Lease(step, tuple(layers), NO_SLOT",
        "        return self._began(Lease(step, tuple(layers), NO_SLOT",
        "leases",
        "transport",
        "graphs",
    ),
    _engine(
        "L5",
        "a step in place holds its pages",
        "transport",
        "contexts)\n            self._hold_pages(lease)\n            return lease",
        "contexts)\n            return lease",
        "transport",
        "graphs",
    ),
    _engine(
        "A4",
        "a piece is given when no step reads it",
        "admission",
        "if not self.cool(range(run, run + newcomer.need)):",
        "if False:",
        "whole",
    ),
    _engine("H4", "a replay has this step's lengths", "graphs", "(*_ROWS, *_CONTEXTS):", "_ROWS:", "graphs"),
    _engine(
        "H4", "a captured step is of its history's length", "graphs", "packed.tokens, packed.longest_history",
        "packed.tokens, 0", "graphs",
    ),
    _engine("H4", "a step goes on in the same places", "packing", "all(now.home == was.home", "all(True", "packing"),
    _engine("H4", "a step that prefills is not padded", "padded_step", "not pads(packed.plan)", "False", "graphs"),
]  # fmt: skip
RANKS = [
    _engine(
        "R3",
        "the ring waits for the slowest rank",
        "lockstep",
        "min(self._mine, self._leader.read_through)",
        "self._mine",
        "lockstep",
    ),
    _engine("H4", "ranks compare what they sampled", "lockstep", "if said != mine:", "if False:", "lockstep"),
    _engine(
        "H4",
        "a rank that is elsewhere is noticed",
        "lockstep",
        "if not isinstance(said, News):",
        "if False:",
        "lockstep",
    ),
    Mutation(
        "R3",
        "a rank has read what its device has read",
        "ring/mirror.py",
        "while self._pending and reached(word, word_of(self._pending[0])):",
        "while self._pending:",
        ("tests/unit/ring/test_mirror.py",),
    ),
]
MUTATIONS = [*WAITS, *LEASES, *GENERATIONS, *FAILURES, *RING, *HEADROOM, *SHARING, *MODELS, *WHOLE, *RANKS]
