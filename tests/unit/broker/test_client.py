"""A client of a broker that is slow, killed, restarted or not there: nothing is lost, nothing done twice, no hang."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import client as fleet
from common import keys, limits, messages, wire
from common.config import ClientSettings, KeySettings
from common.errors import PeerFault, RefusedError, UnreachableError, UsageError

JOB = "3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a77"
OPEN = KeySettings(insecure=True)


def quiet(done: float, total: float) -> None:
    """Tells nobody."""


def client_of(*endpoints: str, timeout_s: float = 20.0, key: KeySettings = OPEN) -> fleet.Client:
    return fleet.Client(ClientSettings(endpoints, key, timeout_s))


def dead_endpoint() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def input_file(folder: Path, size: int, seed: int = 1) -> fleet.InputFile:
    path = folder / "in.jsonl"
    path.write_bytes(random.Random(seed).randbytes(size))
    return fleet.hash_file(path, quiet)


def test_a_broker_killed_at_any_message_of_a_submit_gets_the_whole_file_once(scripted: Any, tmp_path: Path) -> None:
    """Kill the broker while a file is sent, with the last part unsynced: the client goes on from what is there."""
    source = input_file(tmp_path, 3 * limits.PART_MAX_BYTES + 17)
    scripted.lose_on_kill = limits.PART_MAX_BYTES // 2
    with client_of(scripted.endpoint) as client:
        for message in range(1, 7):
            scripted.jobs.clear()
            scripted.kill_at(message)
            info = fleet.submit(client, source, fleet.Order(JOB, "in"), quiet)
            assert info.job == JOB
            assert hashlib.sha256(scripted.jobs[JOB].data).hexdigest() == source.sha256
    assert scripted.kills >= 5


def test_a_client_that_never_asks_again_hangs_on_a_killed_broker(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the second try, the kill above ends the submit."""
    source = input_file(tmp_path, 100)
    with client_of(scripted.endpoint, timeout_s=3) as client:
        client.ask(messages.AskJobs(0, 0), messages.Jobs)
        link = client._link
        once = link()
        monkeypatch.setattr(client, "_link", lambda: once)
        monkeypatch.setattr(client, "_broken", lambda monitor: False)
        scripted.kill_at(1)
        with pytest.raises(UnreachableError):
            fleet.submit(client, source, fleet.Order(JOB, "in"), quiet)


def test_submitting_again_is_the_same_job(scripted: Any, tmp_path: Path) -> None:
    """A script that is run twice with one --job-id submits once; with another file it is refused."""
    source = input_file(tmp_path, 5_000)
    with client_of(scripted.endpoint) as client:
        fleet.submit(client, source, fleet.Order(JOB, "in"), quiet)
        fleet.submit(client, source, fleet.Order(JOB, "in"), quiet)
        sent = sum(len(m.data) for m in scripted.heard if isinstance(m, messages.Chunk))
        assert sent == source.size
        other = input_file(tmp_path, 5_000, seed=2)
        with pytest.raises(RefusedError, match="another"):
            fleet.submit(client, other, fleet.Order(JOB, "in"), quiet)


@pytest.mark.parametrize("kill_every", [0, 2, 3, 5])
def test_every_line_arrives_once_and_in_order_through_kills(scripted: Any, kill_every: int) -> None:
    """Fetch while the broker is killed again and again, long lines in pieces among short ones."""
    order = messages.Submit(0, JOB, "n", 0, "", False, 0, 0, "")
    job = scripted.jobs[JOB] = type("J", (), {})()
    from_random = random.Random(kill_every)
    lines = [bytes([65 + n % 26]) * from_random.choice([1, 40, 999, 1000, 1001, 2500]) for n in range(40)]
    job.__dict__.update(order=order, output=lines, error=[], status="completed", sealed=True, data=b"")
    with client_of(scripted.endpoint) as client:
        download, got = fleet.Download(client, JOB, "output"), b""
        while not download.ended:
            if kill_every and scripted.kills < 4:
                scripted.kill_at(kill_every)
            while data := download.pull():
                got += data
        assert got == b"".join(line + b"\n" for line in lines)
        assert download.lines == len(lines)
    assert not kill_every or scripted.kills >= 1


def test_watching_outlives_a_broker(scripted: Any) -> None:
    """Kill and restart the broker between two looks: the watch sees the job's end."""
    order = messages.Submit(0, JOB, "n", 0, "", False, 0, 0, "")
    with client_of(scripted.endpoint) as client:
        client.answer_to(order)
        scripted.jobs[JOB].status = "in_progress"

        def later(job: Any) -> None:
            if job.asked == 2:
                scripted.kill_at(1)
            job.status = "completed" if job.asked >= 4 else "in_progress"

        scripted.on_status = later
        seen = [info.status for info in fleet.follow(client, JOB, 0.01)]
    assert seen[-1] == "completed"
    assert scripted.kills == 1


def test_no_broker_ends_in_exit_3_and_names_what_was_tried() -> None:
    """Nobody listens at either endpoint."""
    first, second = dead_endpoint(), dead_endpoint()
    with client_of(first, second, timeout_s=0.5) as client, pytest.raises(UnreachableError) as told:
        client.ask(messages.AskJobs(0, 0), messages.Jobs)
    assert first in str(told.value)
    assert second in str(told.value)
    assert told.value.exit_code == 3


def test_a_dead_endpoint_costs_no_message(scripted: Any) -> None:
    """A list with a dead broker in front: each of many questions is answered."""
    with client_of(dead_endpoint(), scripted.endpoint) as client:
        for _ in range(10):
            client.ask(messages.AskJobs(0, 0), messages.Jobs)
    assert len(scripted.heard) == 10


def test_a_broker_that_connects_and_says_nothing_is_given_up(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung broker: the request goes out again, and within the timeout it is exit 3."""
    monkeypatch.setattr(fleet, "ANSWER_S", 0.2)
    scripted.answer = lambda m: messages.Workers(m.request + 1000, ())  # an answer to something else, as good as none
    with client_of(scripted.endpoint, timeout_s=1.0) as client, pytest.raises(UnreachableError):
        client.ask(messages.AskJobs(0, 0), messages.Jobs)
    assert len(scripted.heard) > 1


def test_right_keys_are_let_in_and_wrong_ones_are_refused_by_name(scripted_with_keys: Any, tmp_path: Path) -> None:
    """S5 as a client meets it: another fleet's folder, a revoked key, no keys at all: exit 4, long before --timeout."""
    good = KeySettings(tmp_path / "keys")
    with client_of(scripted_with_keys.endpoint, key=good) as client:
        assert client.ask(messages.AskJobs(0, 0), messages.Jobs).jobs == ()
    keys.init(tmp_path / "others")
    shutil.copytree(tmp_path / "keys", tmp_path / "stranger")
    for name in ("client.key", "client.key_secret"):
        shutil.copy(tmp_path / "others" / name, tmp_path / "stranger" / name)
    for wrong in (KeySettings(tmp_path / "others"), KeySettings(tmp_path / "stranger"), OPEN):
        with (
            client_of(scripted_with_keys.endpoint, key=wrong, timeout_s=60) as client,
            pytest.raises(RefusedError, match="--keys"),
        ):
            client.ask(messages.AskJobs(0, 0), messages.Jobs)
    with pytest.raises(RefusedError, match="keys init"), client_of("tcp://127.0.0.1:1", key=KeySettings(tmp_path)) as c:
        c.ask(messages.AskJobs(0, 0), messages.Jobs)
    assert len(scripted_with_keys.heard) == 1


@pytest.fixture
def hollow() -> Iterator[str]:
    """A port that accepts and closes, as a container's published port does while its broker is down."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        ended.set()
        thread.join()


def test_a_client_that_was_let_in_waits_for_a_broker_behind_a_proxy(
    scripted_with_keys: Any, hollow: str, tmp_path: Path
) -> None:
    """`watch` through a published port while the broker restarts: a cut handshake proves nothing against known keys."""
    endpoints = [scripted_with_keys.endpoint, hollow]
    with client_of(*endpoints, key=KeySettings(tmp_path / "keys"), timeout_s=fleet.CUT_S + 2) as client:
        client.ask(messages.AskJobs(0, 0), messages.Jobs)
        scripted_with_keys.stop()
        with pytest.raises(UnreachableError):
            client.ask(messages.AskJobs(0, 0), messages.Jobs)


def test_a_client_never_let_in_is_told_of_both_causes(hollow: str, tmp_path: Path) -> None:
    """The control: the same port, keys that were never proved. Within seconds, not after the whole --timeout."""
    keys.init(tmp_path / "keys")
    with (
        client_of(hollow, key=KeySettings(tmp_path / "keys"), timeout_s=60) as client,
        pytest.raises(RefusedError, match=r"--keys.*proxy"),
    ):
        client.ask(messages.AskJobs(0, 0), messages.Jobs)


@pytest.mark.parametrize(("exit_code", "kind"), [(2, UsageError), (4, RefusedError)])
def test_a_failure_carries_its_exit_code(scripted: Any, exit_code: int, kind: type[Exception]) -> None:
    """What the broker refuses ends the command with the broker's words and code."""
    scripted.answer = lambda m: messages.Failure(m.request, "no", "not this way, that way", exit_code)
    with client_of(scripted.endpoint) as client, pytest.raises(kind, match="that way"):
        client.ask(messages.AskJobs(0, 0), messages.Jobs)


def test_an_answer_of_another_kind_is_the_brokers_fault(scripted: Any) -> None:
    """A broker of another version answers with something else: told, not guessed at."""
    scripted.answer = lambda m: messages.Workers(m.request, ())
    with client_of(scripted.endpoint) as client, pytest.raises(PeerFault, match="version"):
        client.ask(messages.AskJobs(0, 0), messages.Jobs)


def test_a_refusal_at_the_door_is_told(scripted: Any) -> None:
    """A broker with another schema version does not let a client in."""
    scripted.answer = lambda m: messages.Refused("schema", "speak version 2; upgrade haulier")
    with client_of(scripted.endpoint) as client, pytest.raises(RefusedError, match="upgrade"):
        client.ask(messages.AskJobs(0, 0), messages.Jobs)


def test_lists_come_in_pages(scripted: Any) -> None:
    """More jobs and bad lines than one page holds."""
    with client_of(scripted.endpoint) as client:
        for n in range(5):
            client.answer_to(messages.Submit(0, f"3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a7{n}", "n", 0, "", False, 0, 0, ""))
        assert len(list(fleet.jobs(client))) == 5
        job = next(iter(scripted.jobs))
        scripted.jobs[job].problems = tuple(messages.Problem(n, "invalid_json_line", "x") for n in range(1, 6))
        assert [problem.line for problem in fleet.problems(client, job)] == [1, 2, 3, 4, 5]


def test_memory_is_flat_on_a_large_file(scripted: Any, tmp_path: Path) -> None:
    """A file of many parts is hashed and sent a part at a time."""
    source = tmp_path / "in.jsonl"
    with source.open("wb") as file:
        file.truncate(48 * limits.PART_MAX_BYTES)
    size = source.stat().st_size

    def taken(m: Any) -> Any:
        if isinstance(m, messages.Chunk):
            return messages.Need(m.request, m.job, m.offset + len(m.data))
        if isinstance(m, messages.Submit):
            return messages.Need(m.request, m.job, 0)
        return scripted.jobs["x"].info(m.request)

    with client_of(scripted.endpoint) as client:
        client.answer_to(messages.Submit(0, "x", "n", 0, "", False, 0, 0, ""))
        scripted.answer, scripted.heard = taken, _Deaf()
        tracemalloc.start()
        fleet.submit(client, fleet.hash_file(source, quiet), fleet.Order(JOB, "in"), quiet)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 12 * limits.PART_MAX_BYTES < size


class _Deaf(list[Any]):
    """A list that keeps nothing: the test's own memory must not be what is measured."""

    def append(self, item: Any) -> None:
        """Forgets it."""


def test_bad_inputs_are_told_before_anyone_is_asked(tmp_path: Path) -> None:
    """No such file, a folder, an empty file: one line, and what to change."""
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, kind, words in (
        (tmp_path / "no.jsonl", UsageError, "does not exist"),
        (tmp_path, UsageError, "folder"),
        (empty, RefusedError, "empty_file"),
    ):
        with pytest.raises(kind, match=words):
            fleet.check_input(path)


def test_a_broker_that_asks_for_the_same_byte_for_ever_is_called_stuck(scripted: Any, tmp_path: Path) -> None:
    """A broken broker does not make a client send a file for ever."""
    scripted.answer = lambda m: messages.Need(m.request, m.job, 0)
    with client_of(scripted.endpoint) as client, pytest.raises(PeerFault, match="stuck"):
        fleet.submit(client, input_file(tmp_path, 50), fleet.Order(JOB, "in"), quiet)


def test_a_line_cut_off_in_the_middle_is_never_taken_for_a_whole_one(scripted: Any) -> None:
    """Half a line and then nothing: an error, since OUT must not hold it."""
    answers = iter([
        messages.Lines(1, JOB, (b"half",), 4, False, True),
        messages.Lines(2, JOB, (), 4, True, False),
    ])  # fmt: skip
    scripted.answer = lambda m: next(answers)
    with client_of(scripted.endpoint) as client:
        download = fleet.Download(client, JOB, "output")
        assert download.pull() == b"half"
        assert (download.lines, download.ended) == (0, False)
        with pytest.raises(PeerFault, match="cut_line"):
            download.pull()


def test_a_broker_that_stops_is_no_answer(scripted: Any) -> None:
    """SIGTERM on the active broker while a file is submitted: the client asks again until the next one is there."""
    refusals = iter(range(3))

    def stopping(message: Any) -> Any:
        if next(refusals, None) is None:
            return None
        return messages.Failure(message.request, "stopping", "this broker is stopping; ask again in a moment", 3)

    scripted.answer = stopping
    with client_of(scripted.endpoint) as client:
        assert client.ask(messages.AskJobs(0, 0), messages.Jobs).jobs == ()
    assert len(scripted.heard) == 4


@pytest.mark.parametrize("bounded", [True, False])
def test_an_endpoint_that_says_nothing_at_all_does_not_use_up_the_time(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """The name of the broker that is gone does not resolve any more, which no socket reports: the next one is asked
    soon. The control waits at it as long as for an answer, and never comes to the broker that took over."""
    real = wire.connect
    monkeypatch.setattr(wire, "connect", lambda socket, where: None if "gone" in where else real(socket, where))
    monkeypatch.setattr(limits, "CONNECT_S", 0.2 if bounded else 60.0)
    monkeypatch.setattr(limits, "HANDSHAKE_S", 60.0)
    with client_of("tcp://gone:1", scripted.endpoint, timeout_s=2.0) as client:
        if bounded:
            assert client.ask(messages.AskJobs(0, 0), messages.Jobs).jobs == ()
            return
        with pytest.raises(UnreachableError):
            client.ask(messages.AskJobs(0, 0), messages.Jobs)
