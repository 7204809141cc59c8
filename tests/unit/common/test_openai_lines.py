"""One line of a batch file: every problem by its code, and the body's place found to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import limits
from common.openai_lines import CODES, URLS, Bad, Entry, check, is_blank, too_long

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
INPUT = {"model": "m", "input": [{"role": "user", "content": "hi"}]}


def line(**changes: Any) -> dict[str, Any]:
    """A good chat line with fields replaced; None removes a field."""
    fields: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URLS[0], "body": dict(CHAT)}
    fields.update(changes)
    return {name: value for name, value in fields.items() if value is not None}


def body(**changes: Any) -> dict[str, Any]:
    fields = {**CHAT, **changes}
    return line(body={name: value for name, value in fields.items() if value is not None})


def raw(fields: object) -> bytes:
    return json.dumps(fields).encode()


WORDS = [
    (b'{"n": ' + b"9" * 5000 + b"}", "not JSON: a number has more than 4,300 digits"),
    (raw({"custom_id": "a", "method": "POST", "url": URLS[0], "body": {**CHAT, "model": 1}}),
     "body.model must be text, not int"),
    (raw({"custom_id": "a", "method": "POST", "url": URLS[0], "body": {**CHAT, "model": None}}),
     "body.model is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), WORDS)
def test_a_problem_says_what_is_there(data: bytes, words: str) -> None:
    """What is there and wrong is not called missing, and no advice is given to this program's programmer."""
    found = check(data)
    assert isinstance(found, Bad)
    assert found.message == words


BAD: list[tuple[str, bytes]] = [
    ("invalid_json_line", b"{"),
    ("invalid_json_line", b"[1, 2]"),
    ("invalid_json_line", b'"text"'),
    ("invalid_json_line", raw(line()) + b" {}"),
    ("invalid_json_line", b'{"custom_id": "a" "method": "POST"}'),
    ("invalid_json_line", b'{"custom_id": "a",}'),
    ("invalid_json_line", b'{"custom_id"'),
    ("invalid_json_line", b'{"custom_id": NaN}'),
    ("invalid_json_line", b'{"custom_id": ' + b"[" * 100_000),
    ("invalid_json_line", b'{"n": ' + b"9" * 5000 + b"}"),
    ("invalid_utf8", b'{"custom_id": "\xff"}'),
    ("missing_required", raw(line(custom_id=None))),
    ("missing_required", raw(line(custom_id=""))),
    ("missing_required", raw(line(method=None))),
    ("missing_required", raw(line(url=None))),
    ("missing_required", raw(line(body=None))),
    ("missing_required", raw(line(body="text"))),
    ("missing_required", raw(body(model=None))),
    ("missing_required", raw(body(model=""))),
    ("model_mismatch", raw(body(model=7))),
    ("model_mismatch", raw(body(model=["m"]))),
    ("model_mismatch", raw(body(model=False))),
    ("invalid_custom_id", raw(line(custom_id=7))),
    ("invalid_custom_id", raw(line(custom_id="x" * (limits.CUSTOM_ID_MAX_CHARS + 1)))),
    ("invalid_custom_id", b'{"custom_id": "\\ud800", "method": "POST"}'),
    ("invalid_method", raw(line(method="GET"))),
    ("url_mismatch", raw(line(url="/v1/moderations"))),
    ("url_mismatch", raw(line(url=["/v1/completions"]))),
    ("model_mismatch", raw(body(model="other"))),
    ("model_mismatch", raw(body(model="\ud800"))),
    ("stream_unsupported", raw(body(stream=True))),
    ("missing_messages", raw(body(messages=None))),
    ("missing_messages", raw(body(messages=[]))),
    ("missing_messages", raw(body(messages="hi"))),
    ("missing_prompt", raw(line(url=URLS[1]))),
    ("missing_prompt", raw(line(url=URLS[1], body={"model": "m", "prompt": ""}))),
    ("missing_input", raw(line(url=URLS[2]))),
    ("missing_input", raw(line(url=URLS[2], body={"model": "m", "input": []}))),
    ("invalid_max_tokens", raw(line(url=URLS[2], body={"model": "m", "input": "hi", "max_output_tokens": 0}))),
    ("invalid_max_tokens", raw(body(max_tokens=-1))),
    ("invalid_max_tokens", raw(body(max_tokens=True))),
    ("invalid_max_tokens", raw(body(max_completion_tokens=1.5))),
]


@pytest.mark.parametrize(("code", "data"), BAD)
def test_each_problem_has_its_code(code: str, data: bytes) -> None:
    """Somebody's file has one bad line: the code is stable, the words say what is wrong with it."""
    found = check(data, "m")
    assert isinstance(found, Bad), found
    assert found.code == code
    assert code in CODES
    assert found.message


def test_a_problem_keeps_the_custom_id_that_could_be_read() -> None:
    """With --lenient the bad line appears in the error file under its own custom_id."""
    found = check(raw(body(stream=True)))
    assert isinstance(found, Bad)
    assert found.custom_id == "a"


@pytest.mark.parametrize("end", [b"", b"\r", b"\n", b"  \t"])
@pytest.mark.parametrize(("url", "fields"), [(URLS[0], CHAT), (URLS[1], TEXT), (URLS[2], INPUT)])
def test_good_lines_of_both_kinds(end: bytes, url: str, fields: dict[str, Any]) -> None:
    """CRLF files and stray blanks are as good as any."""
    data = raw(line(url=url, body=fields)) + end
    found = check(data, "m")
    assert isinstance(found, Entry), found
    assert json.loads(data[found.start : found.end]) == fields
    assert (found.custom_id, found.url, found.model) == ("a", url, "m")


def test_any_model_is_good_when_the_job_names_none() -> None:
    """A file may mix models; each line waits for a worker that serves its own."""
    assert isinstance(check(raw(body(model="whatever"))), Entry)


def test_a_line_longer_than_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that would not fit in memory is refused by its length alone."""
    monkeypatch.setattr(limits, "LINE_MAX_BYTES", 20)
    found = check(raw(line()))
    assert isinstance(found, Bad)
    assert found.code == "line_too_long"
    assert too_long(99).code == "line_too_long"


def test_blank_lines() -> None:
    """The newline at the end of a file is no request."""
    assert is_blank(b"\r\n")
    assert is_blank(b"  ")
    assert not is_blank(b"{}")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(extra=st.dictionaries(st.text(), JSON, max_size=3), more=st.dictionaries(st.text(), JSON, max_size=3),
       ascii_only=st.booleans(), indent=st.sampled_from([None, (", ", ": "), (" ,\t", "  :")]))  # fmt: skip
def test_the_body_is_found_to_the_byte(
    extra: dict[str, Any], more: dict[str, Any], ascii_only: bool, indent: tuple[str, str] | None
) -> None:
    """Whatever stands around it, in whatever script: the slice is exactly the body's JSON."""
    reserved = {"model", "messages", "stream", "max_tokens", "max_completion_tokens"}
    wanted = {**{name: value for name, value in more.items() if name not in reserved}, **CHAT}
    fields = {**extra, **line(body=wanted)}
    text = json.dumps(fields, ensure_ascii=ascii_only, separators=indent)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return
    found = check(data)
    assert isinstance(found, Entry), found
    assert json.loads(data[found.start : found.end]) == wanted


@given(st.binary(max_size=60))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    """A file may hold anything at all: a line is good or bad, never an exception."""
    assert isinstance(check(data), Bad)
