"""rules: what a line's body asks for, or why it cannot be met: every parameter is obeyed, or refused by name.

Nothing is ignored: a parameter we do not support may be present only with the value that means "off". Refusals carry
the service's status, code and message. Knows no tokenizer; prompt lengths come back as an argument.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from common.messages import LineRef
from worker import embeddings, parameters, responses_api
from worker.conversations import CONVERSATION, read_messages, read_tools
from worker.embeddings import Inputs
from worker.parameters import INT64_MAX, RequestError, integer, number, same, text, unsupported
from worker.responses import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, RESPONSES_URL
from worker.structured import STRUCTURED, Structure, read_structure
from worker.structures import Sampling, Shape

__all__ = ["Asked", "RequestError", "Serving", "read", "read_embeddings", "sampling"]

COMPLETIONS_MAX_TOKENS_DEFAULT = 16
"""What /v1/completions generates when max_tokens is absent, as the service documents; a chat takes what is left."""
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"})
"""Parameters that say something about the request to a service's books and change no answer: allowed, unread."""
OBEYED = frozenset(
    {"model", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "n", "logprobs"}
    | {"logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | STRUCTURED
)
CHAT_ONLY = frozenset({"max_completion_tokens", "top_logprobs"}) | CONVERSATION
COMPLETIONS_ONLY = frozenset({"prompt"})
_KNOWN = {
    CHAT_URL: OBEYED | LABELS | CHAT_ONLY,
    COMPLETIONS_URL: OBEYED | LABELS | COMPLETIONS_ONLY,
    RESPONSES_URL: (OBEYED - {"n", "logprobs", "max_tokens", "response_format"}) | LABELS | responses_api.CONVERTED,
}
OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "modalities": (["text"],),
}
"""Known parameters that are not supported, with the values that leave them off (absent and null always do)."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What this worker serves. ``vocabulary`` counts token ids, ``stop_ids`` end an answer."""

    model: str
    context_tokens: int
    vocabulary: int
    stop_ids: tuple[int, ...] = ()
    drafting: bool = False
    """Whether it drafts tokens, and refuses what cannot go with that."""
    spread: bool = False
    """Whether its model is spread over devices, likewise."""
    ring_tokens: int = INT64_MAX
    """The most tokens of one line."""

    @property
    def without_forms(self) -> str:
        """The setting that keeps it from holding answers to a form; empty: it does."""
        return "--draft-tokens" if self.drafting else "--tensor-parallel" if self.spread else ""


class Asked(NamedTuple):
    """A body understood. Exactly one of ``messages``, ``prompt`` and ``prompt_ids`` is there."""

    messages: tuple[dict[str, Any], ...] | None
    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    min_p: float
    choices: int
    shape: Shape | None
    tools: tuple[dict[str, Any], ...]
    structure: Structure | None


def read(ref: LineRef, url: str, body: bytes, serving: Serving) -> Asked:
    """What ``body`` asks for. Raises ``RequestError`` naming the parameter."""
    if url not in _KNOWN:
        raise RequestError("invalid_url", f"{url} is not served here; {', '.join((*_KNOWN, EMBEDDINGS_URL))} are")
    asked = _object(body)
    _model(asked, serving)
    _only_known(asked, _KNOWN[url], responses_api.OFF if url == RESPONSES_URL else OFF)
    if url == RESPONSES_URL:
        asked = responses_api.as_chat(asked)
    chat = url != COMPLETIONS_URL
    top_p = number(asked, "top_p", 1.0, 0.0, 1.0)
    temperature = number(asked, "temperature", 1.0, 0.0, 2.0)
    seed = integer(asked, "seed", None, -INT64_MAX - 1, INT64_MAX)
    return Asked(
        messages=read_messages(asked) if chat else None,
        prompt=None if chat else _prompt_text(asked),
        prompt_ids=None if chat else _prompt_ids(asked, serving),
        max_tokens=_max_tokens(asked, chat),
        temperature=temperature if top_p > 0 else 0.0,  # a nucleus of nothing is the likeliest token alone
        top_p=top_p if top_p > 0 else 1.0,
        top_k=max(0, integer(asked, "top_k", 0, -1, INT64_MAX) or 0),
        seed=_line_seed(ref) if seed is None else seed & INT64_MAX,
        stop=parameters.stop(asked),
        stop_ids=parameters.stop_ids(asked, serving.vocabulary),
        min_p=number(asked, "min_p", 0.0, 0.0, 1.0),
        choices=parameters.choices(asked),
        shape=parameters.shape(asked, serving.vocabulary, chat=chat, drafting=serving.drafting),
        tools=read_tools(asked) if chat else (),
        structure=read_structure(asked, "text" if url == RESPONSES_URL else "response_format", serving.without_forms),
    )


def read_embeddings(body: bytes, serving: Serving) -> Inputs:
    """What a body for /v1/embeddings wants embedded. Raises ``RequestError`` naming the parameter."""
    asked = _object(body)
    _model(asked, serving)
    _only_known(asked, embeddings.EMBEDDED, embeddings.OFF)
    return embeddings.read_inputs(asked, serving.vocabulary)


def sampling(asked: Asked, prompt_tokens: int, serving: Serving) -> Sampling:
    """How the answer is made, once the prompt's length is known. Raises ``RequestError`` if it does not fit."""
    context = serving.context_tokens
    if prompt_tokens < 1:
        raise RequestError("empty_prompt", "the prompt has no tokens", "prompt")
    room = context - prompt_tokens
    where = "prompt" if asked.messages is None else "messages"
    wanted = asked.max_tokens
    if wanted is None:
        wanted = room if asked.messages is not None else min(room, COMPLETIONS_MAX_TOKENS_DEFAULT)
    if room < 1 or wanted > room:
        wanted = max(1, wanted)
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens here. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {where}, {wanted} in the completion). "
            f"Reduce the {where} or max_tokens, or start workers with a larger --context-tokens.",
            where,
        )
    return Sampling(
        wanted,
        asked.temperature,
        asked.top_p,
        asked.top_k,
        asked.seed,
        asked.stop,
        (*serving.stop_ids, *asked.stop_ids),
        asked.min_p,
        asked.choices,
        asked.shape,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        plain = body[:1] == b"{" and body[1:2] != b"\0"  # what detect_encoding would find to be UTF-8
        asked = _DECODER.decode(body.decode("utf-8" if plain else json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as bad:
        raise RequestError("invalid_json", f"the body is not JSON: {bad}") from bad
    if not isinstance(asked, dict):
        raise RequestError("invalid_json", "the body is not a JSON object")
    return asked


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""What ``json.loads`` makes anew for each body."""


def _model(asked: dict[str, Any], serving: Serving) -> None:
    model = asked.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError("missing_required", "you must provide a model parameter", "model")
    if model != serving.model:
        raise RequestError("model_not_found", f"model {model[:200]!r} is not served here", "model", 404)


def _only_known(asked: dict[str, Any], known: frozenset[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, value in asked.items():
        if name in known or value is None:
            continue
        if name not in neutral:
            raise unsupported(f"parameter {name[:200]!r} is not supported", name[:200])
        if not any(same(value, off) for off in neutral[name]):
            raise unsupported(f"parameter {name!r} is not supported (only its neutral value is)", name)


def _max_tokens(asked: dict[str, Any], chat: bool) -> int | None:
    """0 is refused, as vLLM does: a request for nothing is a mistake, and there is no echo to make sense of it."""
    given = integer(asked, "max_tokens", None, 1, INT64_MAX)
    newer = integer(asked, "max_completion_tokens", None, 1, INT64_MAX) if chat else None
    if given is not None and newer is not None and given != newer:
        raise RequestError(
            "invalid_value", f"max_tokens {given} and max_completion_tokens {newer} disagree: set one", "max_tokens"
        )
    return newer if newer is not None else given


def _prompt_text(asked: dict[str, Any]) -> str | None:
    prompt = _single_prompt(asked)
    return text(prompt, "prompt") if isinstance(prompt, str) else None


def _prompt_ids(asked: dict[str, Any], serving: Serving) -> tuple[int, ...] | None:
    prompt = _single_prompt(asked)
    if isinstance(prompt, str):
        return None
    if not all(type(one) is int and 0 <= one < serving.vocabulary for one in prompt):
        raise RequestError("invalid_value", f"token ids of prompt must be from 0 to {serving.vocabulary - 1}", "prompt")
    return tuple(prompt)


def _single_prompt(asked: dict[str, Any]) -> str | list[Any]:
    prompt = asked.get("prompt")
    if prompt is None:
        raise RequestError("missing_prompt", "you must provide a prompt parameter", "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        raise unsupported("several prompts in one line: give each a line of its own", "prompt")
    if not isinstance(prompt, str | list):
        raise RequestError("invalid_type", "prompt must be text or a list of token ids", "prompt")
    return prompt


def _line_seed(ref: LineRef) -> int:
    """A seed of the line's own: the same answer if it runs again, another than its neighbour's."""
    return zlib.crc32(f"{ref.job}#{ref.index}".encode())
