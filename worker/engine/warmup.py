"""shell: one small pass before the first request: loads every kernel, and proves that the model calls our attention
once a dense layer, in order, with the shapes its config promised. A model that does not is refused, not approximated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.errors import RefusedError
from worker.engine.device_pool import Rows
from worker.engine.joined import attend_joined
from worker.engine.kernels import Spans, attend
from worker.engine.linear_states import LinearStates
from worker.engine.model import LoadedModel
from worker.engine.sampler import Chances, choose

_WIDTHS = (1, 3)
"""New rows of one context in the passes: a decode row, and a chunk of a prompt."""


@dataclass(slots=True, eq=False)
class Probe:
    """Attends over the first rows of an arena piece that nobody owns yet, and notes who called (``StepAttention``)."""

    rows: Rows
    spans: Spans
    shared: bool = False
    """Whether the calls over shared histories are made as well, for their kernels (H5)."""
    context_tokens: int = 0
    layers: list[int] = field(default_factory=list)
    shapes: set[tuple[int, int, int, int]] = field(default_factory=set)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See ``StepAttention``."""
        self.layers.append(layer)
        self.shapes.add((query.shape[1], key.shape[1], query.shape[2], value.shape[2]))
        rows = torch.arange(key.shape[0], device=key.device)
        self.rows.key.index_copy_(0, rows, key)
        self.rows.value.index_copy_(0, rows, value)
        if self.shared:
            attend_joined(query, self.rows.key, self.rows.value, self.spans, self.spans, 0, scale)
        return attend(query, self.rows.key, self.rows.value, self.spans, scale)


def warm_up(
    loaded: LoadedModel, pieces: tuple[Rows, ...], *, shared: bool = False, states: LinearStates | None = None
) -> None:
    """Run the passes, with ``shared`` also as steps that share a history are attended; a hybrid's over ``states`` that
    nobody owns yet. Raises ``RefusedError`` for a
    model whose attention is not what its config said."""
    geometry = loaded.geometry
    where = loaded.device.torch_device
    for width in _WIDTHS:
        if width > pieces[0].key.shape[0]:
            continue
        starts = torch.tensor([0, width], dtype=torch.int32, device=where)
        spans = Spans([0, width], [0, width], [width], starts, starts, starts[1:], width, width)
        probe = Probe(pieces[0], spans, shared)
        positions = torch.arange(width, device=where)
        more = {} if states is None else states.probe(width)
        logits = loaded.logits(torch.zeros_like(positions), positions, positions[-1:], probe, **more)
        one = torch.ones(1, device=where)
        choose(logits, Chances(one, one * 0.5, one * 0.5, torch.ones(1, dtype=torch.int64, device=where)))
        wanted = {(geometry.query_heads, geometry.kv_heads, geometry.head_dim, geometry.head_dim)}
        if probe.layers != list(range(geometry.layers)) or probe.shapes != wanted or logits.shape[0] != 1:
            raise RefusedError(
                f"--model {loaded.name}: its {geometry.layers} layers call attention as layers {probe.layers} with "
                f"heads {sorted(probe.shapes)}, not once each with {sorted(wanted)}; haulier cannot stage it"
            )
