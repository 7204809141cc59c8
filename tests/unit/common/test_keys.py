"""S5 at rest: key folders are made once, handed out, revoked, and never half-made."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from common import keys
from common.errors import RefusedError, UsageError


def test_a_new_folder_lets_its_own_client_in(tmp_path: Path) -> None:
    """The first `haulier keys init`: broker and client share one folder and it is enough."""
    assert keys.init(tmp_path)
    client = keys.load_client(tmp_path)
    assert client.server == keys.load_server(tmp_path).public
    assert keys.Authorized(tmp_path).name(client.public) == keys.FIRST_NAME


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    """A shared machine: other users must not read a secret key."""
    keys.init(tmp_path)
    bundle = keys.add(tmp_path, "bob")
    for secret in (*tmp_path.glob("*_secret"), *bundle.glob("*_secret")):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_init_never_replaces_keys(tmp_path: Path) -> None:
    """Run twice by a script: the second run must not lock everyone out."""
    keys.init(tmp_path)
    before = keys.load_server(tmp_path)
    with pytest.raises(RefusedError, match="already holds keys"):
        keys.init(tmp_path)
    assert not keys.init(tmp_path, if_absent=True)
    assert keys.load_server(tmp_path) == before


def test_two_makers_at_once_agree(tmp_path: Path) -> None:
    """Two containers start on one empty volume: one makes the keys, both find the same ones."""
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(keys.init(tmp_path, if_absent=True))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]
    assert keys.Authorized(tmp_path).name(keys.load_client(tmp_path).public) == keys.FIRST_NAME


def test_a_cut_init_is_finished_by_the_next(tmp_path: Path) -> None:
    """Killed while making keys: the folder without the server's secret counts as not made."""
    keys.init(tmp_path)
    (tmp_path / "server.key_secret").unlink()
    assert keys.init(tmp_path, if_absent=True)
    assert keys.Authorized(tmp_path).name(keys.load_client(tmp_path).public) == keys.FIRST_NAME


def test_a_revoked_key_is_let_in_no_more_without_a_restart(tmp_path: Path) -> None:
    """Somebody leaves: their key stops working while the broker runs on."""
    keys.init(tmp_path)
    bundle = keys.add(tmp_path, "bob")
    public = keys.load_client(bundle).public
    authorized = keys.Authorized(tmp_path)
    assert authorized.name(public) == "bob"
    keys.revoke(tmp_path, "bob")
    assert authorized.name(public) == "bob", "control: without a refresh the old listing stands"
    authorized.refresh()
    assert authorized.name(public) is None


def test_the_last_key_can_be_revoked(tmp_path: Path) -> None:
    """An empty folder lets nobody in, rather than whoever was in before."""
    keys.init(tmp_path)
    authorized = keys.Authorized(tmp_path)
    keys.revoke(tmp_path, keys.FIRST_NAME)
    authorized.refresh()
    assert authorized.name(keys.load_client(tmp_path).public) is None


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "x" * 65])
def test_names_that_are_paths_are_refused(tmp_path: Path, name: str) -> None:
    """A name becomes a file name: it must not reach outside the folder."""
    keys.init(tmp_path)
    with pytest.raises(UsageError):
        keys.add(tmp_path, name)


def test_revoking_a_stranger_says_who_is_there(tmp_path: Path) -> None:
    """A typing mistake: the error lists the names."""
    keys.init(tmp_path)
    with pytest.raises(RefusedError, match="admin"):
        keys.revoke(tmp_path, "bbo")


def test_adding_a_name_twice_is_refused(tmp_path: Path) -> None:
    """The first holder of a name keeps the key."""
    keys.init(tmp_path)
    keys.add(tmp_path, "bob")
    with pytest.raises(RefusedError, match="bob"):
        keys.add(tmp_path, "bob")


def test_a_folder_without_keys_says_how_to_make_them(tmp_path: Path) -> None:
    """The most common first mistake."""
    with pytest.raises(RefusedError, match="haulier keys init"):
        keys.load_client(tmp_path / "nothing")


def test_keys_in_place_of_a_file_are_refused(tmp_path: Path) -> None:
    """`haulier keys init README.md`."""
    target = tmp_path / "file"
    target.write_text("x")
    with pytest.raises(RefusedError, match="is a file"):
        keys.init(target)


def test_a_keys_weight_comes_and_goes_with_it(tmp_path: Path) -> None:
    """keys add night --weight 0.25, read by the running broker; one edited by hand has its bounds."""
    keys.init(tmp_path)
    known = keys.Authorized(tmp_path)
    shares = known.weights
    keys.add(tmp_path, "night", 0.25)
    keys.add(tmp_path, "day")
    assert known.refresh()
    assert shares == {"night": 0.25}
    (tmp_path / "authorized" / "day.weight").write_text("1e9")
    known.refresh()
    assert shares == {"night": 0.25, "day": keys.WEIGHT_MAX}
    keys.revoke(tmp_path, "night")
    known.refresh()
    assert shares == {"day": keys.WEIGHT_MAX}
    with pytest.raises(UsageError, match="--weight"):
        keys.add(tmp_path, "zero", 0.0)


def test_a_secret_that_others_can_read_is_told(tmp_path: Path) -> None:
    """A key folder copied with cp, or handed on by mail: 0644 in a folder that others reach."""
    folder = tmp_path / "keys"
    keys.init(folder)
    folder.chmod(0o755)
    assert keys.exposed(folder) == ""
    (folder / "client.key_secret").chmod(0o644)
    assert str(folder / "client.key_secret") in keys.exposed(folder)
    assert "server.key_secret" not in keys.exposed(folder)
    assert "chmod go=" in keys.exposed(folder)
    folder.chmod(0o700)
    assert keys.exposed(folder) == ""
    assert keys.exposed(tmp_path / "none") == ""


def test_who_revokes_is_told_which_folder_is_worth_nothing(tmp_path: Path) -> None:
    """In life: a key leaked: its folder goes, and a new one of the same name can be made. A folder that somebody put
    back is not taken for a live key."""
    keys.init(tmp_path)
    bundle = keys.add(tmp_path, "bob")
    assert keys.revoke(tmp_path, "bob") == bundle
    assert not bundle.exists()
    bundle.mkdir()
    with pytest.raises(RefusedError, match="delete that folder"):
        keys.add(tmp_path, "bob")
    bundle.rmdir()
    assert keys.add(tmp_path, "bob") == bundle
    assert keys.revoke(tmp_path, keys.FIRST_NAME) == tmp_path / "client.key_secret"
    assert keys.load_server(tmp_path), "control: the broker's own keys stay"
