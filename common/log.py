"""shell: structured log lines on stderr, set up once for each process. Knows no rule and no message.

People at a terminal read aligned text; anything else gets one JSON object a line. ``bind`` puts job, line, session and
epoch on every later line of the same thread. Lines of other libraries take the same form, so that a collector that
parses JSON never meets plain text.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog

from common.errors import UsageError

FORM_VARIABLE = "HAULIER_LOG"
LEVEL_VARIABLE = "HAULIER_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error", "critical")
FORMS = ("json", "console")
BOUND = ("job", "line", "session", "epoch")
"""What lines are bound to, in the order in which people look for it."""


def setup(stream: TextIO | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Send all log lines of this process to ``stream`` (default: stderr as it is when a line is written).

    ``HAULIER_LOG`` is ``json`` or ``console`` (default: console on a terminal), ``HAULIER_LOG_LEVEL`` one of ``LEVELS``
    (default: info). Raises ``UsageError`` for any other value. May be called again: the last call stands.
    """
    environment = os.environ if environment is None else environment
    level = _chosen(environment, LEVEL_VARIABLE, LEVELS, "info")
    target = stream if stream is not None else sys.stderr
    form = _chosen(environment, FORM_VARIABLE, FORMS, "console" if target.isatty() else "json")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if form == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=target.isatty())]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(stream if stream is not None else sys.stderr),
        cache_logger_on_first_use=False,  # so that a later setup, and a test's own stderr, take effect everywhere
    )
    _adopt_other_libraries(stream, shared, last)


def _adopt_other_libraries(
    stream: TextIO | None, shared: list[structlog.typing.Processor], last: list[structlog.typing.Processor]
) -> None:
    """Render the standard library's records like ours. Only warnings and worse: their news is not our news."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    handler.set_name("haulier")
    root = logging.getLogger()
    for former in [known for known in root.handlers if known.get_name() == "haulier"]:
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)


def _chosen(environment: Mapping[str, str], variable: str, choices: tuple[str, ...], default: str) -> str:
    value = environment.get(variable, "").strip().lower() or default
    if value not in choices:
        raise UsageError(f"{variable}={value}: say one of {', '.join(choices)}")
    return value


def get(room: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of one room, e.g. ``get("broker.server")``. Any thread."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger(room=room))


def bind(**names: Any) -> None:
    """Put these names on every later line of this thread; only those of ``BOUND``. None takes a name off again."""
    unknown = set(names) - set(BOUND)
    if unknown:
        raise TypeError(f"cannot bind {', '.join(sorted(unknown))}: only {', '.join(BOUND)}")
    structlog.contextvars.unbind_contextvars(*(name for name, value in names.items() if value is None))
    structlog.contextvars.bind_contextvars(**{name: value for name, value in names.items() if value is not None})
