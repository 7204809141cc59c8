"""Rank 1 with a difference, named in the environment: few device pages, or, for controls, other tokens."""

from __future__ import annotations

import json
import os
import sys

import torch

from common import log
from common.parent import follow_parent
from tests.integration.ranked import PAGES, in_part
from worker.engine.rank_process import main
from worker.engine.ranks import RankPlan
from worker.engine.shaping import Shaping
from worker.leaving import leave

STEP = "HAULIER_TEST_WRONG_STEP"
"""From this step on this rank samples the token id behind the right one."""


def wrong_from(step: int) -> None:
    choose = Shaping.choose

    def wrong(self: Shaping, now: object, tensors: object, logits: torch.Tensor) -> torch.Tensor:
        tokens = choose(self, now, tensors, logits)  # type: ignore[arg-type]
        return (tokens + 1) % logits.shape[-1] if now.packed.step >= step else tokens  # type: ignore[attr-defined]

    Shaping.choose = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    follow_parent()
    log.setup()
    if PAGES in os.environ:
        in_part(int(os.environ[PAGES]), RankPlan(**json.loads(sys.argv[1])).engine.page_tokens)
    if STEP in os.environ:
        wrong_from(int(os.environ[STEP]))
    leave(main(sys.argv[1]))
