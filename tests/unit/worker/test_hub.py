"""A model that is not here: said in one line and at once, where the loader would try for most of a minute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import RefusedError
from worker import hub

NAME = "organisation/model-1.5"


class Wire:
    """A network on which the hub is there, or is not."""

    def __init__(self, there: bool) -> None:
        self.there, self.asked = there, []  # type: tuple[bool, list[Any]]

    def __call__(self, where: Any, seconds: float) -> Any:
        self.asked.append(where)
        if not self.there:
            raise OSError("Name or service not known")
        return self

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(hub.OFFLINE, "0")
    return tmp_path


def had(folder: Path) -> None:
    snapshot = folder / "models--organisation--model-1.5" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")


@pytest.mark.parametrize("name", ["smollm2-135", "gpt2", "a/b/c", "", "org/", "with blank/x"])
def test_what_can_be_no_hubs_name_asks_nobody(name: str) -> None:
    """A slip of the pen in --model: the names there are, at once."""
    wire: Any = Wire(there=True)
    with pytest.raises(RefusedError, match=r"--model takes smollm2-135m"):
        hub.check(name, "smollm2-135m", wire)
    assert wire.asked == []


def test_without_a_hub_a_model_that_is_not_here_is_refused_by_name() -> None:
    """A machine without a network."""
    with pytest.raises(
        RefusedError, match=r"organisation/model-1.5 is not on this machine.*cannot be reached.*--model"
    ):
        hub.check(NAME, "x", Wire(there=False))  # type: ignore[arg-type]


def test_without_a_hub_a_model_that_was_fetched_before_is_used_as_it_is(machine: Path) -> None:
    """The loader is told not to ask the hub for anything newer."""
    had(machine)
    hub.check(NAME, "x", Wire(there=False))  # type: ignore[arg-type]
    assert os.environ[hub.OFFLINE] == "1"


def test_with_a_hub_the_loader_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a mirror of one's own; behind a proxy nothing is asked here."""
    wire: Any = Wire(there=True)
    hub.check(NAME, "x", wire)
    monkeypatch.setenv(hub.ENDPOINT, "http://mirror:8080")
    hub.check(NAME, "x", wire)
    assert wire.asked == [("huggingface.co", 443), ("mirror", 8080)]
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    hub.check(NAME, "x", Wire(there=False))  # type: ignore[arg-type]
    assert os.environ[hub.OFFLINE] == "0"


def test_offline_by_wish_is_believed() -> None:
    """HF_HUB_OFFLINE=1: nobody is asked."""
    os.environ[hub.OFFLINE] = "1"
    wire: Any = Wire(there=True)
    with pytest.raises(RefusedError, match=hub.OFFLINE):
        hub.check(NAME, "x", wire)
    assert wire.asked == []
