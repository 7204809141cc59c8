"""shell: what every command that asks a broker has in common: its flags, and the client they make. Asks nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.client import Client
from common import keys as key_files
from common.config import ClientSettings, KeySettings, endpoints

Broker = Annotated[
    str,
    typer.Option(
        "--broker", envvar="HAULIER_BROKER", help="Where the broker listens: tcp://HOST:PORT, several by commas."
    ),
]
Keys = Annotated[Path | None, typer.Option("--keys", envvar="HAULIER_KEYS", help="Folder of the client's keys.")]
Insecure = Annotated[bool, typer.Option("--insecure", envvar="HAULIER_INSECURE", help="Speak without keys.")]
Timeout = Annotated[
    float, typer.Option("--timeout", envvar="HAULIER_TIMEOUT", help="Seconds without any answer before giving up.")
]
Json = Annotated[bool, typer.Option("--json", envvar="HAULIER_JSON", help="Print JSON on standard output.")]


def asking(broker: str, keys: Path | None, insecure: bool, timeout: float) -> Client:
    """The client that the flags ask for; keys that others can read are told on stderr."""
    if keys is not None and not insecure and (exposed := key_files.exposed(keys)):
        typer.echo(f"haulier: warning: {exposed}", err=True)
    brokers = endpoints(broker) if broker else ()
    return Client(ClientSettings(brokers, KeySettings(keys, insecure), timeout))


def print_json(value: Any) -> None:
    """One JSON document on a line of standard output."""
    typer.echo(json.dumps(value))
