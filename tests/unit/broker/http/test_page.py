"""The page for people: what strangers named stays text, nothing comes from elsewhere, figures are the broker's own."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import re
from html.parser import HTMLParser

import pytest

from broker import top
from broker.http import page
from tests.unit.broker.test_top import JOB, SEEN, WORKER

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J</span></table>"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "span", "form", "button", "table", "thead",
    "tbody", "tr", "th", "td", "progress", "p", "label", "input",
}  # fmt: skip


class Parsed(HTMLParser):
    """What a browser would make of it: tags, attributes, text; every tag closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


@pytest.mark.parametrize("text", [
    page.fleet(
        top.Seen(
            (dataclasses.replace(JOB, name=EVIL, reason=EVIL, status=EVIL),),
            (dataclasses.replace(WORKER, worker=EVIL, phase=EVIL, waits=EVIL,
                                 models=(dataclasses.replace(WORKER.models[0], name=EVIL),)),),
        ), EVIL, EVIL,
    ),
    page.login(EVIL),
    page.problem(EVIL),
])  # fmt: skip
def test_what_others_named_is_text(text: str) -> None:
    """Names, reasons, models, workers, tenants. Control: unescaped, the same name would be a tag."""
    parsed = Parsed(text)
    assert set(parsed.tags) <= TAGS
    assert parsed.open == []
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in parsed.attributes)
    assert any("<script>alert(1)</script>" in said for said in parsed.text)
    assert "\x1b" not in text


def test_unescaped_it_would_not_be() -> None:
    """Control of the above: the same page with its escapes undone has a script and an image in it."""
    text = html.unescape(page.problem(EVIL))
    tags: list[str] = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    reader.feed(text)
    assert {"script", "img"} <= set(tags)


def test_it_shows_what_top_shows() -> None:
    """Progress, rate, time left, ring, pages, headroom, link, and why lines wait."""
    text = page.fleet(SEEN, "alice", "now")
    said = " ".join(Parsed(text).text)
    for words in (
        JOB.job, "contracts.jsonl", "1,000 of 4,000", "2.5/s", "20:00", "gpu-1-0", "llama", "epoch 7", "8 of 8",
        "1.0 MiB of 64.0 MiB", "120 of 128", "2.0 GiB of 4.0 GiB", "43.00 GB/s (86%)", "all workers are busy",
        "segments", "Log out alice",
    ):  # fmt: skip
        assert words in said
    assert 'http-equiv="refresh"' in text
    assert "Log out" not in page.fleet(SEEN, "", "now")
    bare = " ".join(Parsed(page.fleet(top.Seen((), ()), "", "now")).text)
    assert "No job." in bare
    assert "No worker is logged in." in bare
    assert "None waits." in bare


def test_the_policy_lets_its_own_style_in_and_nothing_else() -> None:
    """The hash is that of what is sent. Control: another style has another."""
    (style,) = re.findall(r"<style>(.*?)</style>", page.login(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page.POLICY
    assert base64.b64encode(hashlib.sha256(style.encode() + b" ").digest()).decode() not in page.POLICY
    assert page.POLICY.startswith("default-src 'none'; ")
    assert "script" not in page.POLICY
    assert "http:" not in style + page.fleet(SEEN, "", "now")
    assert "https:" not in style + page.fleet(SEEN, "", "now")
