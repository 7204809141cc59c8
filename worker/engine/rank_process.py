"""shell: a further rank of an engine: its part of the model, its heads' history, and every plan that rank 0 makes.

A process of its own, started by ``worker.engine.rank_group`` alone, with its plan as one JSON argument. It ends when
rank 0 says so, and with rank 0 in any case; its quarantine is its own (L6). Signals of a terminal or a service manager
are rank 0's to answer: it drains, and then tells.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

from common import log
from common.errors import HaulierError
from common.parent import follow_parent
from ring.mirror import Mirror
from worker.engine.collectives import join, store_at
from worker.engine.engine import Engine
from worker.engine.local import ring_memory
from worker.engine.lockstep import Follower, FollowingConsumer, RankLink
from worker.engine.ranks import RankPlan
from worker.engine.runner import load
from worker.leaving import leave
from worker.structures import Finished


def serve(plan: RankPlan) -> None:
    """Be this rank until rank 0 ends the engine. Raises what failed."""
    settings = plan.engine
    ranks = settings.tensor_parallel
    follower = Follower(RankLink(socket.socket(fileno=plan.link), "rank 0"))
    loaded = load(
        settings,
        Path(plan.folder) if plan.folder else None,
        lambda device: join(store_at(plan.store_port, ranks), plan.rank, ranks, device),
    )
    mirror = Mirror(ring_memory(loaded, plan.ring_bytes, plan.ring_entries))
    engine = Engine(loaded, FollowingConsumer(mirror, follower), settings, _answered, agree=follower.agree)
    engine.run(follower)


def _answered(finished: Finished) -> None:
    """Rank 0 answers for all."""


def main(argument: str) -> int:
    """The exit code; why it is not 0 is told to rank 0 as this process's last words."""
    plan = RankPlan(**json.loads(argument))
    words = socket.socket(fileno=plan.words)
    try:
        serve(plan)
    except BaseException as failure:  # noqa: BLE001 (whatever ended this rank, rank 0 says it)
        ours = isinstance(failure, HaulierError)
        reason = str(failure) if ours else f"{type(failure).__name__}: {failure}"
        log.get("ranks").error("rank_ended", rank=plan.rank, why=reason, exc_info=None if ours else failure)
        words.sendall(reason.encode())
        return failure.exit_code if isinstance(failure, HaulierError) else HaulierError.exit_code
    return 0


if __name__ == "__main__":
    follow_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    log.setup()
    leave(main(sys.argv[1]))
