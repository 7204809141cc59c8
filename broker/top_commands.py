"""shell: ``haulier top``: asks the broker again and again and shows ``broker.top``'s frames. Decides nothing itself."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from broker import client as fleet
from broker import top as view
from broker.asking import Broker, Insecure, Json, Keys, Timeout, asking, print_json
from broker.looking import look
from common.errors import UsageError

SCREEN = (80, 24)
"""Columns and lines where the output is no terminal, or does not say."""
EVERY_MIN_S = 0.2


def top(
    once: Annotated[bool, typer.Option("--once", envvar="HAULIER_ONCE", help="Print one frame and end.")] = False,
    every: Annotated[float, typer.Option("--every", envvar="HAULIER_EVERY", help="Seconds between two frames.")] = 2.0,
    broker: Broker = "",
    keys: Keys = None,
    insecure: Insecure = False,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Watch the fleet: jobs and time left, workers and their memory, why lines wait.

    Ctrl-C ends it. Where the output is no terminal, frames are printed one below the other. --json prints one object.
    """
    if not every >= EVERY_MIN_S:
        raise UsageError(f"--every {every:g} must be {EVERY_MIN_S:g} or more")
    with asking(broker, keys, insecure, timeout) as client:
        if as_json:
            print_json(view.plain(look(client)))
        elif once:
            typer.echo("\n".join(view.frame(look(client), _columns())))
        elif sys.stdout.isatty():
            _live(client, every)
        else:
            while True:
                typer.echo("\n".join([*_stamped(look(client), _columns()), ""]))
                client.sleep(every)


def _live(client: fleet.Client, every: float) -> None:
    """One screen that changes; the terminal is as it was when it ends."""
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = view.screenful(_stamped(look(client), console.width), console.height)
            live.update(_coloured(lines), refresh=True)
            client.sleep(every)


def _stamped(seen: view.Seen, width: int) -> list[str]:
    """A frame that says when it was made: a broker that is away leaves the last one standing."""
    first, *rest = view.frame(seen, width)
    return [view.cut(f"{datetime.now():%H:%M:%S}  {first}", width), *rest]


def _coloured(lines: list[str]) -> Text:
    """Headings stand out; nothing else needs a colour to be read."""
    text = Text(no_wrap=True, overflow="crop")
    for line in lines:
        text.append(line + "\n", style="bold" if line.partition(" ")[0] in view.HEADINGS else "")
    return text


def _columns() -> int:
    return shutil.get_terminal_size(SCREEN).columns
