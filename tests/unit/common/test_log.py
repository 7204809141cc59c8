"""Log lines: what an operator's collector parses, and what a person at a terminal reads."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
import structlog

from common import log
from common.errors import UsageError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The set-up is the process's: leave it as it was found."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    root.handlers[:] = handlers


def written(environment: dict[str, str], *, level: str = "info") -> str:
    stream = io.StringIO()
    log.setup(stream, environment)
    getattr(log.get("broker.server"), level)("session gone", reason="silent")
    return stream.getvalue()


def test_without_a_terminal_each_line_is_one_json_object() -> None:
    """Under compose or systemd the line is parsed by a program."""
    line = json.loads(written({}))
    assert line["event"] == "session gone"
    assert line["reason"] == "silent"
    assert line["room"] == "broker.server"
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_the_form_can_be_chosen() -> None:
    """A person who pipes through less still wants to read."""
    assert not written({"HAULIER_LOG": "console"}).startswith("{")
    assert written({"HAULIER_LOG": "JSON"}).startswith("{")


def test_the_level_hides_what_is_below_it() -> None:
    """A quiet fleet logs warnings only."""
    assert written({"HAULIER_LOG_LEVEL": "warning"}) == ""
    assert written({"HAULIER_LOG_LEVEL": "warning"}, level="error") != ""
    assert written({}, level="debug") == ""


@pytest.mark.parametrize("environment", [{"HAULIER_LOG": "xml"}, {"HAULIER_LOG_LEVEL": "loud"}])
def test_an_unknown_setting_is_refused_with_the_choices(environment: dict[str, str]) -> None:
    """A typing mistake in an environment file must not silently mean something else."""
    with pytest.raises(UsageError, match=r"HAULIER_LOG.*: say one of"):
        log.setup(io.StringIO(), environment)


def test_bound_names_are_on_every_later_line_and_come_off() -> None:
    """While a session lives its epoch is on each of its lines; afterwards it is not."""
    stream = io.StringIO()
    log.setup(stream, {})
    log.bind(session="s1", epoch=3)
    log.get("worker.session").info("first")
    log.bind(session=None)
    log.get("worker.session").info("second")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["session"], first["epoch"]) == ("s1", 3)
    assert "session" not in second
    assert second["epoch"] == 3


def test_another_thread_has_its_own_bound_names() -> None:
    """The engine's lines must not carry the session's epoch by accident."""
    stream = io.StringIO()
    log.setup(stream, {})
    log.bind(epoch=3)
    thread = threading.Thread(target=lambda: log.get("worker.engine").info("step"))
    thread.start()
    thread.join()
    assert "epoch" not in json.loads(stream.getvalue())


def test_only_the_four_names_can_be_bound() -> None:
    """A fifth name would make lines that no search finds."""
    with pytest.raises(TypeError, match="cannot bind job_id"):
        log.bind(job_id="x")


def test_other_libraries_speak_in_the_same_form() -> None:
    """A warning of a library in the middle of JSON lines breaks the collector's parser."""
    stream = io.StringIO()
    log.setup(stream, {})
    logging.getLogger("some.dependency").warning("odd %s", "thing")
    logging.getLogger("some.dependency").info("news")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["odd thing"]


def test_setting_up_twice_does_not_say_things_twice() -> None:
    """``haulier run`` starts several parts in one process, and each may set up."""
    log.setup(io.StringIO(), {})
    stream = io.StringIO()
    log.setup(stream, {})
    logging.getLogger("some.dependency").error("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_an_exception_is_inside_its_line() -> None:
    """A traceback over forty plain lines would be forty broken JSON lines."""
    stream = io.StringIO()
    log.setup(stream, {})
    try:
        raise ValueError("odd")
    except ValueError:
        log.get("broker.store").exception("commit failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["exception"]
