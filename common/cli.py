"""shell: the command line's one door. Finds the sub-commands, and turns every failure into one line and an exit code.

Sub-commands come from the entry points of group ``haulier.commands``: each value is a function ``register(app)``, so
this module imports neither the broker nor the worker. It does not know what any command does. Exit codes: those of
``common.errors``, 2 for a wrong use, 130 for Ctrl-C, 70 for a bug of ours, with its traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version

import typer

from common.errors import DISK_FULL, HaulierError, InvariantError, ReaderGone, RefusedError
from common.help_pages import arrange
from common.printable import printable

GROUP = "haulier.commands"
INTERRUPTED = 130
BUG = InvariantError.exit_code
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")


def build_app(rooms: Iterable[EntryPoint] | None = None) -> tuple[typer.Typer, dict[str, HaulierError]]:
    """The application with the commands of all ``rooms`` (default: those installed), and the rooms left out, with why.

    A room is left out when something it imports is not installed. The rest of the commands work all the same.
    """
    app = typer.Typer(
        name="haulier", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback(invoke_without_command=True)(_top)
    left_out: dict[str, HaulierError] = {}
    found = entry_points(group=GROUP) if rooms is None else rooms
    for room in sorted(found, key=lambda entry: entry.name):
        try:
            register = room.load()
        except ModuleNotFoundError as failure:
            left_out[room.name] = not_installed(failure) or InvariantError(f"{room.value} cannot be loaded: {failure}")
        else:
            register(app)
    _join_groups(app)
    return app, left_out


def _join_groups(app: typer.Typer) -> None:
    """Groups of one name (``bench``) that several rooms added become one: each room works without the others."""
    joined: dict[str, typer.Typer] = {}
    kept = []
    for found in app.registered_groups:
        room = found.typer_instance
        name = next((name for name in (found.name, room.info.name if room else None) if isinstance(name, str)), "")
        first = joined.setdefault(name, room) if name and room is not None else None
        if room is None or first is None or first is room:
            kept.append(found)
            continue
        first.registered_commands += room.registered_commands
        first.registered_groups += room.registered_groups
    app.registered_groups = kept


def _top(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Print haulier's version and exit."),
) -> None:
    """Run batches of LLM requests on a fleet of GPU workers, exactly."""
    if show_version:
        typer.echo(f"haulier {installed_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def installed_version() -> str:
    """The version of the installed distribution, or ``unknown`` when run from a bare checkout."""
    try:
        return version("haulier")
    except PackageNotFoundError:
        return "unknown"


def not_installed(failure: ImportError) -> RefusedError | None:
    """What to install so that ``failure`` goes away, or None when no extra of ours would bring the module."""
    module = failure.name or ""
    extra = _extras().get(module.partition(".")[0])
    if extra is None:
        return None
    return RefusedError(f"{module} is not installed here, and this command needs it: pip install 'haulier[{extra}]'")


def _extras() -> Mapping[str, str]:
    """Top-level module to the extra that brings it. A distribution's name tells its module (cuda-bindings: cuda)."""
    extras: dict[str, str] = {}
    try:
        declared = requires("haulier") or []
    except PackageNotFoundError:
        return extras
    for requirement in declared:
        if match := _REQUIREMENT.match(requirement):
            name = match["name"].lower()
            for module in (name.replace("-", "_"), name.partition("-")[0]):
                extras.setdefault(module, match["extra"])
    return extras


def main(arguments: Sequence[str] | None = None, rooms: Iterable[EntryPoint] | None = None) -> int:
    """Run one command line (default: this process's own) and return its exit code. Main thread."""
    left_out: dict[str, HaulierError] = {}
    try:
        app, left_out = build_app(rooms)
        command = typer.main.get_command(app)
        arrange(command)
        result = command.main(
            args=None if arguments is None else list(arguments), prog_name="haulier", standalone_mode=False
        )
        # a command ends early through typer.Exit(code), which arrives here as its number; others return None
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except ImportError as failure:
        known = not_installed(failure)
        return _fail(known) if known is not None else _bug(failure)
    except SystemExit as ended:  # how typer answers a closed pipe, as `| head` leaves one: exit 1 would tell of lines
        if isinstance(ended.__context__, BrokenPipeError):
            return ReaderGone.exit_code
        raise
    except HaulierError as failure:
        return _bug(failure) if failure.exit_code == BUG else _fail(failure)
    except OSError as failure:
        full = failure.errno in DISK_FULL
        return _fail(RefusedError(f"cannot write what was to be printed or kept: {failure}")) if full else _bug(failure)
    except Exception as failure:  # noqa: BLE001 - the last door: anything left is either a wrong use or a bug of ours
        return _wrong_use(failure, left_out) if hasattr(failure, "format_message") else _bug(failure)


def _wrong_use(failure: Exception, left_out: Mapping[str, HaulierError]) -> int:
    """Typer's own complaint in our one line. Recognised by its shape, since typer's versions differ in its class."""
    if type(failure).__name__ == "NoArgsIsHelpError":  # a group called without its sub-command: the help is the answer
        typer.echo(failure.format_message(), err=True)  # type: ignore[attr-defined]
        return 2
    message = str(failure.format_message())  # type: ignore[attr-defined]
    if "No such command" in message and left_out:
        for name, reason in left_out.items():
            _say(f"{message} The {name} commands are left out: {reason}")
        return next(iter(left_out.values())).exit_code
    context = getattr(failure, "ctx", None)
    _say(message + (f" (see {context.command_path} --help)" if context is not None else ""))
    return int(getattr(failure, "exit_code", 2))


def _fail(failure: HaulierError) -> int:
    _say(str(failure))
    return failure.exit_code


def _bug(failure: BaseException) -> int:
    traceback.print_exception(failure)
    _say(f"{type(failure).__name__}: {failure}; this is a bug of ours, please report it with the lines above")
    return BUG


def _say(message: str) -> None:
    """One line, whatever the message holds."""
    print("haulier: " + printable(" ".join(message.split())), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
