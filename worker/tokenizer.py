"""shell: text to token ids and back, on a thread of its own between socket and ring.

``encode_batch`` of the fast tokenizers gives the interpreter lock away while it works (``encode`` of a long text holds
it for seconds), so that the session beats on. What a body may ask for is ``worker.request_rules``' to say.
"""

from __future__ import annotations

import json
import queue
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common import limits, log
from common.clock import Clock
from common.errors import RefusedError
from common.messages import LineRef
from worker import request_rules as rules
from worker import responses
from worker.embeddings import check_lengths
from worker.logprobs import ids_of
from worker.parameters import RequestError, unsupported
from worker.pieces import piece_bytes
from worker.prefixes import Prefixes, own_too_long
from worker.request_rules import Asked, Serving
from worker.structured import Structure
from worker.structures import Finished, Guide, Outcome, Prepared, Request, Sampling, Shape, TokenizeJob

if TYPE_CHECKING:
    from worker.guides import Guides


class TextCodec(Protocol):
    """A model's tokenizer. One thread."""

    vocabulary: int
    """How many token ids there are."""

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The conversation as the model's template writes it, with the ``tools`` it may call. Raises ``RequestError``
        where the template does, or knows of no tools."""
        ...

    def encode(self, texts: Sequence[str], special: bool) -> list[Sequence[int]]:
        """Token ids of each text; ``special`` adds what the tokenizer puts around a bare text."""
        ...

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each answer, special tokens left out."""
        ...

    def pieces(self, ids: Iterable[int]) -> dict[int, bytes]:
        """The bytes of each token by itself; of an id that is none, no bytes."""
        ...

    def guide(self, structure: Structure, stop_ids: Sequence[int]) -> Guide:
        """What holds an answer to a form; ``stop_ids`` may end it. Raises ``RequestError`` where nothing can."""
        ...


class HubCodec:
    """The fast tokenizer of a local transformers folder (or hub id). Raises ``RefusedError`` when it has none."""

    def __init__(self, source: Path | str) -> None:
        import jinja2  # both only where a model is served: an echo worker starts without them
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(source))
        except (OSError, ValueError) as failure:
            raise RefusedError(f"model {source} has no tokenizer that can be used: {failure}") from failure
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RefusedError(f"model {source} has no fast tokenizer (tokenizer.json): requests cannot be prepared")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template_errors = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError)
        self.vocabulary = len(self._tokenizer)
        self._added = self._backend.get_added_tokens_decoder()
        spelling = json.loads(self._backend.to_str()).get("decoder")
        self._guides: Guides | None = None
        self._no_guides = ""
        self._byte_level = '"ByteLevel"' in json.dumps(spelling)

    def chat_text(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        if not self._tokenizer.chat_template:
            raise RequestError(
                "chat_template_missing", f"this model has no chat template: use {responses.COMPLETIONS_URL}", "messages"
            )
        text = self._written(messages, None)
        if tools:
            told = self._written(messages, list(tools))
            if told == text:
                raise unsupported("this model's chat template takes no tools", "tools")
            return told
        return text

    def _written(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except self._template_errors as failure:
            raise RequestError(
                "chat_template_error", f"the model's chat template refuses these messages: {failure}"[:2000], "messages"
            ) from failure
        return str(text)

    def encode(self, texts: Sequence[str], special: bool) -> list[Sequence[int]]:
        return [one.ids for one in self._backend.encode_batch(list(texts), add_special_tokens=special)]

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        decoded = self._backend.decode_batch([list(one) for one in answers], skip_special_tokens=True)
        return [str(one) for one in decoded]

    def pieces(self, ids: Iterable[int]) -> dict[int, bytes]:
        found = {}
        for one in ids:
            piece = self._backend.id_to_token(one) or ""  # a model may have more ids than its tokenizer has tokens
            found[one] = piece_bytes(piece, byte_level=self._byte_level, added=one in self._added)
        return found

    def guide(self, structure: Structure, stop_ids: Sequence[int]) -> Guide:
        if self._guides is None:
            self.make_guides(stop_ids)
        if self._guides is None:
            words = f"this model's tokenizer can hold no answer to a form: {self._no_guides}"
            raise unsupported(f"{structure.param} is not supported: {words}"[:2000], structure.param)
        return self._guides.make(structure)

    def make_guides(self, stop_ids: Sequence[int]) -> None:
        """At start, since it keeps the interpreter lock for some tenths of a second. Where it fails, the worker serves
        all other lines."""
        from worker.guides import Guides

        try:
            self._guides = Guides(self._backend.to_str(), self.vocabulary, stop_ids)
        except (ValueError, RuntimeError, TypeError) as failure:
            self._no_guides = str(failure)
            log.get("tokenizer").warning("no_structured_output", reason=self._no_guides)


class Preparer:
    """Lines to requests, results to bodies. ``page_tokens``: prompts share their beginnings in whole pages of so many
    tokens; 0 for not at all (H5). ``own_rows`` is the room of each that shares for its own part; 0: whole histories.
    ``keeping`` keeps prompts on the host for the engine. One thread."""

    def __init__(
        self,
        codec: TextCodec,
        serving: Serving,
        fingerprint: str,
        clock: Clock,
        page_tokens: int = 0,
        *,
        own_rows: int = 0,
        keeping: bool = False,
    ) -> None:
        self._codec = codec
        self._serving = serving
        self._fingerprint = fingerprint
        self._clock = clock
        self._prefixes = Prefixes(page_tokens)
        self._page, self._own_rows = page_tokens, own_rows
        self._warned: deque[str] = deque(maxlen=limits.PREFIX_JOBS_MAX_COUNT)
        self._keeping = keeping

    def prepare(self, jobs: Sequence[TokenizeJob]) -> list[Prepared | Outcome]:
        """Each line ready for the ring, or its refusal, in order. A line that breaks the tokenizer fails alone."""
        try:
            return self._prepare(jobs)
        except BaseException as failure:  # noqa: BLE001 (a tokenizer's panic is not even an Exception)
            if len(jobs) > 1:
                return [self.prepare([job])[0] for job in jobs]
            return [_broken(jobs[0].ref, failure)]

    def _prepare(self, jobs: Sequence[TokenizeJob]) -> list[Prepared | Outcome]:
        done: dict[LineRef, Prepared | Outcome] = {}
        texts: dict[bool, list[tuple[TokenizeJob, Asked, str]]] = {True: [], False: []}
        for job in jobs:
            try:
                if job.url == responses.EMBEDDINGS_URL:
                    done[job.ref] = self._embeddings(job)
                    continue
                asked = rules.read(job.ref, job.url, job.body, self._serving)
                if asked.prompt_ids is not None:
                    done[job.ref] = self._request(job, asked, asked.prompt_ids)
                elif asked.messages is not None:
                    texts[False].append((job, asked, self._codec.chat_text(asked.messages, asked.tools)))
                else:
                    texts[True].append((job, asked, asked.prompt or ""))
            except RequestError as refusal:
                done[job.ref] = _refused(job.ref, refusal)
        for special, entries in texts.items():
            if entries:
                encoded = self._codec.encode([text for _, _, text in entries], special)
                for (job, asked, _), ids in zip(entries, encoded, strict=True):
                    done[job.ref] = self._checked(job, asked, ids)
        prompts = [one for one in done.values() if isinstance(one, Prepared) and not one.request.pieces]
        self._share(prompts, done)
        return [done[job.ref] for job in jobs]

    def _embeddings(self, job: TokenizeJob) -> Prepared:
        """All inputs of a line one behind the other; each is a prompt by itself, and a token is sampled behind it."""
        serving, inputs = self._serving, rules.read_embeddings(job.body, self._serving)
        encoded = iter(self._codec.encode([one for one in inputs.texts if isinstance(one, str)], special=True))
        ids = [next(encoded) if isinstance(one, str) else one for one in inputs.texts]
        pieces = [len(one) for one in ids]
        check_lengths(pieces, serving.context_tokens, serving.ring_tokens)
        held = array("i", [token for one in ids for token in one])
        sampling = Sampling(1, shape=Shape(pool=inputs.form))
        text = held if self._keeping else None
        request = Request(job.ref, job.url, serving.model, len(held), sampling, text=text, pieces=tuple(pieces))
        return Prepared(request, held)

    def _share(self, prepared: Sequence[Prepared], done: dict[LineRef, Prepared | Outcome]) -> None:
        """With all prompts of a batch there: what each job's share."""
        by_job: dict[str, list[Prepared]] = {}
        for one in prepared:
            by_job.setdefault(one.request.ref.job, []).append(one)
        for name, ones in by_job.items():
            for one, prefix in zip(ones, self._prefixes.share(name, [one.token_ids for one in ones]), strict=True):
                prefix = prefix or self._prefixes.of_choices(one)
                if prefix is not None:
                    done[one.request.ref] = one._replace(request=one.request._replace(shared=prefix))
            self._warn(name, [found.request for one in ones if isinstance(found := done[one.request.ref], Prepared)])

    def _warn(self, job: str, requests: Sequence[Request]) -> None:
        """Once a job, when its lines could share and have no room for it: which setting would give it."""
        lost = [one.own_tokens for one in requests if self._own_rows and own_too_long(one, self._own_rows)]
        if not lost or job in self._warned:
            return
        self._warned.append(job)
        most = -(-max(lost) // self._page) * self._page
        log.get("tokenizer").warning(
            "sharing_lost", job=job, lines=len(lost), of=len(requests), own_part_needs_tokens=max(lost),
            own_tokens_hold=self._own_rows, remedy=f"set --own-tokens to {most} or more: these lines run alone, in the "
            "whole histories of --shared-histories",
        )  # fmt: skip

    def _checked(self, job: TokenizeJob, asked: Asked, ids: Sequence[int]) -> Prepared | Outcome:
        try:
            return self._request(job, asked, ids)
        except RequestError as refusal:
            return _refused(job.ref, refusal, len(ids))

    def _request(self, job: TokenizeJob, asked: Asked, ids: Sequence[int]) -> Prepared:
        sampling = rules.sampling(asked, len(ids), self._serving)
        held = ids if isinstance(ids, array) else array("i", ids)
        text = held if self._keeping else None
        tools = tuple(tool["function"]["name"] for tool in asked.tools)
        guide = None if asked.structure is None else self._codec.guide(asked.structure, self._serving.stop_ids)
        request = Request(job.ref, job.url, self._serving.model, len(ids), sampling, None, text, tools, guide)
        return Prepared(request, held)

    def answer(self, finished: Sequence[Finished]) -> list[Outcome]:
        """Each request's result as its line will show it, in order. One that cannot be told fails alone."""
        try:
            return self._answer(finished)
        except BaseException as failure:  # noqa: BLE001 (as above)
            if len(finished) > 1:
                return [self.answer([one])[0] for one in finished]
            return [_broken(finished[0].request.ref, failure)]

    def _answer(self, finished: Sequence[Finished]) -> list[Outcome]:
        texts = iter(self._codec.decode([choice.token_ids for one in finished for choice in one.choices]))
        now = self._clock.wall()
        return [self._outcome(one, [next(texts) for _ in one.choices], now) for one in finished]

    def _outcome(self, one: Finished, texts: Sequence[str], now: float) -> Outcome:
        request = one.request
        if one.reason == "cancelled":
            made = sum(len(choice.token_ids) for choice in one.choices)
            outcome = responses.cancelled(request.ref, request.prompt_tokens, made)
        elif one.reason == "failed":
            outcome = responses.failed(request.ref, 500, "engine_error", one.error, None, request.prompt_tokens)
        else:
            told = set().union(*(ids_of(choice) for choice in one.choices))
            outcome = responses.answered(one, texts, now, self._fingerprint, self._codec.pieces(told) if told else {})
        return outcome._replace(notes=one.notes) if one.notes else outcome


def _refused(ref: LineRef, refusal: RequestError, prompt_tokens: int = 0) -> Outcome:
    return responses.failed(ref, refusal.status_code, refusal.code, refusal.message, refusal.param, prompt_tokens)


def _broken(ref: LineRef, failure: BaseException) -> Outcome:
    log.get("tokenizer").error("line_broke_the_tokenizer", line=str(ref.line), exc_info=failure)
    reason = f"the tokenizer broke on this line: {type(failure).__name__}: {failure}"[:2000]
    return responses.failed(ref, 500, "tokenizer_error", reason, None, 0)


class Stop:
    """Told to a tokenizer's queue: end."""


Work = Sequence[TokenizeJob] | Finished | Stop
Results = Callable[[Sequence[Prepared | Outcome]], None]


def serve(work: queue.SimpleQueue[Work | Preparer], results: Results) -> None:
    """The thread's whole life: what is queued, in batches, until ``Stop``. Its ``Preparer`` comes by the same queue,
    once the model is known; before that lines wait.
    """
    preparer: Preparer | None = None
    early: list[Work] = []
    while True:
        batch = _next(work)
        for item in batch:
            if isinstance(item, Preparer):
                preparer = item
        todo: list[Work] = [*early, *(item for item in batch if not isinstance(item, Preparer))]
        if any(isinstance(item, Stop) for item in todo):
            return
        if preparer is None:
            early = todo
            continue
        early = []
        finished = [item for item in todo if isinstance(item, Finished)]
        jobs = [job for item in todo if isinstance(item, list) for job in item]
        if finished:
            results(preparer.answer(finished))
        for start in range(0, len(jobs), limits.TOKENIZE_MAX_LINES):
            results(preparer.prepare(jobs[start : start + limits.TOKENIZE_MAX_LINES]))


def _next(work: queue.SimpleQueue[Work | Preparer]) -> list[Work | Preparer]:
    """At least one item, and what else is there, up to a call's worth of answers."""
    batch = [work.get()]
    while len(batch) < limits.TOKENIZE_MAX_LINES:
        try:
            batch.append(work.get_nowait())
        except queue.Empty:
            break
    return batch
