"""Ranks as processes: whichever way one ends is heard with its reason, and nobody is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import HaulierError, InvariantError, RefusedError
from tests.unit.worker.engine import rigs
from worker.engine import collectives, rank_group
from worker.engine.lockstep import RankLostError
from worker.engine.rank_group import RankGroup

WAIT_S = 60.0
MODULE = "dummy_rank"
ROOT = Path(rank_group.__file__).resolve().parents[2]
DUMMY = """
import json, signal, socket, sys
from common.parent import follow_parent
follow_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
plan = json.loads(sys.argv[1])
words = socket.socket(fileno=plan["words"])
link = socket.socket(fileno=plan["link"])
how = plan["settings"]["model"]
if how == "refuses":
    words.sendall(b"--host-pool-gib 1 holds nothing")
    sys.exit(4)
if how == "fails":
    words.sendall(b"KeyError: 3")
    sys.exit(70)
link.recv(1)
sys.exit(0 if how == "ends" else 70)
"""
"""A rank that does as its model's name says, or waits for the end of its link."""


class Heard:
    """What a group says is lost."""

    def __init__(self) -> None:
        self.failures: list[HaulierError] = []
        self.came = threading.Event()

    def __call__(self, failure: HaulierError) -> None:
        self.failures.append(failure)
        self.came.set()


Make = Callable[..., RankGroup]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes groups whose ranks do as they are named; nothing of them is left."""
    (tmp_path / f"{MODULE}.py").write_text(DUMMY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(rank_group, "MODULE", MODULE)
    monkeypatch.setattr(rank_group.limits, "RANK_WORDS_S", 0.2)
    made: list[RankGroup] = []

    def make(how: str, heard: Heard, ranks: int = 2) -> RankGroup:
        made.append(RankGroup(rigs.settings(model=how, tensor_parallel=ranks), None, 1 << 16, heard))
        return made[-1]

    yield make
    for one in made:
        one.close()
        for process in one.processes:
            process.wait(WAIT_S)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("refuses", RefusedError, "^--host-pool-gib 1 holds nothing$"),
        ("fails", RankLostError, r"^rank 1 \(cpu\) ended with exit code 70: KeyError: 3$"),
    ],
)
def test_a_rank_that_ends_is_heard_with_its_words(how: str, kind: type[HaulierError], words: str, group: Make) -> None:
    """On a thread of the group's; and who fails meanwhile fails with that reason and no other."""
    heard = Heard()
    made = group(how, heard)
    assert heard.came.wait(WAIT_S)
    with pytest.raises(kind, match=words), made.blamed():
        raise InvariantError("a collective broke")
    assert [type(one) for one in heard.failures] == [kind]


def test_a_killed_rank_is_heard_though_it_said_nothing(group: Make) -> None:
    """The kernel closes its sockets."""
    heard = Heard()
    made = group("waits", heard)
    made.processes[0].send_signal(signal.SIGKILL)
    assert heard.came.wait(WAIT_S)
    assert str(heard.failures[0]) == "rank 1 (cpu) was killed by signal 9: no reason"
    assert isinstance(heard.failures[0], RankLostError)


def test_a_failure_of_rank_0s_own_stays_its_own_and_ends_the_others(group: Make) -> None:
    """Their links are closed; that they fail of it is no news."""
    heard = Heard()
    made = group("waits", heard, ranks=3)
    with pytest.raises(InvariantError, match="of rank 0"), made.blamed():
        raise InvariantError("of rank 0")
    assert [process.wait(WAIT_S) for process in made.processes] == [70, 70]
    assert heard.failures == []


def test_ranks_that_end_as_told_are_no_news(group: Make) -> None:
    """Rank 0 has told them."""
    heard = Heard()
    made = group("ends", heard)
    with made.blamed():
        made.links[0]._socket.sendall(b"!")
    assert made.processes[0].wait(WAIT_S) == 0
    assert not heard.came.wait(0.2)


def test_ranks_end_with_the_process_that_started_them(group: Make) -> None:
    """However it ends: each waits for its link, which nobody closes in good order."""
    script = (
        "import sys\n"
        "from tests.unit.worker.engine import rigs\n"
        "from worker.engine import rank_group\n"
        f"rank_group.MODULE = {MODULE!r}\n"
        "made = rank_group.RankGroup(rigs.settings(model='waits', tensor_parallel=2), None, 1 << 16, print)\n"
        "print(made.processes[0].pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        said = parent.stdout.readline()
        while not said.strip().isdigit():
            said = parent.stdout.readline()
        parent.kill()
        assert parent.wait(WAIT_S) == -signal.SIGKILL
        assert parent.stdout.read() == ""  # the rank had this pipe too: its end is the rank's
    assert not Path(f"/proc/{said.strip()}/fd/0").exists()


def test_a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from --device on; the CPU is enough for any number."""
    monkeypatch.setattr(collectives.torch.cuda, "device_count", lambda: 4)
    collectives.refuse_missing("cpu", 64)
    collectives.refuse_missing("cuda:2", 2)
    with pytest.raises(RefusedError, match="needs the CUDA devices 2 to 4, there are 4, counted from 0"):
        collectives.refuse_missing("cuda:2", 3)


def test_the_store_is_on_loopback_alone() -> None:
    """Whoever is not on this machine finds nothing; two groups of one machine find different ones."""
    one, other = collectives.RankStore(2), collectives.RankStore(2)
    assert one.port != other.port
    found = collectives.store_at(one.port, 2)
    found.set("a", "1")
    assert one.store.get("a") == b"1"
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    assert f"0100007F:{one.port:04X}" in addresses
    assert f"00000000:{one.port:04X}" not in addresses
