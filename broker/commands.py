"""shell: the sub-commands ``haulier broker`` and ``haulier keys``. Turns flags into checked settings; knows no rule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.process import serve
from common import garbage, log
from common import keys as key_files
from common.config import BrokerSettings, HttpSettings, KeySettings, endpoints, seconds
from common.errors import UsageError
from common.parent import follow_parent

KeysFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the keys.", envvar="HAULIER_KEYS")]


def register(app: typer.Typer) -> None:
    """Add ``broker`` and ``keys`` to the command line."""
    app.command("broker")(broker)
    keys = typer.Typer(no_args_is_help=True, help="Make, add and revoke the keys that let workers and clients in.")
    keys.command("init")(keys_init)
    keys.command("add")(keys_add)
    keys.command("revoke")(keys_revoke)
    app.add_typer(keys, name="keys")


def broker(
    state: Annotated[Path, typer.Option(help="Folder of jobs and results.", envvar="HAULIER_STATE")],
    bind: Annotated[str, typer.Option(help="Address to listen at.", envvar="HAULIER_BIND")] = "tcp://127.0.0.1:7700",
    keys: Annotated[Path | None, typer.Option(help="Key folder (haulier keys init).", envvar="HAULIER_KEYS")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let anyone in, without keys.", envvar="HAULIER_INSECURE")
    ] = False,
    force_insecure: Annotated[
        bool,
        typer.Option("--force-insecure", help="Allow --insecure beyond loopback.", envvar="HAULIER_FORCE_INSECURE"),
    ] = False,
    disk_reserve_gib: Annotated[
        float, typer.Option(help="Disk kept for results, GiB.", envvar="HAULIER_DISK_RESERVE_GIB")
    ] = 1.0,
    metrics_port: Annotated[
        int, typer.Option(help="Serve metrics there; 0 for no port.", envvar="HAULIER_METRICS_PORT")
    ] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds workers have to claim lines after a restart.", envvar="HAULIER_GRACE")
    ] = 30.0,
    keep: Annotated[
        str, typer.Option(help="Delete ended jobs after this time, such as 30d; 0: never.", envvar="HAULIER_KEEP")
    ] = "0",
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait while another broker has --state; then take over.", envvar="HAULIER_STANDBY"
        ),
    ] = False,
    http: Annotated[
        str, typer.Option(help="HOST:PORT for OpenAI's files and batches, and a page at /fleet.", envvar="HAULIER_HTTP")
    ] = "",
    http_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of KEY TENANT lines: who is let in; needed beyond loopback.", envvar="HAULIER_HTTP_KEYS"
        ),
    ] = None,
    http_upload_mib: Annotated[
        int, typer.Option(help="Most of one uploaded file, MiB.", envvar="HAULIER_HTTP_UPLOAD_MIB")
    ] = 512,
    http_cert: Annotated[
        Path | None, typer.Option(help="Certificate and chain (PEM): HTTPS.", envvar="HAULIER_HTTP_CERT")
    ] = None,
    http_key: Annotated[
        Path | None, typer.Option(help="The certificate's key (PEM).", envvar="HAULIER_HTTP_KEY")
    ] = None,
) -> None:
    """Run the broker: takes jobs, gives their lines to workers, keeps what comes back."""
    found = endpoints(bind, "--bind")
    if len(found) != 1:
        raise UsageError(f"--bind {bind!r} must be one address, tcp://HOST:PORT")
    settings = BrokerSettings(
        found[0],
        state,
        KeySettings(keys, insecure, force_insecure),
        disk_reserve_gib,
        metrics_port,
        grace,
        seconds(keep, "--keep"),
        standby,
        HttpSettings(http, http_keys, http_upload_mib, http_cert, http_key) if http else None,
    )
    log.setup()
    follow_parent()
    garbage.calm()
    serve(settings)


def keys_init(
    directory: KeysFolder,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Leave keys that are there as they are.")] = False,
) -> None:
    """Make the broker's keys and a first pair for workers and clients."""
    made = key_files.init(directory, if_absent)
    typer.echo(f"{'made keys in' if made else 'keys are there already:'} {directory}")


def keys_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key; names that begin with admin see every job.")],
    directory: Annotated[Path, typer.Option("--keys", help="The broker's folder of keys.", envvar="HAULIER_KEYS")],
    weight: Annotated[
        float, typer.Option(help="Share of the fleet when others want it too.", envvar="HAULIER_WEIGHT")
    ] = 1.0,
) -> None:
    """Let somebody else in: makes a folder with a key pair to hand over."""
    typer.echo(str(key_files.add(directory, name, weight)))


def keys_revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key.")],
    directory: Annotated[Path, typer.Option("--keys", help="The broker's folder of keys.", envvar="HAULIER_KEYS")],
) -> None:
    """Let somebody in no more."""
    gone = key_files.revoke(directory, name)
    typer.echo(
        f"{name} is let in no more: whoever still has a copy of {gone} may delete it. To let {name} in again, run "
        f"haulier keys add {name} --keys {directory} and hand over the new folder"
    )
