"""What may be asked for over HTTP, and the field that is named when it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.http import wanted
from broker.http.faults import ApiFault

FIELDS = {"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions", "completion_window": "24h"}


def asked(**changes: Any) -> wanted.Wanted:
    return wanted.batch(json.dumps({**FIELDS, **changes}).encode())


def test_a_batch() -> None:
    found = asked(metadata={"a": "b"}, output_expires_after=None)
    assert (found.window_s, found.metadata, found.endpoint) == (86400, {"a": "b"}, "/v1/completions")
    assert asked().metadata is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": "file-../../x"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"completion_window": "0"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"output_expires_after": {}}, "output_expires_after"),
    ],
)
def test_what_may_not_be_asked_for(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiFault) as caught:
        asked(**changes)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiFault) as caught:
        wanted.batch(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_lists() -> None:
    name = "batch_" + "0" * 32
    page = wanted.listed({"after": name, "limit": "100", "order": "asc"}, "batch_", wanted.BATCHES_LIMITS)
    assert (page.after, page.limit, page.newest_first) == (name, 100, False)
    assert wanted.listed({}, "batch_", wanted.BATCHES_LIMITS).limit == 20
    for query in ({"limit": "101"}, {"limit": "0"}, {"limit": "-1"}, {"limit": "²"}, {"order": "up"}, {"after": "x"}):
        with pytest.raises(ApiFault):
            wanted.listed(query, "batch_", wanted.BATCHES_LIMITS)
