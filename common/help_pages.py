"""rules: how ``--help`` is laid out, so that it reads well in 80 columns: panels, their order, and what is said once.

Which option stands in which panel is decided here for all commands: the same option stands in the same one everywhere.
Commands stand in the order in which a newcomer meets them. Changes what is shown alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FEW = 12
"""A command with no more options than this keeps them in one panel."""
MEMORY, KEPT, SHARED = "Memory and steps", "History kept on the device", "Shared histories and drafts"
FORMS = "Other things to measure"
PANELS: dict[str, tuple[str, ...]] = {
    MEMORY: (
        "device_pages_gib", "host_pool_gib", "concurrency", "context_tokens", "fit", "residency", "page_tokens",
        "chunk_tokens", "slot_gib", "graphs", "ring_mib",
    ),
    KEPT: ("retain", "target_pages", "burst_pages", "retained", "headroom_gib", "headroom_reserve_gib"),
    SHARED: ("own_tokens", "shared_histories", "draft_tokens"),
    FORMS: ("cells", "series", "shared_tokens", "requests", "lengths", "answers", "profile", "memory"),
    "HTTP": ("http", "http_keys", "http_upload_mib", "http_cert", "http_key"),
    "Without a model": ("echo", "echo_delay_ms", "echo_witness"),
}  # fmt: skip
"""Panel to names of parameters, in the order in which panels are shown behind the first one; the rest stay there."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
COMMANDS: dict[str, tuple[str, ...]] = {
    "One file on this machine": ("run",),
    "Jobs": ("submit", "jobs", "status", "watch", "fetch", "explain", "audit", "cancel", "delete"),
    "The fleet": ("keys", "broker", "worker", "workers", "top"),
    "This machine": ("doctor", "selfcheck", "bench", "model"),
}
"""Panel to commands of the first page, in the order in which both are shown."""
EXIT_CODES = (
    "Exit codes: 0 done, 1 some lines or checks failed, 2 wrong use, 3 no broker answered, 4 refused, 5 cancelled or "
    "expired, 6 not finished yet, 70 a bug of ours, 130 Ctrl-C."
)
FROM_ENVIRONMENT = "Options can come from the environment too: {option} as {variable}."
"""Said once under a command's options, instead of a line under each; a variable named otherwise is told beside it."""


def arrange(command: Any) -> None:
    """Lay out the help of a command as typer built it, and of those below it."""
    _first_page(command)
    for one in _all(command):
        many = sum(param.param_type_name == "option" for param in one.params) > FEW
        for param in one.params:
            option, variable = max(param.opts, key=len), getattr(param, "envvar", None)
            param.show_envvar = variable != f"HAULIER_{option.strip('-').replace('-', '_').upper()}"
            if variable and not param.show_envvar and option.startswith("--") and not one.epilog:
                one.epilog = FROM_ENVIRONMENT.format(option=option, variable=variable)
            if many:
                param.rich_help_panel = _PANEL_OF.get(param.name)
        if many:
            shown = [None, *PANELS]
            one.params.sort(key=lambda param: shown.index(param.rich_help_panel))


def _first_page(command: Any) -> None:
    """Commands in panels; one that stands in none, as in a test, keeps its place behind them."""
    below = getattr(command, "commands", {})
    order = [name for names in COMMANDS.values() for name in names if name in below]
    if not order:
        return
    for panel, names in COMMANDS.items():
        for name in names:
            if name in below:
                below[name].rich_help_panel = panel
    command.commands = {name: below[name] for name in (*order, *(name for name in below if name not in order))}
    command.epilog = EXIT_CODES


def _all(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from _all(below)
