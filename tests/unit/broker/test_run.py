"""The run's own flow against a scripted broker, no process started: what it writes, proves and refuses to write."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from broker import run as module
from broker.children import Children
from broker.run import BadInputError, Plan, run
from broker.show import PlainLines
from common import messages
from common.config import EngineSettings
from common.errors import InvariantError, RefusedError, UsageError

ENGINE = EngineSettings("m")
LINES = [b'{"custom_id": "a"}', b'{"custom_id": "b"}', b'{"custom_id": "c"}']


@pytest.fixture
def started(scripted_with_keys: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the children that would have been started; the scripted broker stands in for ours."""
    names: list[str] = []
    monkeypatch.setattr(module, "free_endpoint", lambda: (socket.socket(), scripted_with_keys.endpoint))
    monkeypatch.setattr(Children, "start", lambda self, name, room, arguments: names.append(name))
    return names


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """State in the test's folder, where the scripted broker's keys are too."""
    (tmp_path / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in LINES))
    return Plan(tmp_path / "in.jsonl", str(tmp_path / "out"), None, ENGINE, tmp_path, workers=2)


def bar() -> PlainLines:
    return PlainLines(io.StringIO(), announce=True)


def finishing(job: Any) -> None:
    """One more line at each look; the job ends with the last."""
    if len(job.output) < len(LINES):
        job.status = "in_progress"
        job.output.append(LINES[len(job.output)])
    else:
        job.status = "completed"


def test_lines_are_written_as_they_finish_and_appear_at_the_end(
    scripted_with_keys: Any, plan: Plan, started: list[str]
) -> None:
    """Broker first, workers only when there is work; OUT whole, in order of completion."""
    seen: list[bytes] = []
    part = Path(plan.output).with_name(".out.part")

    def watched(job: Any) -> None:
        seen.append(part.read_bytes())
        assert not Path(plan.output).exists()
        finishing(job)

    scripted_with_keys.on_status = watched
    outcome = run(plan, bar())
    assert started == ["broker", "worker 0", "worker 1"]
    assert Path(plan.output).read_bytes() == b"".join(line + b"\n" for line in LINES)
    assert [len(one.splitlines()) for one in seen] == sorted(len(one.splitlines()) for one in seen)
    assert len(seen[-1].splitlines()) == len(LINES)
    assert (outcome.before, outcome.info.completed) == (0, 3)


def test_a_run_with_failed_lines_says_what_they_died_of(
    scripted_with_keys: Any, plan: Plan, started: list[str]
) -> None:
    """The last word of a run, beside the counts."""

    def failing(job: Any) -> None:
        job.status, job.output = "completed", LINES[:2]
        job.error = [b'{"custom_id": "z", "error": {"code": "worker_died", "message": "twice"}}']

    scripted_with_keys.on_status = failing
    assert run(plan, bar()).failed == "1 of 3 lines failed: 1 worker_died (first: z: twice)"


def test_a_finished_job_starts_no_worker(scripted_with_keys: Any, plan: Plan, started: list[str]) -> None:
    """The second run: the broker alone, for the lines in its store."""
    scripted_with_keys.on_status = finishing
    run(plan, bar())
    started.clear()
    outcome = run(plan, bar())
    assert started == ["broker"]
    assert outcome.before == 3


def test_another_input_goes_before_what_an_earlier_one_left(
    scripted_with_keys: Any, plan: Plan, started: list[str]
) -> None:
    """Ctrl-C, mend the input, run again: the old job's lines must not take half of the workers."""
    scripted_with_keys.on_status = finishing
    run(plan, bar())
    plan.source.write_bytes(b"\n".join(reversed(LINES)) + b"\n")
    run(plan, bar())
    assert [job.order.priority for job in scripted_with_keys.jobs.values()] == [0, 1]


def test_files_that_are_not_what_the_store_says_never_appear(
    scripted_with_keys: Any, plan: Plan, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4 is proved before OUT appears. Control: without the proof the short file would stand there."""

    def short(m: Any) -> Any:
        if isinstance(m, messages.AskAudit):
            return messages.Audit(m.request, m.job, True, 4, 4, 0, 0, 0, 0, 4, ())
        return None

    scripted_with_keys.on_status, scripted_with_keys.answer = finishing, short
    with pytest.raises(InvariantError, match="3 output and 0 error lines came"):
        run(plan, bar())
    assert not Path(plan.output).exists()
    monkeypatch.setattr(module.Run, "_prove", lambda *_: None)
    run(plan, bar())
    assert Path(plan.output).exists()


def test_bad_lines_are_listed_and_out_stays_what_it_was(
    scripted_with_keys: Any, plan: Plan, started: list[str]
) -> None:
    """Every one of them, and exit 4."""
    Path(plan.output).write_bytes(b"before\n")

    def fails(job: Any) -> None:
        job.status, job.problems = "failed", tuple(messages.Problem(n, "url_mismatch", "x") for n in range(1, 6))

    scripted_with_keys.on_status = fails
    shown = io.StringIO()
    with pytest.raises(BadInputError, match="5 bad lines") as told:
        run(plan, PlainLines(shown, announce=False))
    assert told.value.exit_code == 4
    assert shown.getvalue().count("url_mismatch") == 5
    assert Path(plan.output).read_bytes() == b"before\n"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"workers": 0}, UsageError, "--workers"),
        ({"output": "-", "state": None}, UsageError, "--state"),
        ({"source": Path("no.jsonl")}, UsageError, "does not exist"),
        ({"output": "/no/such/folder/out"}, UsageError, "folder does not exist"),
        ({"source": Path("/dev/null")}, UsageError, "no regular file"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    plan: Plan, started: list[str], change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """No process, no file, one line."""
    fields = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    with pytest.raises(kind, match=words):
        run(Plan(**{**fields, **change}), bar())
    assert started == []
    assert not Path(plan.output).exists()


def test_an_empty_file_is_refused(plan: Plan, started: list[str]) -> None:
    plan.source.write_bytes(b"")
    with pytest.raises(RefusedError, match="empty_file"):
        run(plan, bar())
    assert started == []


def test_what_is_kept_on_the_device_is_asked_for_as_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``haulier run --retain ... --headroom-gib ...``: the engine settings of its workers, by flag or by variable."""
    plans: list[Plan] = []

    def refuse(plan: Plan, bar: Any) -> None:
        plans.append(plan)
        raise RefusedError("seen")

    monkeypatch.setattr(module, "run", refuse)
    app = typer.Typer()
    app.command("run")(module.run_command)
    flags = {
        "--retain": "off", "--target-pages": "4", "--burst-pages": "2", "--headroom-gib": "auto",
        "--headroom-reserve-gib": "3.5",
    }  # fmt: skip
    arguments = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "m"]
    CliRunner().invoke(app, [*arguments, *(part for pair in flags.items() for part in pair)])
    CliRunner().invoke(
        app, arguments, env={f"HAULIER_{name[2:].upper().replace('-', '_')}": flags[name] for name in flags}
    )
    wanted = EngineSettings(
        "m", retain="off", target_pages=4, burst_pages=2, headroom_gib="auto", headroom_reserve_gib=3.5
    )
    assert [plan.engine for plan in plans] == [wanted, wanted]
