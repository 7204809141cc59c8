"""The client's commands as people and scripts meet them: what is printed where, exit codes, files whole or absent."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from common import cli, keys, messages

JOB = "3f0c1c1e-9d1b-4c63-8a5e-0c2f6f1f9a77"
INPUT = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'


@pytest.fixture
def ask(scripted: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs one command line against the scripted broker: exit code, standard output, stderr."""
    (tmp_path / "in.jsonl").write_bytes(INPUT)

    def command(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main([words[0], "--broker", scripted.endpoint, "--insecure", "--timeout", "10", *words[1:]])
        told = capfd.readouterr()
        return code, told.out, told.err

    return command


def submitted(ask: Any, scripted: Any, tmp_path: Path, status: str = "completed") -> Any:
    scripted.on_status = lambda job: setattr(job, "status", status)
    code, _, err = ask("submit", str(tmp_path / "in.jsonl"), "--job-id", JOB)
    assert code in (0, 4), err
    job = scripted.jobs[JOB]
    job.status = status
    return job


def test_submit_prints_the_id_and_nothing_else(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """J=$(haulier submit FILE) holds an id, also when it was chosen by the caller and submitted twice."""
    scripted.on_status = lambda job: setattr(job, "status", "in_progress")
    code, out, _ = ask("submit", str(tmp_path / "in.jsonl"))
    assert code == 0
    assert list(scripted.jobs) == [out.strip()]
    for _ in range(2):
        assert ask("submit", str(tmp_path / "in.jsonl"), "--job-id", JOB)[:2] == (0, JOB + "\n")
    assert bytes(scripted.jobs[JOB].data) == INPUT


def test_bad_lines_are_listed_one_by_one_also_as_json(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """Strict: exit 4, each line with number, code and words; the same in --json for scripts."""
    problems = tuple(messages.Problem(n, "invalid_json_line", f"not JSON {n}") for n in range(1, 8))

    def fails(job: Any) -> None:
        job.status, job.problems = "failed", problems

    scripted.on_status = fails
    code, out, err = ask("submit", str(tmp_path / "in.jsonl"))
    assert code == 4
    assert [line for line in err.splitlines() if "invalid_json_line" in line] == [
        f"haulier: line {n}: invalid_json_line: not JSON {n}" for n in range(1, 8)
    ]
    assert "--lenient" in err.splitlines()[-1]
    code, out, err = ask("submit", str(tmp_path / "in.jsonl"), "--json")
    assert code == 4
    assert [bad["line"] for bad in json.loads(out)["bad_lines"]] == list(range(1, 8))
    code, out, _ = ask("status", "--json", json.loads(out)["job"])
    assert code == 0
    assert len(json.loads(out)["bad_lines"]) == 7


@pytest.mark.parametrize(
    ("status", "failed", "code"),
    [("completed", 0, 0), ("completed", 1, 1), ("failed", 0, 4), ("cancelled", 1, 5), ("expired", 0, 5)],
)
def test_exit_codes_tell_how_the_job_ended(
    ask: Any, scripted: Any, tmp_path: Path, status: str, failed: int, code: int
) -> None:
    """A script that looks at nothing but the exit code is not misled: watch, status --check, fetch, submit --wait."""
    job = submitted(ask, scripted, tmp_path, status)
    job.output, job.error = [b"{}"], [b"{}"] * failed
    assert ask("watch", JOB)[0] == code
    assert ask("status", JOB)[0] == 0
    assert ask("status", "--check", JOB)[0] == code
    assert ask("fetch", JOB, "-o", str(tmp_path / "out"))[0] == code
    assert ask("submit", str(tmp_path / "in.jsonl"), "--job-id", JOB, "--wait")[0] == code


def test_fetch_of_an_unfinished_job_is_exit_6_and_writes_nothing(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """A cron job that fetches too early must not take half a result for the whole; --partial asks for it."""
    job = submitted(ask, scripted, tmp_path, "in_progress")
    job.output = [b'{"custom_id": "a"}']
    code, _, err = ask("fetch", JOB, "-o", str(tmp_path / "out"))
    assert (code, sorted(p.name for p in tmp_path.iterdir())) == (6, ["in.jsonl"]), err
    assert "--partial" in err
    assert ask("status", "--check", JOB)[0] == 6
    assert ask("fetch", JOB, "-o", str(tmp_path / "out"), "--partial")[0] == 6
    assert (tmp_path / "out").read_bytes() == b'{"custom_id": "a"}\n'


def test_fetch_keeps_failed_lines_apart_or_together_but_always(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """With -e they have their own file, without it they stand in OUT; with -o - everything is on standard output."""
    job = submitted(ask, scripted, tmp_path)
    job.output, job.error = [b'{"n": %d}' % n for n in range(10)], [b'{"bad": "' + b"x" * 2500 + b'"}', b"{}"]
    good, bad = b"\n".join(job.output) + b"\n", b"\n".join(job.error) + b"\n"
    out, err = tmp_path / "out", tmp_path / "err"
    assert ask("fetch", JOB, "-o", str(out), "-e", str(err))[0] == 1
    assert (out.read_bytes(), err.read_bytes()) == (good, bad)
    assert ask("fetch", JOB, "-o", str(out))[0] == 1
    assert out.read_bytes() == good + bad
    assert ask("fetch", JOB, "-o", "-")[1].encode() == good + bad
    told = json.loads(ask("fetch", JOB, "-o", str(out), "--json")[1])
    assert (told["output_lines"], told["error_lines"]) == (10, 2)


def test_a_broker_killed_during_submit_watch_and_fetch_costs_nothing(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """Kill and restart it at each message of each command."""
    for at in range(1, 5):
        scripted.jobs.clear()
        scripted.kill_at(at)
        job = submitted(ask, scripted, tmp_path)
        job.output = [b"%d" % n for n in range(9)]
        scripted.kill_at(at)
        assert ask("watch", JOB)[0] == 0
        scripted.kill_at(at)
        assert ask("fetch", JOB, "-o", str(tmp_path / "out"))[0] == 0
        assert (tmp_path / "out").read_bytes().split() == job.output
    assert scripted.kills >= 8


def test_a_fetch_that_fails_leaves_the_old_file_alone(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """The broker goes away for good in the middle: exit 3, and OUT is what it was."""
    job = submitted(ask, scripted, tmp_path)
    job.output = [b"%d" % n for n in range(30)]
    out = tmp_path / "out"
    out.write_bytes(b"before\n")
    scripted.kill_at(4, back=False)
    code, _, err = ask("fetch", JOB, "-o", str(out), "--timeout", "1")
    assert code == 3, err
    assert out.read_bytes() == b"before\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_ctrl_c_in_watch_leaves_the_job_running_and_says_so(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """130, a word about the job, and the job is not cancelled."""
    job = submitted(ask, scripted, tmp_path, "in_progress")
    job.asked = 0

    def interrupt(asked: Any) -> None:
        if asked.asked == 2:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    scripted.on_status = interrupt
    code, _, err = ask("watch", JOB)
    assert code == 130
    assert f"haulier watch {JOB}" in err
    assert job.status == "in_progress"


def test_queries_speak_json_or_people(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """jobs, workers, status, cancel, audit, watch: one JSON document on standard output, or aligned text."""
    submitted(ask, scripted, tmp_path, "in_progress")
    ring = messages.RingReport()
    model = messages.ModelInfo("smollm2-135m", "f", 2048)
    scripted.workers = (messages.WorkerInfo("w-1", 2, 3, "ready", (model,), 8, 4, 1, 2, 30, 40, 0.5, ring),)
    assert json.loads(ask("jobs", "--json")[1])["jobs"][0]["job"] == JOB
    assert json.loads(ask("workers", "--json")[1])["workers"][0]["models"][0]["name"] == "smollm2-135m"
    assert json.loads(ask("status", "--json", JOB)[1])["status"] == "in_progress"
    assert [line.split()[0] for line in ask("jobs")[1].splitlines()] == ["JOB", JOB]
    assert [line.split()[:3] for line in ask("workers")[1].splitlines()][1] == ["w-1", "ready", "smollm2-135m"]
    assert ask("audit", JOB)[0] == 6
    scripted.on_status = lambda job: None
    assert json.loads(ask("cancel", "--json", JOB)[1])["status"] == "cancelled"
    assert [json.loads(line)["status"] for line in ask("watch", "--json", JOB)[1].splitlines()] == ["cancelled"]
    scripted.jobs[JOB].output = [b"{}", b"{}"]
    assert ask("audit", JOB)[0] == 0
    assert json.loads(ask("audit", "--json", JOB)[1])["holds"] is True
    assert json.loads(ask("delete", "--json", JOB)[1]) == {"job": JOB, "lines": 2}
    assert ask("delete", JOB)[1] == f"{JOB} deleted: 2 lines\n"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("submit", "{}/no.jsonl"), 2, "does not exist"),
        (("submit", "{}"), 2, "folder"),
        (("submit", "{}/empty"), 4, "empty_file"),
        (("submit", "{}/in.jsonl", "--job-id", "mine"), 2, "not a job id"),
        (("submit", "{}/in.jsonl", "--window", "soon"), 2, "duration"),
        (("submit", "{}/in.jsonl", "--priority", "9999999"), 2, "--priority"),
        (("status", "mine"), 2, "haulier jobs"),
        (("status", JOB), 2, "haulier jobs"),
        (("fetch", JOB, "-o", "{}/no/out"), 2, "folder does not exist"),
        (("fetch", JOB, "-o", "{}"), 2, "is a folder"),
        (("fetch", JOB, "-o", "{}/x", "-e", "{}/x"), 2, "another"),
        (("jobs", "--timeout", "0"), 2, "--timeout"),
        (("jobs", "--broker", "nonsense"), 2, "tcp://HOST:PORT"),
        (("jobs", "--broker", "127.0.0.1:9", "--timeout", "0.5"), 3, "--broker"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_to_change(
    ask: Any, tmp_path: Path, words: tuple[str, ...], code: int, told: str
) -> None:
    """Nothing is written, nothing is submitted, no traceback."""
    (tmp_path / "empty").touch()
    before = sorted(tmp_path.iterdir())
    got, out, err = ask(*(word.replace("{}", str(tmp_path)) for word in words))
    assert (got, out, len(err.splitlines())) == (code, "", 1), err
    assert told in err
    assert sorted(tmp_path.iterdir()) == before


def test_keys_are_asked_for_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither --keys nor --insecure: the error names both the flag and the variable."""
    assert cli.main(["jobs", "--broker", "127.0.0.1:9"]) == 2
    assert "--keys DIR (or HAULIER_KEYS)" in capfd.readouterr().err
    assert cli.main(["jobs", "--broker", "127.0.0.1:9", "--keys", str(tmp_path)]) == 4
    assert "haulier keys init" in capfd.readouterr().err


def test_a_key_that_others_can_read_is_told_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """cp -r keys /shared: the command says so, and goes on."""
    folder = tmp_path / "keys"
    keys.init(folder)
    folder.chmod(0o755)
    command = ["jobs", "--broker", "127.0.0.1:1", "--keys", str(folder), "--timeout", "0.1"]
    assert cli.main(command) == 3
    assert "warning" not in capfd.readouterr().err
    (folder / "client.key_secret").chmod(0o644)
    assert cli.main(command) == 3
    told = capfd.readouterr()
    assert f"haulier: warning: others can read {folder / 'client.key_secret'}" in told.err
    assert told.out == ""


def test_the_end_of_a_job_says_what_its_failed_lines_died_of(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """submit --wait and watch: the commonest error on stderr; --json has it in the error file alone."""
    error = {"error": {"code": "context_length_exceeded", "message": "9 tokens are more than 8"}}
    line = {"custom_id": "b", "response": {"status_code": 400, "body": error}, "error": None}
    job = submitted(ask, scripted, tmp_path)
    job.output, job.error = [b"{}"], [json.dumps(line).encode()]
    words = "1 of 2 lines failed: 1 context_length_exceeded (first: b: 9 tokens are more than 8)"
    for command in (["watch", JOB], ["submit", str(tmp_path / "in.jsonl"), "--job-id", JOB, "--wait"]):
        code, _, err = ask(*command)
        assert (code, err.splitlines()[-1]) == (1, words)
    assert words not in ask("watch", JOB, "--json")[2]


def test_a_long_error_file_is_looked_at_for_a_while_only(ask: Any, scripted: Any, tmp_path: Path) -> None:
    """Half a million failed lines must not be fetched for one word; a long line comes whole."""
    job = submitted(ask, scripted, tmp_path)
    job.error = [b'{"custom_id": "%s", "error": {"code": "long", "message": "m"}}' % (b"x" * 2500)]
    job.error += [b'{"custom_id": "a", "error": {"code": "c", "message": "m"}}'] * 3000
    _, _, err = ask("watch", JOB)
    assert "3001 of 2 lines failed: 999 c (first: a: m), 1 other; looked at the first 1000" in err
