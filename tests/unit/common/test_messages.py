"""What crosses the boundaries is written down once: frozen, named once, bounded, in one list."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from common import codec, limits, messages

EVERY = (*messages.FLEET, *messages.CLIENT)
DECLARED = [cls for _, cls in inspect.getmembers(messages, inspect.isclass) if cls.__module__ == messages.__name__]


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.__name__)
def test_values_cannot_change_on_their_way(cls: type) -> None:
    """A message that a rule has judged is the one that is sent."""
    if issubclass(cls, tuple):  # what travels once for each line
        assert hasattr(cls, "_fields")
        return
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert hasattr(cls, "__slots__")


def test_every_declared_class_travels_and_none_is_listed_twice() -> None:
    """A message that somebody forgot to list would be refused by the other side, in production."""
    assert len(set(EVERY)) == len(EVERY)
    assert set(DECLARED) == set(codec._NAMES)


def test_each_client_request_and_answer_carries_its_number_first() -> None:
    """A client tells an answer to its last request from a late one by this number alone."""
    for cls in messages.CLIENT:
        assert dataclasses.fields(cls)[0].name == "request", cls


def test_what_a_worker_says_after_its_login_is_fenced() -> None:
    """S4: without the fence, a stale session's word would count."""
    unfenced = {messages.Hello, messages.Refused, messages.Unknown}
    for cls in messages.FLEET:
        assert (dataclasses.fields(cls)[0].name == "fence") is (cls not in unfenced), cls


def test_a_hello_keeps_its_first_places() -> None:
    """A broker of another version must be able to read who knocks before it refuses."""
    assert [f.name for f in dataclasses.fields(messages.Hello)][:4] == ["schema", "worker", "incarnation", "login"]


def test_a_part_of_anything_fits_into_a_message() -> None:
    """The largest piece each side may send is taken by the other."""
    full = b"\xff" * limits.PART_MAX_BYTES
    for message in (messages.Chunk(1, "j", 0, full), messages.Lines(1, "j", (full,), 9, False, True)):
        assert codec.decode(codec.encode(message)) == message


def test_a_line_is_known_by_job_and_index() -> None:
    """A DONE is judged by line and attempt; the line is the same one in every attempt."""
    assert messages.LineRef("j", 3, 1).line == messages.LineRef("j", 3, 2).line
    assert str(messages.LineRef("j", 3, 1).line) == "j#3"
