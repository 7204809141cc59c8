"""Progress goes to stderr: bars for people, few lines for logs; standard output stays clean for results."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from broker.show import EVERY_S, STILL_S, Bars, PlainLines, show


class Hand:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left() -> None:
    """A run under a supervisor: one line in five seconds, none for what takes no time."""
    clock, stream = Hand(), io.StringIO()
    with PlainLines(stream, announce=False, clock=clock) as bar:
        bar.phase("sending", 100, "bytes")
        bar.update(100)
        assert lines(stream) == []
        bar.phase("running", 100)
        for second in range(21):
            clock.now = float(second)
            bar.update(second * 2, 100, "1 failed")
    assert len(lines(stream)) == 20 // int(EVERY_S)
    assert lines(stream)[-1] == "haulier: running: 32 of 100 lines, 2 lines/s, 34 s left, 1 failed"


def test_a_resumed_run_does_not_count_earlier_work_as_speed() -> None:
    """Half the lines are there already: the rate is that of this run."""
    clock, stream = Hand(), io.StringIO()
    bar = PlainLines(stream, announce=False, clock=clock)
    bar.phase("running", 100)
    bar.update(50, 100)
    clock.now = 10.0
    bar.update(60, 100)
    assert lines(stream) == ["haulier: running: 60 of 100 lines, 1 line/s, 40 s left"]


def test_while_nothing_moves_there_is_little_to_say() -> None:
    """A long load: a sign of life every half minute, not every five seconds."""
    clock, stream = Hand(), io.StringIO()
    bar = PlainLines(stream, announce=True, clock=clock)
    bar.phase("loading model")
    bar.phase("loading model")
    for second in range(int(2 * STILL_S) + 2):
        clock.now = float(second)
        bar.update(0)
    assert lines(stream)[0] == "haulier: loading model"
    assert len(lines(stream)) == 1 + 3


def test_a_terminal_gets_bars_and_what_is_said_stays() -> None:
    """Brackets in a message are text, not markup."""
    stream = Terminal()
    with show(stream=stream) as bar:
        assert isinstance(bar, Bars)
        bar.phase("sending", 2048, "bytes")
        bar.update(1024)
        bar.phase("running", 10)
        bar.update(5, note="[bold]2 failed")
        bar.say("line 3: [red]bad")
    assert "haulier: line 3: [red]bad" in stream.getvalue()


@pytest.mark.parametrize(("terminal", "bars", "kind"), [(False, True, PlainLines), (True, False, PlainLines)])
def test_no_bars_where_they_would_be_in_the_way(terminal: bool, bars: bool, kind: type) -> None:
    """A file, or standard output full of results on the same terminal."""
    assert isinstance(show(stream=Terminal() if terminal else io.StringIO(), bars=bars), kind)


PRINTS = """
from broker.show import show
with show() as bar:
    bar.phase("sending", 10)
    print("the result", flush=True)
"""


def test_what_is_captured_from_standard_output_is_the_result_alone() -> None:
    """J=$(haulier submit FILE) at a terminal: bars on the terminal, the id in J."""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    os.close(ours)
    assert done.stdout == b"the result\n"
