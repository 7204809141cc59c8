"""``haulier doctor``: each judgement with its control, since a check that cannot fail says nothing about a machine."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import machine
from common.config import GIB
from common.errors import RefusedError
from worker import doctor_probe
from worker.doctor import ADVICE, BAD, OK, Facts, Finding, Gpu, Wanted, diagnose

ROOT = Path(__file__).resolve().parents[3]
GPU = Gpu("H200", 139 * GIB, 13000, "13.0", 0)
FINE = Facts(
    files=20_000, locked_bytes=-1, cores=8.0, nodes={0: frozenset(range(8))}, may_run_on=frozenset(range(8)),
    memory_bytes=64 * GIB, available_bytes=60 * GIB, ring="", state="state", state_problem="", filesystem="ext4",
    unsafe=False, syncs_ms=(0.5, 0.6, 0.7), free_bytes=100 * GIB,
)  # fmt: skip
ON_GPU = dataclasses.replace(FINE, gpu=GPU, pinned="", ring=None)
CUDA = Wanted("cuda:0", host_pool_gib=32.0)
TWO_NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def named(facts: Facts, wanted: Wanted, name: str) -> Finding:
    return next(one for one in diagnose(facts, wanted) if one.name == name)


def test_a_fine_machine_is_fine() -> None:
    """The control of every case below: nothing to change, on a CPU and with a GPU."""
    for facts, wanted in ((FINE, Wanted()), (ON_GPU, CUDA)):
        assert {(one.verdict, one.change) for one in diagnose(facts, wanted)} == {(OK, "")}


@pytest.mark.parametrize(
    ("name", "verdict", "changes", "setting"),
    [
        ("open files", BAD, {"files": 16}, "ulimit -n"),
        ("open files", ADVICE, {"files": 256}, "ulimit -n"),
        ("processor cores", ADVICE, {"cores": 1.0}, "cpus"),
        ("memory nodes", ADVICE, {"nodes": TWO_NODES}, "numactl"),
        ("memory", BAD, {"memory_bytes": GIB}, "--host-pool-gib"),
        ("memory", ADVICE, {"available_bytes": GIB}, "--host-pool-gib"),
        ("memory", ADVICE, {"memory_bytes": 0}, "--host-pool-gib"),
        ("ring pages", BAD, {"ring": "the system refused"}, "--ring-mib"),
        ("state folder", BAD, {"state_problem": "state is a file"}, "--state"),
        ("state folder", BAD, {"filesystem": "nfs", "unsafe": True}, "--state"),
        ("state folder", ADVICE, {"filesystem": "tmpfs"}, "--state"),
        ("synced write", ADVICE, {"syncs_ms": (12.0, 14.0, 90.0)}, "solid-state"),
        ("free disk", BAD, {"free_bytes": GIB}, "--disk-reserve-gib"),
        ("free disk", ADVICE, {"free_bytes": 5 * GIB}, "larger disk"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_change(name: str, verdict: str, changes: Any, setting: str) -> None:
    """One fact changed, one finding changed."""
    found = diagnose(dataclasses.replace(FINE, **changes), Wanted())
    assert [(one.name, one.verdict) for one in found if one.verdict != OK] == [(name, verdict)]
    assert setting in named(dataclasses.replace(FINE, **changes), Wanted(), name).change


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("locked memory", ADVICE, {"locked_bytes": 8 << 20}),
        ("GPU", BAD, {"gpu": "torch finds no CUDA device"}),
        ("GPU", BAD, {"gpu": dataclasses.replace(GPU, driver_cuda=12080)}),
        ("pinned memory", BAD, {"pinned": "the CUDA driver refused"}),
        ("pinned memory", BAD, {"pinned": None}),
        ("memory nodes", ADVICE, {"nodes": TWO_NODES, "may_run_on": frozenset({5})}),
    ],
)
def test_what_only_a_gpu_needs(name: str, verdict: str, changes: Any) -> None:
    """The same facts are fine where no GPU is asked for, as far as they are told there."""
    assert named(dataclasses.replace(ON_GPU, **changes), CUDA, name).verdict == verdict
    cpu = dataclasses.replace(FINE, **{key: value for key, value in changes.items() if key == "locked_bytes"})
    assert all(one.verdict == OK for one in diagnose(cpu, Wanted()))


def test_a_worker_near_its_gpu_is_well_placed() -> None:
    """Two sockets: the one with the card."""
    near = dataclasses.replace(ON_GPU, nodes=TWO_NODES, may_run_on=frozenset({1, 2}))
    assert named(near, CUDA, "memory nodes").verdict == OK


# -- probes -------------------------------------------------------------------------------------------------------


def test_synced_writes_are_measured_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write is synced, and nothing is left. Control: a slow sync shows."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
    took = doctor_probe.syncs_ms(tmp_path, 5)
    assert len(took) == len(synced) == 5
    assert all(one > 0 for one in took)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "is a file" in doctor_probe.disk(tmp_path / "file" / "state")[0]
    assert doctor_probe.disk(tmp_path / "state")[0] == ""


def test_the_ring_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: more than there is, and a system that refuses."""
    assert doctor_probe.ring(1) == ""
    assert "more than the memory" in str(doctor_probe.ring(1 << 30))
    monkeypatch.setattr("ring.memory.mmap.mmap", lambda *_: (_ for _ in ()).throw(OSError(12, "no memory")))
    assert "--ring-mib" in str(doctor_probe.ring(1))


def test_pinned_memory_is_tried_as_a_worker_has_it() -> None:
    """Control: a driver that refuses."""
    asked: list[tuple[int, int]] = []

    class Pages:
        def __init__(self, size: int, entries: int, *, device: int) -> None:
            asked.append((size, device))

        def close(self) -> None:
            asked.append((0, 0))

    def refuses(size: int, entries: int, *, device: int) -> None:
        raise RefusedError("the CUDA driver refused 64 MiB")

    assert doctor_probe.pinned(Wanted("cuda:1", ring_mib=2), Pages) == ""
    assert asked == [(2 << 20, 1), (0, 0)]
    assert "refused" in doctor_probe.pinned(Wanted("cuda:1"), refuses)


def test_a_machine_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed, what torch does not find."""
    monkeypatch.setattr(doctor_probe, "_there", lambda module: module == "torch")
    assert "cuda.bindings not installed" in str(doctor_probe.gpu_of("cuda:0"))
    monkeypatch.setattr(doctor_probe, "_there", lambda module: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in str(doctor_probe.gpu_of("cuda:0"))


def test_cores_and_nodes_of_machine_and_container(tmp_path: Path) -> None:
    """A container's share of time in either form of control groups; control: none set."""
    here = float(len(os.sched_getaffinity(0)))
    quota = tmp_path / "cpu.max"
    for text, cores in (("max 100000", here), ("50000 100000", 0.5)):
        quota.write_text(text + "\n")
        assert machine.cores((quota,)) == cores
    old = tmp_path / "cpu.cfs_quota_us"
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    for text, cores in (("-1", here), ("25000", 0.25)):
        old.write_text(text + "\n")
        assert machine.cores((old,)) == cores
    for node, cores in ((0, "0-3,8"), (1, "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert machine.numa_nodes(tmp_path) == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7})}
    assert machine.numa_nodes(tmp_path / "none") == {}
    (tmp_path / "0000:1b:00.0").mkdir()
    for text, node in (("1", 1), ("-1", None)):
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text + "\n")
        assert machine.device_node("0000:1B:00.0", tmp_path) == node


# -- the command --------------------------------------------------------------------------------------------------


def ran(*words: str, files: int = 0) -> tuple[int, str, str]:
    """The command in a process of its own, with its limit of open files lowered."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    done = subprocess.run(
        [sys.executable, "-m", "common.cli", "doctor", *words], capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=limit,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_exit_code_tells_scripts(tmp_path: Path) -> None:
    """0 when nothing would be refused, 4 else, 2 for what cannot be asked; --json is one object."""
    small = ("--state", str(tmp_path / "state"), "--ring-mib", "1", "--host-pool-gib", "0.1", "--disk-reserve-gib", "0")
    code, out, _ = ran(*small)
    assert code == 0, out
    assert "nothing makes haulier refuse" in out
    assert list((tmp_path / "state").iterdir()) == []
    code, out, _ = ran(*small, "--json", files=25)
    assert code == 4
    found = json.loads(out)
    assert found["fine"] is False
    assert [one["name"] for one in found["findings"] if one["verdict"] == "bad"] == ["open files"]
    code, out, _ = ran(*small[:4], "--host-pool-gib", "100000")
    assert code == 4
    assert "change: --host-pool-gib lower" in out
    assert ran("--device", "gpu")[0] == 2


@pytest.mark.gpu
def test_a_real_gpu_is_found_and_its_memory_pinned(tmp_path: Path) -> None:
    """On the card: name, versions, and the ring in pinned memory."""
    code, out, _ = ran("--state", str(tmp_path), "--device", "cuda:0", "--ring-mib", "16", "--disk-reserve-gib", "0")
    assert code == 0, out
    assert "driver does CUDA" in out
    assert "16 MiB had, mapped and given back" in out
