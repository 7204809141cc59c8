"""Lines to requests and results to bodies, on a thread of its own."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import RefusedError
from common.messages import LineRef
from worker import model_store, responses, tokenizer
from worker.echo_engine import EchoCodec
from worker.request_rules import RequestError, Serving
from worker.structured import Structure
from worker.structures import (
    Choice,
    Finished,
    Outcome,
    Prepared,
    Request,
    Sampling,
    Shape,
    TokenizeJob,
    TokenLogprob,
)
from worker.tokenizer import Preparer


class Clock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_700_000_000.0


class Codec(EchoCodec):
    """Counts calls; its template refuses one word."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        if messages[-1]["content"] == "refuse":
            raise RequestError("chat_template_error", "roles must alternate", "messages")
        return super().chat_text(messages, tools)

    def encode(self, texts: Sequence[str], special: bool) -> list[Sequence[int]]:
        self.calls.append((len(texts), special))
        return super().encode(texts, special)


def job(index: int, url: str = "/v1/chat/completions", **body: Any) -> TokenizeJob:
    fields = {"model": "m", **body}
    return TokenizeJob(LineRef("job", index, 1), url, json.dumps(fields).encode())


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def codec() -> Codec:
    return Codec()


@pytest.fixture
def preparer(codec: Codec) -> Preparer:
    return Preparer(codec, Serving("m", 50, 256, ()), "fp_x", Clock())


def test_a_batch_is_encoded_in_one_call_and_comes_back_in_order(preparer: Preparer, codec: Codec) -> None:
    """The interpreter lock is given away once for all of them; bad ones fail alone among good ones."""
    jobs = [
        job(0, messages=say("hello")),
        job(1, messages=say("refuse")),
        job(2, "/v1/completions", prompt="abc"),
        job(3, "/v1/completions", prompt=[1, 2]),
        job(4, messages=say("x" * 60)),
        job(5, messages=say("bye"), best_of=3),
        job(6, messages=say("bye")),
    ]
    found = preparer.prepare(jobs)
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["Prepared", "Outcome", "Prepared", "Prepared", "Outcome", "Outcome", "Prepared"]
    assert codec.calls == [(1, True), (3, False)]
    first, third = found[0], found[3]
    assert isinstance(first, Prepared)
    assert isinstance(third, Prepared)
    assert first.token_ids.tolist() == list(b"hello")
    assert first.request.prompt_tokens == 5
    assert third.token_ids.tolist() == [1, 2]
    too_long = found[4]
    assert isinstance(too_long, Outcome)
    assert json.loads(too_long.body)["error"]["code"] == "context_length_exceeded"
    assert too_long.prompt_tokens == 60


class Panic(BaseException):
    """What a tokenizer's native code raises when it panics: not even an Exception."""


def test_a_line_that_breaks_the_tokenizer_fails_alone(
    preparer: Preparer, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt in a million meets a bug of the tokenizer: it is answered 500, and its neighbours run."""
    whole = codec.encode

    def encode(texts: Sequence[str], special: bool) -> list[Sequence[int]]:
        if "poison" in texts:
            raise Panic("index out of bounds")
        return whole(texts, special)

    monkeypatch.setattr(codec, "encode", encode)
    with pytest.raises(Panic):
        preparer._prepare([job(0, messages=say("poison"))])  # control: it is no refusal, it would end the thread
    found = preparer.prepare(
        [job(0, messages=say("hello")), job(1, messages=say("poison")), job(2, messages=say("bye"))]
    )
    assert [type(one).__name__ for one in found] == ["Prepared", "Outcome", "Prepared"]
    poisoned = found[1]
    assert isinstance(poisoned, Outcome)
    assert (poisoned.status_code, json.loads(poisoned.body)["error"]["code"]) == (500, "tokenizer_error")


def test_an_answer_that_breaks_the_tokenizer_fails_alone(
    preparer: Preparer, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on the way back."""
    whole = codec.decode

    def decode(answers: Sequence[Sequence[int]]) -> list[str]:
        if any(7 in one for one in answers):
            raise Panic("no such token")
        return whole(answers)

    monkeypatch.setattr(codec, "decode", decode)
    requests = [Request(LineRef("job", index, 1), "/v1/completions", "m", 5, Sampling(9)) for index in range(3)]
    ids = (tuple(b"hi"), (7,), tuple(b"ho"))
    outcomes = preparer.answer([Finished(one, got, "stop") for one, got in zip(requests, ids, strict=True)])
    assert [one.status for one in outcomes] == ["ok", "failed", "ok"]


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", "ok"), ("length", "ok"), ("cancelled", "cancelled"), ("failed", "failed")]
)
def test_every_end_of_a_request_becomes_a_result(preparer: Preparer, reason: str, status: str) -> None:
    """Whatever the engine says, the line is answered."""
    request = Request(LineRef("job", 0, 1), "/v1/chat/completions", "m", 5, Sampling(9))
    outcome = preparer.answer([Finished(request, tuple(b"hi"), reason, "why", notes="0.50 s: ended")])[0]
    assert (outcome.ref, outcome.status, outcome.prompt_tokens) == (request.ref, status, 5)
    assert outcome.notes == responses.result_of(outcome).notes == "0.50 s: ended"


def test_all_choices_of_a_request_are_told(preparer: Preparer) -> None:
    """Each with its own text, reason and log probabilities; the usage counts the prompt once."""
    shape = Shape(logprobs=1)
    request = Request(LineRef("job", 0, 1), "/v1/completions", "m", 5, Sampling(9, choices=2, shape=shape))
    told = (TokenLogprob(-0.5, ((ord("h"), -0.5),)), TokenLogprob(-1.0, ((0xC3, -0.25),)))
    finished = Finished(request, b"hi", "stop", logprobs=told, others=(Choice(b"ho", "length", None, told),))
    outcome = preparer.answer([finished])[0]
    body = json.loads(outcome.body)
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "hi", "stop"),
        (1, "ho", "length"),
    ]
    assert body["choices"][1]["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["h", "o"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"h": -0.5}, {"bytes:\\xc3": -0.25, "o": -1.0}],
    }
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 4)


def test_lines_wait_for_the_model_and_are_then_prepared_in_order(preparer: Preparer) -> None:
    """A broker's batch that crosses the end of loading."""
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: list[Any] = []
    thread = threading.Thread(target=tokenizer.serve, args=(work, results.extend))
    thread.start()
    for index in range(150):
        work.put([job(index, messages=say("a"))])
    work.put(preparer)
    for index in range(150, 300):
        work.put([job(index, messages=say("a"))])
    while len(results) < 300:
        threading.Event().wait(0.01)
    work.put(tokenizer.Stop())
    thread.join(10)
    assert not thread.is_alive()
    assert [one.request.ref.index for one in results] == list(range(300))


@pytest.fixture(scope="module")
def hub() -> tokenizer.HubCodec:
    """The default model's tokenizer, where it was fetched."""
    model = model_store.KNOWN["smollm2-135m"]
    if not model_store.is_cached(model):
        pytest.skip("the default model is not in the cache: haulier model pull smollm2-135m")
    return tokenizer.HubCodec(model_store.folder_of(model))


@pytest.mark.model
def test_a_real_tokenizer_says_what_transformers_says(hub: tokenizer.HubCodec) -> None:
    """Prompt ids and answer text are those of apply_chat_template and decode, for chat and completion alike."""
    theirs = hub._tokenizer
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est la gare? 駅はどこ?"}]
    text = hub.chat_text(messages)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    assert list(hub.encode([text], special=False)[0]) == list(ids)
    assert list(hub.encode(["plain text"], special=True)[0]) == theirs("plain text")["input_ids"]
    assert hub.decode([ids]) == [theirs.decode(ids, skip_special_tokens=True)]
    assert 0 < hub.vocabulary < 1_000_000


@pytest.mark.model
def test_the_bytes_of_single_tokens_join_to_the_text(hub: tokenizer.HubCodec) -> None:
    """Log probabilities tell of tokens by themselves: their bytes, joined, are the text's, half characters included."""
    text = "Où est la gare?\n  駅はどこ? \U0001f600 <|im_end|>\x00"
    ids = list(hub.encode([text], special=False)[0])
    pieces = hub.pieces({*ids, 10**6})
    assert b"".join(pieces[one] for one in ids) == text.encode()
    assert pieces[10**6] == b""


@pytest.mark.model
def test_a_template_that_fails_fails_its_line(hub: tokenizer.HubCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose template insists on an order of roles: the line says what the template said."""
    monkeypatch.setattr(hub._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        hub.chat_text(say("hi"))
    assert caught.value.status_code == 400
    monkeypatch.setattr(hub._tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        hub.chat_text(say("hi"))


@pytest.mark.model
def test_tools_are_written_by_the_template_or_refused(hub: tokenizer.HubCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model's template takes none: the line must not be answered as if there were none."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(RequestError, match="takes no tools") as caught:
        hub.chat_text(say("hi"), [tool])
    assert caught.value.param == "tools"
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[-1].content }}"
    monkeypatch.setattr(hub._tokenizer, "chat_template", template)
    assert hub.chat_text(say("hi"), [tool]) == json.dumps(tool) + "hi"
    assert hub.chat_text(say("hi")) == "hi"


@pytest.mark.model
def test_a_tokenizer_that_guides_nothing_serves_all_else(
    hub: tokenizer.HubCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library does not know this kind of tokenizer: structured lines are refused with its reason, others run.
    Control: with the tokenizer itself there is a guide."""
    wanted = Structure("guided_regex", "a|b", regex=True)
    assert hub.guide(wanted, (2,)).words == -(-hub.vocabulary // 32)
    monkeypatch.setattr(hub, "_guides", None)

    class Unknown:
        def to_str(self) -> str:
            return '{"model": {"type": "Unheard"}}'

    monkeypatch.setattr(hub, "_backend", Unknown())
    hub.make_guides((2,))
    with pytest.raises(RequestError, match="can hold no answer to a form") as caught:
        hub.guide(wanted, (2,))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "guided_regex")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    """--model names weights only."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RefusedError, match="tokenizer"):
        tokenizer.HubCodec(tmp_path)
