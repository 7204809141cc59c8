"""``haulier run`` as real processes, with the echo worker: killed anywhere and run again, each line answered once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

LINES = 60
CONCURRENCY = 4
DEADLINE_S = 120.0


class Place:
    """A folder with an input file, and the runs that work in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input, self.out, self.err = folder / "in.jsonl", folder / "out.jsonl", folder / "err.jsonl"
        self.state, self.witness = folder / "state", folder / "witness"
        self.write([request(n) for n in range(LINES)])
        self.processes: list[subprocess.Popen[str]] = []

    def write(self, lines: list[str]) -> None:
        self.input.write_text("".join(line + "\n" for line in lines))

    def start(self, *more: str, delay_ms: int = 0, state: bool = True) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "common.cli", "run", "-i", str(self.input), "-o", str(self.out), "-e", str(self.err),
            "--model", "echo", "--echo", "--concurrency", str(CONCURRENCY), "--json",
            *(["--state", str(self.state)] if state else []), *more,
        ]  # fmt: skip
        environment = {**os.environ, "HAULIER_ECHO_DELAY_MS": str(delay_ms), "HAULIER_WITNESS": str(self.witness)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=self.folder
        )
        self.processes.append(process)
        return process

    def finish(self, *more: str, **how: Any) -> tuple[int, str, str]:
        process = self.start(*more, **how)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def ran(self) -> int:
        """Executions, counted by the engine itself."""
        return len(self.witness.read_text().splitlines()) if self.witness.exists() else 0

    def children(self, process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return {child.cmdline()[2]: child for child in psutil.Process(process.pid).children()}
        return {}

    def leftovers(self) -> list[int]:
        """Processes that still hold the state folder."""
        if not (self.state / "children.lock").exists():  # it was killed before it began
            return []
        lock = os.open(self.state / "children.lock", os.O_RDWR)
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return []
                time.sleep(0.1)
            return [int(pid) for pid in (self.state / "children.pids").read_text().split()]
        finally:
            os.close(lock)

    def check_whole(self, output: int = LINES, error: int = 0) -> None:
        """D4 in the files: each custom_id once, and every line is JSON."""
        lines = [json.loads(line) for file in (self.out, self.err) for line in file.read_text().splitlines()]
        assert len(self.out.read_text().splitlines()) == output
        assert len(lines) == output + error
        assert set(Counter(line["custom_id"] for line in lines if line["custom_id"]).values()) <= {1}
        assert self.out.read_bytes().endswith(b"\n")


def request(number: int, **body: Any) -> str:
    return json.dumps({
        "custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "echo", "messages": [{"role": "user", "content": f"question {number}"}], **body},
    })  # fmt: skip


def wait_for(condition: Any, process: subprocess.Popen[str]) -> bool:
    """Whether it came true before the process ended."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return bool(condition())
        time.sleep(0.02)
    raise TimeoutError("it did not come true")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if made.state.exists():
        assert made.leftovers() == []


def test_a_second_run_with_the_same_state_does_no_work_and_says_so(place: Place) -> None:
    """The same command twice: answers once, OUT the same, and no worker is started."""
    code, out, err = place.finish()
    assert code == 0, err
    place.check_whole()
    assert place.ran() == LINES
    first = place.out.read_bytes()
    place.out.unlink()
    code, out, err = place.finish()
    assert code == 0, err
    assert "nothing to run" in err
    assert place.ran() == LINES
    assert place.out.read_bytes() == first
    assert json.loads(out)["finished_before"] == LINES


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_anywhere_and_run_again_every_line_is_answered_once(place: Place, seed: int) -> None:
    """SIGKILL the run at random points, some while it starts, some while lines run: OUT is absent or whole, always."""
    chance = random.Random(seed)
    kills = 0
    for _ in range(3):
        at = chance.choice([0, chance.randrange(1, LINES // 2), chance.randrange(1, LINES)])
        before = place.ran()
        process = place.start(delay_ms=50)
        if at == 0:
            time.sleep(chance.uniform(0, 4))
        else:
            wait_for(lambda at=at, before=before: place.ran() >= min(before + at, LINES), process)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait(DEADLINE_S)
        if place.out.exists():
            place.check_whole()
        assert place.leftovers() == []
    code, _, err = place.finish(delay_ms=5)
    assert code == 0, err
    place.check_whole()
    assert place.ran() <= LINES + kills * CONCURRENCY


@pytest.mark.parametrize("victim", ["broker", "worker"])
def test_a_killed_child_is_started_again_and_nothing_is_lost(place: Place, victim: str) -> None:
    """The kernel kills the broker, or the worker, in the middle: the run goes on by itself and ends well."""
    process = place.start(delay_ms=60)
    assert wait_for(lambda: place.ran() >= 8, process)
    place.children(process)[victim].kill()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "starting it again" in err
    place.check_whole()
    assert place.ran() <= LINES + (CONCURRENCY if victim == "worker" else 0)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_ends_the_children_and_the_next_run_goes_on(place: Place, number: int, exit_code: int) -> None:
    """A supervisor or Ctrl-C stops the run: nothing is left running, and what was finished is not run again."""
    process = place.start(delay_ms=60)
    assert wait_for(lambda: place.ran() >= 8, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code, err
    assert not place.out.exists()
    assert place.leftovers() == []
    code, _, err = place.finish()
    assert code == 0, err
    place.check_whole()
    assert place.ran() == LINES


def test_a_live_run_keeps_its_state_folder_to_itself(place: Place) -> None:
    """The same command in a second window: refused at once, naming the process that has the folder."""
    process = place.start(delay_ms=100)
    assert wait_for(lambda: place.ran() >= 1, process)
    other = place.folder / "other.jsonl"
    code, _, err = place.finish("-o", str(other), "-e", str(place.folder / "other.err"))
    assert code == 4
    assert str(process.pid) in err
    assert len([line for line in err.splitlines() if "in use" in line]) == 1
    assert not other.exists()
    assert process.poll() is None


def test_bad_lines_are_all_listed_and_nothing_runs(place: Place) -> None:
    """Strict, as the service is: exit 4, every bad line with number and code, no OUT; --lenient runs the others."""
    good = [request(n) for n in range(3)]
    place.write([*good, "{", good[0], request(7, stream=True), json.dumps({"custom_id": "x", "url": "/v1/x"})])
    code, _, err = place.finish(state=False)
    assert code == 4
    assert re.findall(r"line (\d+): ", err) == ["4", "5", "6", "7"]
    assert not place.out.exists()
    assert sorted(path.name for path in place.folder.iterdir()) == ["in.jsonl"]
    code, out, err = place.finish("--lenient", state=False)
    assert code == 1, err
    assert json.loads(out)["completed"] == 3
    place.check_whole(3, 4)
    assert not list(place.folder.glob(".*"))


def test_a_child_that_refuses_ends_the_run_with_its_words_and_code(place: Place) -> None:
    """A folder from a newer haulier, or one it may not write: the broker's own refusal, exit 4, one line."""
    (place.state / "broker").mkdir(parents=True)
    (place.state / "broker" / "lock").mkdir()
    code, _, err = place.finish()
    assert code == 4, err
    assert "the broker ended with exit code 4" in err
    assert not place.out.exists()
