"""The one door of the command line: what a user sees and a script reads when a command ends, in whatever way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from common import cli
from common.errors import (
    CancelledError,
    HaulierError,
    InvariantError,
    NotFinishedError,
    PeerFault,
    ReaderGone,
    RefusedError,
    UnreachableError,
    UsageError,
)


class Room:
    """Stands for an installed entry point whose value is ``load``'s result."""

    def __init__(self, load: Callable[[], Callable[[typer.Typer], None]], name: str = "room") -> None:
        self.name, self.load, self.value = name, load, f"{name}.commands:register"


def raising(failure: BaseException) -> list[EntryPoint]:
    """A room with one command, ``go``, that ends with ``failure``."""

    def register(app: typer.Typer) -> None:
        @app.command("go")
        def go(number: int = 0) -> None:
            raise failure

    return [Room(lambda: register)]  # type: ignore[list-item]


def missing(module: str, name: str = "worker") -> list[EntryPoint]:
    """A room whose import needs ``module``, on a machine that has it not."""

    def load() -> Callable[[typer.Typer], None]:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    return [*raising(typer.Exit(0)), Room(load, name)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UsageError("two\nlines"), 2),
        (UnreachableError("nobody answered"), 3),
        (RefusedError("no room"), 4),
        (PeerFault("schema", "too old"), 4),
        (CancelledError("cancelled"), 5),
        (NotFinishedError("later"), 6),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_one_line_and_its_documented_code(
    failure: HaulierError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script reads the code, a person reads the line; nobody reads a traceback for a wrong key."""
    assert cli.main(["go"], raising(failure)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "haulier: " + " ".join(str(failure).split()) + "\n"


@pytest.mark.parametrize(
    "failure", [InvariantError("books differ"), KeyError("job"), HaulierError("odd"), OSError("disk")]
)
def test_a_bug_of_ours_shows_where_and_asks_for_a_report(
    failure: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no rule foresaw must reach us whole: the traceback, then the line that says whose fault it is."""
    assert cli.main(["go"], raising(failure)) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "a bug of ours" in err.splitlines()[-1]


def test_a_reader_that_went_away_is_no_failed_line() -> None:
    """`haulier jobs | head -1`: exit 1 would say that lines failed."""
    code = (
        "import sys; from common import cli; from tests.unit.common.test_cli import printing; "
        "sys.exit(cli.main(['go'], printing()))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(30) == ReaderGone.exit_code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_output_that_nothing_takes_is_the_disks_fault_and_not_ours() -> None:
    """`haulier status JOB > FILE` on a full disk."""
    code = (
        "import sys; from common import cli; from tests.unit.common.test_cli import printing; "
        "sys.exit(cli.main(['go'], printing()))"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == RefusedError.exit_code


def printing() -> list[EntryPoint]:
    """A room with one command, ``go``, that prints for long."""

    def register(app: typer.Typer) -> None:
        @app.command("go")
        def go() -> None:
            for number in range(100_000):
                typer.echo(f"line {number}")

    return [Room(lambda: register)]  # type: ignore[list-item]


def test_control_c_is_130_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """The user stopped it: that is no failure to explain."""
    assert cli.main(["go"], raising(KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 6])
def test_a_command_chooses_its_code_by_typer_exit(code: int) -> None:
    """``run`` ends with 1 when some lines failed: no error, and yet not 0."""
    assert cli.main(["go"], raising(typer.Exit(code))) == code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing-like-this"], "nothing-like-this"),
        (["go", "--no-such-flag"], "--no-such-flag"),
        (["go", "--number", "many"], "--number"),
    ],
)
def test_wrong_use_is_2_in_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing mistake costs one line, which names the mistake."""
    assert cli.main(arguments, raising(typer.Exit(0))) == 2
    err = capsys.readouterr().err
    assert err.startswith("haulier: ")
    assert len(err.splitlines()) == 1
    assert named in err


def test_a_group_without_its_sub_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """``haulier keys`` alone: the help is the answer, and the code still says that nothing was done."""

    def register(app: typer.Typer) -> None:
        group = typer.Typer(no_args_is_help=True)
        group.command("init")(lambda: None)
        group.command("add")(lambda: None)
        app.add_typer(group, name="keys")

    assert cli.main(["keys"], [Room(lambda: register)]) == 2  # type: ignore[list-item]
    out, err = capsys.readouterr()
    assert "init" in out + err
    assert "haulier: " not in err


@pytest.mark.parametrize("module", ["torch", "transformers.models", "numpy"])
def test_a_missing_extra_says_what_to_install(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``haulier worker`` on a machine that installed only the client: the answer is a command, not an ImportError."""
    assert cli.main(["worker"], missing(module)) == 4
    err = capsys.readouterr().err
    assert "pip install 'haulier[worker]'" in err
    assert "Traceback" not in err


def test_a_missing_extra_leaves_the_other_commands_alone() -> None:
    """A client without torch still submits."""
    assert cli.main(["go"], missing("torch")) == 0


def test_a_missing_extra_found_while_running_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that imports torch only when it runs fails as kindly as one that does so when loaded."""
    failure = ModuleNotFoundError("No module named 'cuda'", name="cuda.bindings")
    assert cli.main(["go"], raising(failure)) == 4
    assert "pip install 'haulier[cuda]'" in capsys.readouterr().err


def test_an_import_that_no_extra_brings_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """Control: not every ImportError is the user's to mend."""
    assert cli.main(["go"], raising(ModuleNotFoundError("No module named 'leftpad'", name="leftpad"))) == 70
    assert cli.main(["worker"], missing("worker.no_such_room")) == 70


def test_help_lists_the_commands_of_every_room() -> None:
    """One help for all rooms, though this module knows none of them."""
    app, left_out = cli.build_app(raising(typer.Exit(0)))
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "go" in result.output
    assert left_out == {}


def test_the_installed_command_tells_its_version_without_the_engine() -> None:
    """``haulier --version`` in a script must be quick: loading torch takes seconds."""
    program = (
        "import sys; from common.cli import main; code = main(['--version']);"
        "heavy = [name for name in ('torch', 'transformers') if name in sys.modules]; sys.exit(code or len(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("haulier ")


@pytest.mark.parametrize(
    ("typed", "place", "offered"),
    [("haulier su", 1, ["submit"]), ("haulier fetch --par", 2, ["--partial"]),
     ("haulier bench ", 2, ["ring", "engine", "fleet"]), ("haulier nothing-", 1, [])],
)  # fmt: skip
def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, place: int, offered: list[str]
) -> None:
    """What --install-completion has the shell ask: one line for each word that fits. Control: one that nothing fits."""
    for name, value in (("_HAULIER_COMPLETE", "complete_bash"), ("COMP_WORDS", typed), ("COMP_CWORD", str(place))):
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        cli.main([])
    assert set(capsys.readouterr().out.split()) == set(offered)


def test_the_completion_that_is_shown_asks_for_this(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """haulier --show-completion, for bash and by its name in the script."""
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    with contextlib.suppress(SystemExit):
        cli.main(["--show-completion"])
    assert "_HAULIER_COMPLETE=complete_bash" in capsys.readouterr().out
