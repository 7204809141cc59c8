"""Bearer keys: who is let in, what is kept of a key, and a file that changes while the server runs."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

from broker.http import bearer
from broker.http.bearer import Bearer, exposed
from broker.http.faults import ApiFault
from common.errors import RefusedError

SECRET = "sk-secret-of-alice"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who\n\n{SECRET} alice\nsk-2 alice\n  sk-3   bob\n")
    return path


def test_a_key_is_its_tenants(keys: Path) -> None:
    """Control beside each refusal: the right key, in either case of the scheme."""
    found = Bearer(keys)
    assert found.tenants == ("alice", "bob")
    assert [found.tenant(text) for text in (f"Bearer {SECRET}", "bearer sk-2", "Bearer sk-3")] == [
        "alice",
        "alice",
        "bob",
    ]
    for text in (
        "",
        "Bearer",
        "Bearer ",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET} x",
        "Bearer #",
    ):
        with pytest.raises(ApiFault) as caught:
            found.tenant(text)
        assert caught.value.status == 401
        assert SECRET not in str(caught.value)


def test_every_key_is_compared_whichever_fits(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In constant time: as many comparisons for the first key as for the last and for none."""
    found, calls = Bearer(keys), []
    monkeypatch.setattr(
        bearer.hmac,
        "compare_digest",
        lambda one, two: calls.append(1) or one == two,  # type: ignore[func-returns-value]
    )
    counts = []
    for key in (SECRET, "sk-3", "none"):
        calls.clear()
        with contextlib.suppress(ApiFault):
            found.tenant(f"Bearer {key}")
        counts.append(len(calls))
    assert counts == [3, 3, 3]


def test_no_key_stays_in_memory(keys: Path) -> None:
    """Only digests: no text in what the object reaches holds one. Control: the tenants' names are found so."""
    found = Bearer(keys)
    reached = [one for holder in gc.get_referents(found._known) for one in gc.get_referents(holder)]
    assert any(one == "alice" for one in reached)
    assert not any(SECRET in str(one) for one in [*reached, vars(found)])


def test_keys_come_and_go(keys: Path) -> None:
    """A file that cannot be read any more leaves in force what was there."""
    found = Bearer(keys)
    keys.write_text("sk-new alice\n")
    assert found.tenant("Bearer sk-new") == "alice"
    with pytest.raises(ApiFault):
        found.tenant(f"Bearer {SECRET}")
    keys.write_text("one two three\n")
    assert found.tenant("Bearer sk-new") == "alice"
    keys.unlink()
    assert found.tenant("Bearer sk-new") == "alice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        (SECRET, "line 1"),
        (f"{SECRET} alice x", "line 1"),
        (f"{SECRET} ../alice", "tenant"),
        (f"{SECRET} admin2", "admin"),
        (f"{SECRET} alice\n{SECRET} bob", "line 2"),
        (f"{SECRET}\u043a alice", "other than ASCII"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_keys(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(RefusedError, match=words) as caught:
        Bearer(path)
    assert SECRET not in str(caught.value)


def test_a_file_that_others_can_read_is_told(keys: Path) -> None:
    """Control: one of its owner's alone."""
    os.chmod(keys, 0o644)
    assert "chmod" in exposed(keys)
    os.chmod(keys, 0o600)
    assert exposed(keys) == ""


def test_a_tenant_whose_broker_key_is_revoked_is_out(keys: Path, tmp_path: Path) -> None:
    """The file still names her. Control: before it, and the other tenant after it."""
    authorized = tmp_path / "authorized"
    authorized.mkdir()
    for name in ("alice", "bob"):
        (authorized / f"{name}.key").touch()
    found = Bearer(keys, tmp_path)
    assert found.tenant("Bearer sk-2") == "alice"
    (authorized / "alice.key").unlink()
    with pytest.raises(ApiFault) as caught:
        found.tenant("Bearer sk-2")
    assert caught.value.status == 403
    assert found.tenant("Bearer sk-3") == "bob"
