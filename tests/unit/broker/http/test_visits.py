"""Who looks with a browser: a token for a key, as long as that key lets somebody in, and for the page alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.http.bearer import Bearer
from broker.http.faults import ApiFault
from broker.http.visits import COOKIE, Visits, cookie, token_in
from common import limits


class Clock:
    """One that the test moves."""

    mono = 100.0

    def monotonic(self) -> float:
        return self.mono

    def wall(self) -> float:
        return self.mono


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("k1 alice\nk2 bob\n")
    return path


def test_a_key_gives_a_token_and_a_wrong_one_none(keys: Path, clock: Clock) -> None:
    """Each visit has its own; nothing of the key is in it. Control: a guess opens nothing."""
    visits = Visits(Bearer(keys), clock)
    tokens = {visits.begin("k1"), visits.begin(" k1 ")}
    assert len(tokens) == 2
    assert not any("k1" in token for token in tokens)
    assert {visits.tenant(f"a=b; {COOKIE}={token}; c=d") for token in tokens} == {"alice"}
    for header in ("", "nonsense", f"{COOKIE}=", f"{COOKIE}=guess", f"other={next(iter(tokens))}", "\x00;=;;"):
        assert visits.tenant(header) == ""
    for wrong in ("", "k3", "alice", "k1 alice"):
        with pytest.raises(ApiFault) as refused:
            visits.begin(wrong)
        assert refused.value.status == 401


def test_it_ends_with_logging_out_with_its_time_and_with_its_key(keys: Path, clock: Clock) -> None:
    """Another visitor's stays."""
    visits = Visits(Bearer(keys), clock)
    first, second, other = (f"{COOKIE}={visits.begin(key)}" for key in ("k1", "k1", "k2"))
    visits.end(first)
    assert [visits.tenant(one) for one in (first, second, other)] == ["", "alice", "bob"]
    keys.write_text("k2 bob\n")
    os.utime(keys, ns=(1, 1))
    assert [visits.tenant(one) for one in (second, other)] == ["", "bob"]
    keys.write_text("k1 alice\nk2 bob\n")
    assert visits.tenant(second) == ""  # a key that comes back does not bring visits back
    clock.mono += limits.HTTP_VISIT_S
    assert visits.tenant(other) == ""


def test_their_number_is_bounded(keys: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go."""
    monkeypatch.setattr(limits, "HTTP_VISITS_MAX_COUNT", 2)
    visits = Visits(Bearer(keys), clock)
    begun = [f"{COOKIE}={visits.begin('k1')}" for _ in range(3)]
    assert [visits.tenant(one) for one in begun] == ["", "alice", "alice"]


def test_the_cookie_is_for_the_page_alone() -> None:
    """No script reads it, no other site sends it, /v1 never gets it."""
    assert cookie("t", False) == f"{COOKIE}=t; Path=/fleet; HttpOnly; SameSite=Strict; Max-Age=43200"
    assert cookie("t", True).endswith("; Secure")
    assert "Max-Age=0" in cookie("", False)
    assert token_in(cookie("t", True).split(";")[0]) == "t"
