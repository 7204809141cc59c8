"""An upload's form, piece by piece: however it is cut the file is the same, and half a form is no form."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.http.faults import ApiFault
from broker.http.form import Form
from common import limits

KIND = "multipart/form-data; boundary=b"
DATA = b'{"a": 1}\r\n--c\r\n\r\n-b\r\n--\r\n{"b": 2}\n'
"""With what looks like a boundary and is none."""


def body(data: bytes = DATA, purpose: bytes = b"batch", more: bytes = b"", name: bytes = b"a.jsonl") -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose + b"\r\n" + more
        + b'--b\r\nContent-Disposition: form-data; name="file"; filename="' + name + b'"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--b--\r\n"
    )  # fmt: skip


def taken(pieces: list[bytes], most: int = 1000) -> tuple[str, bytes]:
    form = Form(KIND, most)
    found = b"".join(form.feed(piece) for piece in pieces)
    form.end()
    assert form.size == len(found)
    return form.filename, found


def refused(data: bytes, most: int = 1000) -> tuple[int, str, str | None]:
    with pytest.raises(ApiFault) as caught:
        taken([data], most)
    return caught.value.status, caught.value.code, caught.value.param


@given(st.lists(st.integers(0, len(body())), max_size=8))
def test_however_it_is_cut_the_file_is_the_same(cuts: list[int]) -> None:
    """TCP cuts where it likes."""
    places = [0, *sorted(cuts), len(body())]
    pieces = [body()[start:end] for start, end in itertools.pairwise(places)]
    assert taken(pieces) == ("a.jsonl", DATA)


def test_half_a_form_is_no_form() -> None:
    """Cut anywhere before its last boundary is complete. Control: the whole one is taken."""
    whole = body()
    for end in range(len(whole) - len(b"--\r\n")):
        assert refused(whole[:end])[0] == 400, end
    assert taken([whole]) == ("a.jsonl", DATA)


def test_the_largest_file_and_one_byte_more() -> None:
    """Control: just the maximum."""
    assert taken([body(b"x" * 1000)])[1] == b"x" * 1000
    assert refused(body(b"x" * 1001)) == (413, "file_too_large", "file")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (body(purpose=b"fine-tune"), (400, "invalid_value", "purpose")),
        (body(b""), (400, "empty_file", "file")),
        (
            body(more=b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nx\r\n'),
            (400, "invalid_value", "purpose"),
        ),
        (
            body(more=b'--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'),
            (400, "unsupported_parameter", "expires_after[seconds]"),
        ),
        (body(purpose=b"x" * (limits.HTTP_FORM_MAX_BYTES + 1)), (400, "invalid_value", "file")),
        (b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
         (400, "missing_required_parameter", "file")),
        (b"not a form", (400, "invalid_multipart", "file")),
    ],
    ids=["purpose", "empty", "twice", "unknown field", "long field", "no file", "no form"],
)  # fmt: skip
def test_what_is_not_taken(data: bytes, expected: tuple[int, str, str | None]) -> None:
    """Each with the field to change."""
    assert refused(data) == expected


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data"])
def test_what_is_no_form_at_all(kind: str) -> None:
    with pytest.raises(ApiFault):
        Form(kind, 10)


def test_a_name_is_a_name_and_no_path() -> None:
    """It is shown, and never where something is kept."""
    assert taken([body(name=b"../../etc/passwd")])[0] == "passwd"
    assert len(taken([body(name=b"x" * 1000)])[0]) == limits.HTTP_FILE_NAME_MAX_CHARS


@given(st.data())
def test_any_body_is_a_form_or_the_clients_fault(data: st.DataObject) -> None:
    """Bytes put in, taken out, changed and doubled anywhere: a whole form, or 400 or 413, and nothing else."""
    mutated = bytearray(body())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(mutated)))
        match data.draw(st.integers(0, 3)):
            case 0:
                mutated[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case 1:
                del mutated[at : at + data.draw(st.integers(1, 40))]
            case 2:
                mutated[at:at] = mutated[: data.draw(st.integers(0, 200))]
            case _:
                mutated[at : at + 1] = data.draw(
                    st.sampled_from([b"\r", b"\n", b'"', b";", b"=", b"\x00", b"\xff", b"--b"])
                )
    assert status_of(KIND, bytes(mutated)) in (200, 400, 413)


@given(st.text(st.characters(max_codepoint=255), max_size=60) | st.sampled_from(
    ["multipart/form-data", "multipart/form-data; boundary=", 'multipart/form-data; boundary="',
     "multipart/form-data; boundary=\x00",
     "multipart/form-data; boundary=" + "b" * 500, "text/plain; boundary=b", "multipart/form-data; boundary*=utf-8''b"],
))  # fmt: skip
def test_any_content_type_is_a_form_or_the_clients_fault(kind: str) -> None:
    """Whatever a header holds: Latin-1, as HTTP has it."""
    assert status_of(kind, body()) in (200, 400, 413)


def status_of(kind: str, data: bytes) -> int:
    """What an upload is answered with; any other failure than the client's is one of the test."""
    try:
        form = Form(kind, 1000)
        form.feed(data)
        form.end()
    except ApiFault as fault:
        return fault.status
    return 200
