"""``haulier broker`` and ``haulier keys``: flags become checked settings, mistakes one line and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker import commands
from common.cli import main
from common.config import BrokerSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[BrokerSettings]:
    """Settings the broker would have been started with."""
    found: list[BrokerSettings] = []
    monkeypatch.setattr(commands, "serve", found.append)
    return found


def test_flags_and_environment_are_one(
    served: list[BrokerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container is set up by its environment, a person by flags."""
    monkeypatch.setenv("HAULIER_KEYS", str(tmp_path))
    assert main(["broker", "--state", str(tmp_path), "--bind", "127.0.0.1:7700", "--grace", "5"]) == 0
    monkeypatch.setenv("HAULIER_STATE", str(tmp_path))
    monkeypatch.setenv("HAULIER_BIND", "tcp://127.0.0.1:7700")
    monkeypatch.setenv("HAULIER_GRACE", "5")
    assert main(["broker"]) == 0
    assert served[0] == served[1]
    assert (served[0].bind, served[0].grace_s) == ("tcp://127.0.0.1:7700", 5.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--keys"),
        (["--insecure", "--bind", "0.0.0.0:7700"], "--insecure"),
        (["--insecure", "--bind", "127.0.0.1:1,127.0.0.1:2"], "--bind"),
        (["--insecure", "--bind", "nonsense"], "--bind 'nonsense' is not tcp://HOST:PORT"),
        (["--insecure", "--keep", "soon"], "--keep 'soon' is not a duration"),
        (["--insecure", "--disk-reserve-gib", "-1"], "--disk-reserve-gib"),
    ],
)
def test_a_wrong_use_names_the_flag(
    served: list[BrokerSettings], tmp_path: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    """Exit code 2, one line, and what to change."""
    assert main(["broker", "--state", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err.strip()
    assert words in message
    assert "\n" not in message
    assert not served


def test_keys_are_made_added_and_revoked(tmp_path: Path, capsys: Any) -> None:
    """The whole life of a key from the command line."""
    folder = tmp_path / "keys"
    assert main(["keys", "init", str(folder)]) == 0
    assert main(["keys", "init", str(folder)]) == 4
    assert main(["keys", "init", str(folder), "--if-absent"]) == 0
    assert main(["keys", "add", "bob", "--keys", str(folder)]) == 0
    assert (folder / "authorized" / "bob.key").exists()
    assert str(folder / "clients" / "bob") in capsys.readouterr().out
    assert main(["keys", "revoke", "bob", "--keys", str(folder)]) == 0
    assert main(["keys", "revoke", "bob", "--keys", str(folder)]) == 4
    assert not (folder / "authorized" / "bob.key").exists()
