"""shell: what requests ask of their logits: bias, penalties, masks before a token is chosen, log probabilities after.

All of it happens on the device, on the rows of those who ask for it; a step without such a request makes one call, as
if none of this were here. What a request asked for is written once, into the row of its segment, which is its own until
its last step is seen over. Tokens so far are counted on the device, in a table of 5 bytes a segment and token id, which
is allocated when the first request asks for a penalty. A mask depends on all tokens before: in a step with a request
that has a guide (``needs_tokens``) the engine reads the tokens of the step before when this one's pass is on the
queues, and before its choice is. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.errors import InvariantError
from common.limits import LOGIT_BIAS_MAX_COUNT, STEP_TABLES_COUNT, TOP_LOGPROBS_MAX_COUNT
from worker.engine.contexts import Context, Share
from worker.engine.device import Device, Queue, QueueName
from worker.engine.landing import Enqueued
from worker.engine.model import LoadedModel
from worker.engine.pooling import Pooling
from worker.engine.sampler import choose, log_shares, masked, penalised
from worker.engine.step import PackedStep
from worker.engine.tables import StepTensors
from worker.structures import Pooled, Shape, TokenLogprob

_GROUPS = 4
_NEUTRAL = Shape()


@dataclass(slots=True, eq=False)
class _Rows:
    """Sampled rows of a step that ask for something, each with its segment."""

    shares: list[tuple[Share, Shape]] = field(default_factory=list)
    """One entry a share that asks."""
    biased: list[tuple[int, int]] = field(default_factory=list)
    penalised: list[tuple[int, int]] = field(default_factory=list)
    told: list[tuple[int, int]] = field(default_factory=list)
    guided: list[tuple[int, int]] = field(default_factory=list)

    def groups(self) -> tuple[list[tuple[int, int]], ...]:
        return self.biased, self.penalised, self.told, self.guided


class _Pair:
    """Host memory and its place on the device."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host = device.allocate_host(shape, dtype)
        self.device = device.allocate_device(shape, dtype)


class _Tables:
    """What is allocated with the first request that asks for anything: ``rows`` sampled rows a step at most."""

    def __init__(self, device: Device, segments: int, rows: int, top: int) -> None:
        turns = range(STEP_TABLES_COUNT)
        self.factors = _Pair(device, (segments, 3), torch.float32)
        self.bias = _Pair(device, (segments, LOGIT_BIAS_MAX_COUNT), torch.float32)
        self.bias_ids = _Pair(device, (segments, LOGIT_BIAS_MAX_COUNT), torch.int64)
        self.rows = [_Pair(device, (_GROUPS * 2 * rows,), torch.int64) for _ in turns]
        self.shares = [_Pair(device, (rows, 1 + top), torch.float32) for _ in turns]
        self.ids = [_Pair(device, (rows, top), torch.int64) for _ in turns]

    def pairs(self) -> list[_Pair]:
        return [self.factors, self.bias, self.bias_ids, *self.rows, *self.shares, *self.ids]


class Shaping:
    """``rows`` sampled rows a step at most; ``payload`` is the ring's int32 view on the device. One thread, the
    engine's."""

    def __init__(self, device: Device, loaded: LoadedModel, segments: int, rows: int, payload: torch.Tensor) -> None:
        self._gpu, self._segments, self._most = device, segments, rows
        self._vocabulary = loaded.geometry.vocabulary
        self._top = min(TOP_LOGPROBS_MAX_COUNT, self._vocabulary)
        self.pooling = Pooling(device, loaded.module, segments)
        self._payload = payload
        self._asking: set[int] = set()
        self._guided: set[int] = set()
        self._masks: list[_Pair] = []
        self._tables: _Tables | None = None
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._told: list[list[tuple[int, int]]] = [[] for _ in range(STEP_TABLES_COUNT)]
        """Of each rotating table: rows of which something is told, and how many likeliest tokens with each."""

    # -- who asks -------------------------------------------------------------------------------------------------
    def begin(self, context: Context) -> None:
        """A request that will run."""
        shape, guide = context.request.sampling.shape or _NEUTRAL, context.request.guide
        if shape is _NEUTRAL and guide is None:
            return
        if shape.pool:
            self.pooling.begin(context)
            return
        self._asking.add(context.number)
        if guide is not None:
            self._guided.add(context.number)
            if not self._masks:
                self._masks = [_Pair(self._gpu, (self._most, guide.words), torch.int32) for _ in self._told]
        if self._tables is None:
            self._tables = _Tables(self._gpu, self._segments, self._most, self._top)
        if shape.penalises and self._counts is None:
            counted = (self._segments, self._vocabulary)
            zeros = (self._gpu.allocate_device(counted, dtype) for dtype in (torch.bool, torch.int32))
            self._counts = next(zeros), next(zeros)

    def end(self, number: int) -> None:
        """Its answer is over; what is under way of it is surplus."""
        self._asking.discard(number)
        self._guided.discard(number)
        self.pooling.end(number)

    def needs_tokens(self, packed: PackedStep) -> bool:
        """Whether a choice of this step needs every token before it."""
        return bool(self._guided) and any(share.context.number in self._guided for share in packed.sampling)

    # -- one step on the queues -----------------------------------------------------------------------------------
    def choose(self, now: Enqueued, tensors: StepTensors, logits: torch.Tensor) -> torch.Tensor:
        """Token ids (rows,) int64 from logits (rows, vocabulary), as ``sampler.choose``, by what each request asks."""
        self.pooling.pool(now)
        rows = self._rows(now.packed) if self._asking else None
        tables = self._tables
        if rows is None or tables is None or not rows.shares:
            return choose(logits, tensors.chances)
        index = now.upload.index
        for share, shape in rows.shares:
            if share.number == 0:
                self._write(tables, share, shape)
        words = self._put(tables, index, rows)
        masks = self._mask(index, rows)
        self._order()

        def shape_and_choose() -> torch.Tensor:
            at, lists = words.clone(), []
            for group in rows.groups():
                half = len(group)
                lists.append((at[:half], at[half : 2 * half]))
                at = at[2 * half :]
            shaped = self._shaped(tables, logits, lists[0], lists[1])
            if masks is not None:
                shaped.index_copy_(0, lists[3][0], masked(shaped.index_select(0, lists[3][0]), masks))
            tokens = choose(shaped, tensors.chances)
            self._count(tokens, lists[1])
            if rows.told:
                self._keep(tables, index, logits, tokens, lists[2][0])
            return tokens

        reads = [words, *(one.device for one in (tables.bias, tables.bias_ids, tables.factors))]
        reads += [] if masks is None else [masks]
        kept = [] if not rows.told else [pair.device[: len(rows.told)] for pair in self._brought(tables, index)]
        tokens = self._gpu.launch(self._compute, shape_and_choose, reads, kept, "shape logits and choose")
        if tokens is None:
            raise InvariantError("a launch on the compute queue gave no value back")
        self._told[index] = [(row, most) for (row, _), most in zip(rows.told, self._wanted(rows), strict=True)]
        return tokens

    def bring(self, now: Enqueued, back: Queue) -> None:
        """Send to the host what is told of the step's tokens; ``back`` comes after their choice."""
        self.pooling.bring(now, back)
        index = now.upload.index
        count = len(self._told[index])
        if count and self._tables is not None:
            for pair in self._brought(self._tables, index):
                self._gpu.copy(back, pair.host[:count], pair.device[:count], "log probabilities")

    # -- one step late --------------------------------------------------------------------------------------------
    def on_host(self, now: Enqueued) -> list[torch.Tensor]:
        """What the step brought back beside its tokens; to be read once it is over."""
        return [*self._shares_on_host(now.upload.index), *self.pooling.on_host(now)]

    def _shares_on_host(self, index: int) -> list[torch.Tensor]:
        count = len(self._told[index])
        if not count or self._tables is None:
            return []
        return [pair.host[:count] for pair in self._brought(self._tables, index)]

    def told(self, now: Enqueued) -> dict[int, TokenLogprob | Pooled]:
        """By sampled row, once the step is over; then forgotten."""
        pooled: dict[int, TokenLogprob | Pooled] = {**self.pooling.told(now)}
        brought = self._shares_on_host(now.upload.index)
        if not brought:
            return pooled
        asked, self._told[now.upload.index] = self._told[now.upload.index], []
        shares, ids = (one.tolist() for one in brought)
        return pooled | {
            row: TokenLogprob(own, tuple(zip(likely[:most], top[:most], strict=True)))
            for (row, most), (own, *top), likely in zip(asked, shares, ids, strict=True)
        }

    def close(self) -> None:
        """Give host memory back, after a proved end only."""
        self.pooling.close()
        if self._tables is not None:
            for pair in (*self._tables.pairs(), *self._masks):
                self._gpu.free_host(pair.host)

    # -- parts ----------------------------------------------------------------------------------------------------
    @property
    def _compute(self) -> Queue:
        return self._gpu.queue(QueueName.COMPUTE)

    def _rows(self, packed: PackedStep) -> _Rows:
        found, row = _Rows(), 0
        for share in packed.sampling:
            request = share.context.request
            if share.context.number in self._asking:
                shape = request.sampling.shape or _NEUTRAL
                found.shares.append((share, shape))
                mine = [(one, share.page.index) for one in range(row, row + share.sampled_rows)]
                asks = (bool(shape.bias), shape.penalises, shape.logprobs >= 0, request.guide is not None)
                for group, asked in zip(found.groups(), asks, strict=True):
                    group.extend(mine if asked else ())
            row += share.sampled_rows
        return found

    @staticmethod
    def _wanted(rows: _Rows) -> list[int]:
        told = [(share, shape) for share, shape in rows.shares if shape.logprobs >= 0]
        return [shape.logprobs for share, shape in told for _ in range(share.sampled_rows)]

    def _write(self, tables: _Tables, share: Share, shape: Shape) -> None:
        """A request's first token: what it asks for goes to its segment's row, and with penalties its prompt, which
        still lies in the ring."""
        segment = share.page.index
        count = len(shape.bias)
        values: list[tuple[_Pair, Sequence[float]]] = [
            (tables.factors, (shape.repetition, shape.presence, shape.frequency)),
            (tables.bias_ids, [token for token, _ in shape.bias] + [0] * (LOGIT_BIAS_MAX_COUNT - count)),
            (tables.bias, [value for _, value in shape.bias] + [0.0] * (LOGIT_BIAS_MAX_COUNT - count)),
        ]
        for pair, row in values if count else values[:1]:
            self._gpu.host_write(pair.host[segment], f"what context {share.context.number} asks for")
            pair.host[segment].copy_(torch.tensor(row, dtype=pair.host.dtype))
            self._upload(pair.device[segment], pair.host[segment])
        if shape.penalises and self._counts is not None:
            in_prompt, counts = (one[segment] for one in self._counts)
            first = share.context.offset
            prompt = self._payload[first : first + share.context.prompt_tokens]

            def begin() -> None:
                counts.zero_()
                in_prompt.zero_().index_fill_(0, prompt.long(), True)

            self._gpu.launch(self._compute, begin, (prompt,), (), "tokens of the prompt")

    def _put(self, tables: _Tables, index: int, rows: _Rows) -> torch.Tensor:
        """Rows and segments of each group, on their way; where they will be."""
        words = [value for group in rows.groups() for pair in zip(*group, strict=True) for value in pair]
        pair = tables.rows[index]
        self._gpu.host_write(pair.host, "rows that ask for something")
        pair.host[: len(words)] = torch.tensor(words, dtype=torch.int64)
        self._upload(pair.device[: len(words)], pair.host[: len(words)])
        return pair.device[: len(words)]

    def _mask(self, index: int, rows: _Rows) -> torch.Tensor | None:
        """Masks of the guided rows, on their way; where they will be."""
        if not rows.guided:
            return None
        pair, count = self._masks[index], len(rows.guided)
        self._gpu.host_write(pair.host, "masks")
        guides = [share.context.request.guide for share, _ in rows.shares]
        for row, guide in zip(pair.host.numpy(), (one for one in guides if one is not None), strict=False):
            guide.mask_into(row)
        self._upload(pair.device[:count], pair.host[:count])
        return pair.device[:count]

    def _upload(self, there: torch.Tensor, here: torch.Tensor) -> None:
        self._gpu.copy(self._gpu.queue(QueueName.H2D), there, here, "what requests ask for")

    def _order(self) -> None:
        """What follows on the compute queue comes after what was uploaded."""
        event = self._gpu.record(self._gpu.queue(QueueName.H2D))
        self._gpu.wait(self._compute, event)
        self._gpu.release(event)

    def _shaped(
        self,
        tables: _Tables,
        logits: torch.Tensor,
        biased: tuple[torch.Tensor, torch.Tensor],
        penalised_rows: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """float32 logits: bias first, then penalties, as in transformers."""
        out = logits.float()
        if out is logits:
            out = logits.clone()
        rows, segments = biased
        if rows.numel():
            ids, values = (one.device.index_select(0, segments) for one in (tables.bias_ids, tables.bias))
            out.index_copy_(0, rows, out.index_select(0, rows).scatter_add(1, ids, values))
        rows, segments = penalised_rows
        if rows.numel() and self._counts is not None:
            in_prompt, counts = (one.index_select(0, segments) for one in self._counts)
            factors = tables.factors.device.index_select(0, segments)
            out.index_copy_(0, rows, penalised(out.index_select(0, rows), in_prompt, counts, factors))
        return out

    def _count(self, tokens: torch.Tensor, penalised_rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows, segments = penalised_rows
        if rows.numel() and self._counts is not None:
            flat = segments * self._vocabulary + tokens.index_select(0, rows)
            self._counts[1].view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))

    def _keep(
        self, tables: _Tables, index: int, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> None:
        found = log_shares(logits.index_select(0, rows), tokens.index_select(0, rows), self._top)
        for pair, values in zip(self._brought(tables, index), found, strict=True):
            pair.device[: values.shape[0]].copy_(values)

    @staticmethod
    def _brought(tables: _Tables, index: int) -> tuple[_Pair, _Pair]:
        return tables.shares[index], tables.ids[index]
