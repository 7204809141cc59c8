"""The page for people in a real browser: logging in, looking, what strangers named, wide and narrow screens.

Pictures go to ``TEST_ARTIFACTS``, or to the test's own folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.browser_kit import Browser, installed
from tests.integration.fleet_kit import Fleet, chat
from tests.integration.http_kit import KEYS, Web, create, jsonl, upload

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium here: apt-get install chromium")
EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'<b>.jsonl"
SCREENS = {"wide": (1280, 900), "narrow": (390, 844)}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    folder = tmp_path / "browser"
    folder.mkdir()
    made = Browser(folder)
    yield made
    made.close()


def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("TEST_ARTIFACTS", tmp_path / "pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def log_in(browser: Browser, web: Web, key: str) -> None:
    browser.open(f"http://{web.address}/fleet")
    browser.until("location.pathname === '/fleet/login'", "the form")
    browser.value(f"document.getElementById('key').value = {key!r}; document.querySelector('form').submit()")


def test_people_log_in_and_see_their_jobs_alone(fleet: Fleet, browser: Browser, tmp_path: Path) -> None:
    """A wrong key, then alice's: her jobs, the workers, why lines wait; it follows by itself; names stay names. Then
    bob. Control of the names: put into the page unescaped, the same text runs where no policy forbids it.
    """
    web = Web(fleet)
    web.broker()
    fleet.worker(delay_ms=300)
    alice = web.client()
    running = create(alice, upload(alice, jsonl(2_000), "contracts-2026.jsonl"))
    create(alice, upload(alice, jsonl([chat(0, model="nobody-serves-this")]), EVIL))
    fleet.until(lambda: alice.batches.retrieve(running.id).status == "in_progress", "the job runs")
    fleet.until_run(20)
    log_in(browser, web, "sk-nobody")
    browser.until("document.querySelector('.problem')", "the refusal")
    assert "lets nobody in" in browser.text()
    folder = pictures(tmp_path)
    browser.picture(folder / "login.png")
    log_in(browser, web, KEYS["alice"])
    browser.until("document.querySelector('progress')", "the fleet")
    text = browser.text()
    for words in ("contracts-2026.jsonl", EVIL, "all workers are busy", "nobody-serves-this", "Log out alice", "epoch"):
        assert words in text
    assert browser.value("document.title") == "haulier"
    assert browser.value("document.scripts.length + document.images.length") == 0
    for name, (width, height) in SCREENS.items():
        browser.resize(width, height)
        assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} scrolls sideways"
        browser.picture(folder / f"{name}.png")
    done = "Math.max(...[...document.querySelectorAll('progress')].map(one => one.value))"
    browser.until(f"{done} > {browser.value(done)}", "the page follows by itself")
    assert [one for one in browser.said if "Policy" in one or "Refused" in one] == []  # nothing of ours is forbidden
    browser.value("document.querySelector('header form').submit()")
    browser.until("location.pathname === '/fleet/login'", "logged out")
    log_in(browser, web, KEYS["bob"])
    browser.until("document.querySelector('header form')", "bob's page")
    assert "No job." in browser.text()
    assert "contracts-2026" not in browser.text()
    browser.open(f"data:text/html,<body>{EVIL.replace('#', '')}</body>")
    browser.until("document.title === 'owned'", "the control runs")
    web.close()


def test_without_keys_loopback_looks_at_once(fleet: Fleet, browser: Browser) -> None:
    """And nobody is asked to log in."""
    web = Web(fleet, keys=False)
    web.broker()
    browser.open(f"http://{web.address}/")
    assert browser.value("location.pathname") == "/fleet"
    assert "No worker is logged in." in browser.text()
    assert "Log out" not in browser.text()
    web.close()
