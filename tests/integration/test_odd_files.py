"""``haulier run`` over a file of everything that editors and programs do to text: each line its own answer or error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.openai_lines import BOM
from tests.integration.test_run_echo import Place

LONG = 10_000_000


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def line(custom_id: str, prompt: Any, **body: Any) -> bytes:
    fields = {"model": "echo", "prompt": prompt, "max_tokens": 20, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}).encode()


def said(body: dict[str, Any]) -> str:
    """What an answer of either address says."""
    if body["object"] == "list":
        return str([one["embedding"] for one in body["data"]])
    if body["object"] == "response":
        return str(body["output"][0]["content"][0]["text"])
    return str(body["choices"][-1]["text"])


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = [found]
    return found


GOOD: dict[str, tuple[bytes, str]] = {
    "plain": (line("plain", "hi"), "hi"),
    "blanks before": (b"  \t" + line("blanks before", "a"), "a"),
    "script": (line("script", "?").replace(b"?", "駅 \U0001f600".encode()), "駅 \U0001f600"),
    "pair": (line("pair", "\U0001f600"), "\U0001f600"),
    "nul\x00id": (line("nul\x00id", "a\x00b"), "a\x00b"),
    "breaks": (line("breaks", "a\u2028b\x85c\x0bd"), "a\u2028b\x85c\x0bd"),
    "last of three": (line("last of three", "hi", n=3), "hi"),
    "response": (line("response", "-").replace(b"completions", b"responses").replace(
        b'"prompt": "-", "max_tokens"', b'"input": "hi", "max_output_tokens"'), "hi"),
    "embedding": (line("embedding", "-").replace(b"completions", b"embeddings").replace(
        b'"prompt": "-", "max_tokens": 20', b'"input": ["hi", "you"]'), "[[2.0], [3.0]]"),
    "long": (line("long", "x" * LONG), "x" * 20),
    "nested": (line("nested", "deep", metadata=nested(200)), "deep"),
    "twice": (line("twice", "no").replace(b'"no"', b'"no", "prompt": "yes"'), "yes"),
}  # fmt: skip
BAD: dict[str, tuple[bytes, str]] = {
    "raw nul": (line("raw nul", "a").replace(b'"a"', b'"a\x00"'), "invalid_json_line"),
    "half": (line("half", "a").replace(b'"a"', b'"\\ud800"'), "invalid_unicode"),
    "deep": (line("deep", "a").replace(b'"a"', b"[" * 50_000 + b"]" * 50_000), "invalid_json_line"),
    "latin": (line("latin", "a").replace(b'"a"', b'"\xe9"'), "invalid_utf8"),
    "bom inside": (BOM + line("bom inside", "a"), "invalid_json_line"),
    "schema": (line("schema", "a", response_format={"type": "json_object"}), "unsupported_parameter"),
}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_every_line_of_an_odd_file_has_its_own_end(place: Place, end: bytes) -> None:
    """A byte order mark first, blank lines between, either line end, no end at the last line, ten million characters:
    good lines are answered with their own text, bad ones each with its code, and nothing else suffers."""
    lines = [data for data, _ in (*GOOD.values(), *BAD.values())]
    between = end + end + b"  " + end
    place.input.write_bytes(BOM + end + between.join(lines))
    code, out, err = place.finish("--lenient", "--context-tokens", str(LONG + 100))
    assert code == 1, (out, err)
    answers = [json.loads(one) for one in place.out.read_bytes().splitlines()]
    told = {one["custom_id"]: said(one["response"]["body"]) for one in answers}
    assert told == {name: text for name, (_, text) in GOOD.items()}
    errors = [json.loads(one) for one in place.err.read_bytes().splitlines()]
    codes = sorted((one["error"] or one["response"]["body"]["error"])["code"] for one in errors)
    assert codes == sorted(code for _, code in BAD.values())
    named = {one["custom_id"] for one in errors if one["custom_id"]}
    assert {"half", "schema"} <= named
