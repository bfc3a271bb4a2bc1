"""`TextEngine`: requests for texts, which a `generation.RequestEngine` continues together as they arrive."""

import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from .. import data, generation
from .._annotation_checks import fits
from ._generate_texts import check_draft_ids, StopStrings, TextAssembler
from ._grammars import Grammar, GrammarCompiler


if TYPE_CHECKING:
    from ._llm import LLM


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A prompt, and the settings with which it is continued or answered."""

    prompt: str | Sequence[Mapping[str, object]] | Sequence[int]
    """A text to continue, a list of messages to answer in the model's chat template, or ids to continue."""
    _: dataclasses.KW_ONLY
    max_new_tokens: int | None = 256
    """Maximum number of tokens to generate; None: as many as fit into the engine's rows after the prompt."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, which does not contain them."""
    temperature: float | int = 0.0
    """0 takes the likeliest token each time; 1 samples from the model's own distribution."""
    top_k: int | None = None
    """Sample from the `top_k` likeliest tokens only."""
    top_p: float | int | None = None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float | int | None = None
    """Sample from the tokens whose probability is at least `min_p` times the largest probability."""
    repetition_penalty: float | int | None = None
    """Above 1: make tokens that are already in the row less likely."""
    presence_penalty: float | int = 0
    """Number that is subtracted from the logits of each token that is in the text already; the prompt does not
    count."""
    frequency_penalty: float | int = 0
    """Number that is subtracted from the logits of a token for each time that the token is in the text already."""
    logit_bias: Mapping[int, float | int] = dataclasses.field(default_factory=dict)
    """Numbers that are added to the logits of ids before anything else; minus infinity forbids an id."""
    allowed: Callable[[list[int]], Bool[np.ndarray, "vocab"]] | Grammar | None = None
    """The grammar of the text, or a function of the new ids so far that says which ids may come next."""
    seed: int = 0
    """Seed of the sampling: the same seed and example give the same text."""
    example: int | None = None
    """A number that determines the random samples together with the seed; several samples of one prompt have the
    numbers 0, 1, ... None: the request's position in the list of `run`, or 0 for `stream`."""
    alternatives: int = 0
    """Number of the likeliest ids that a stream reports beside each sampled id."""
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further variables of the chat template, such as `{"enable_thinking": False}`."""
    continue_final_message: bool = False
    """Whether to continue the final message of a list of messages, instead of answering it."""

    def with_fields(self, fields: Mapping[str, Any]) -> "TextRequest":
        """Return the request with the values of a JSON object's fields.

        The object may have all fields of a request except `allowed` and `alternatives`. It may have `messages` in place
        of `prompt`, and `json_schema`, `regex` or `lark`: the source of a `Grammar`. Raises a `ValueError` for unknown
        fields and for values of another type.
        """
        changes: dict[str, Any] = {}
        for name, value in fields.items():
            kinds = _KINDS.get(name)
            if kinds is None:
                raise ValueError(f"TextRequest: there is no field {name!r}; the fields are {', '.join(_KINDS)}.")
            if not any(fits(value, kind) for kind in kinds):
                if float in kinds:  # "a number" includes integers.
                    kinds = tuple(kind for kind in kinds if kind is not int)
                expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
                raise ValueError(f"TextRequest: {name} must be {expected}, but it is {value!r:.60}; correct it.")
            if name in ("json_schema", "regex", "lark"):
                changes["allowed"] = Grammar(name, value)
            elif name == "logit_bias":
                changes[name] = _read_bias(value)
            else:
                changes["prompt" if name == "messages" else name] = value
        for name, kind in (("stop", str), ("prompt", int), ("messages", dict)):
            entries = fields.get(name)
            if isinstance(entries, list) and (wrong := [entry for entry in entries if not isinstance(entry, kind)]):
                raise ValueError(
                    f"TextRequest: a list as {name} must hold {_ENTRY_NAMES[kind]}, but one entry is "
                    f"{wrong[0]!r:.60}; correct it."
                )
        return dataclasses.replace(self, **changes)


_KIND_NAMES: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_ENTRY_NAMES: Mapping[type, str] = {str: "texts", int: "ids", dict: "objects"}
_NUMBER, _NULL = (float, int), type(None)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "prompt": (str, list),
    "messages": (list,),
    "max_new_tokens": (int, _NULL),
    "stop": (str, list),
    "temperature": _NUMBER,
    "top_k": (int, _NULL),
    "top_p": (*_NUMBER, _NULL),
    "min_p": (*_NUMBER, _NULL),
    "repetition_penalty": (*_NUMBER, _NULL),
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": (dict,),
    "seed": (int,),
    "example": (int, _NULL),
    "template_options": (dict,),
    "continue_final_message": (bool,),
    "json_schema": (dict, str),
    "regex": (str,),
    "lark": (str,),
}
"""The types of each field of a JSON object; a bool is no integer."""


def _read_bias(fields: Mapping[str, object]) -> dict[int, float | int]:
    """Return the `logit_bias` of a JSON object, and turn the ids, which are texts in JSON, into integers."""
    bias: dict[int, float | int] = {}
    for name, value in fields.items():
        if not str(name).isdecimal() or not isinstance(value, int | float):
            raise ValueError(
                f"TextRequest: logit_bias has a number for each id, but {name!r:.20} has {value!r:.60}; correct it."
            )
        bias[int(name)] = value
    return bias


@dataclasses.dataclass(frozen=True)
class TextResult:
    """The text of a request that has ended."""

    number: int
    """The position of the request in the list of `run`; in a stream, the request's number in the engine."""
    text: str
    """The new text, without the end of text and without a stop string."""
    ids: tuple[int, ...]
    """Ids that were sampled, including the end-of-text id, or the ids of the stop string, if one ended the text."""
    log_probs: tuple[float, ...]
    """Log-probability of each id by the model's logits, before anything changes them, in nats."""
    finish_reason: FinishReason
    """Why the text ended: `"stop"` if an id or a string ended the text, `"length"` if `max_new_tokens` ended it,
    `"cancelled"`, or `"error"` for a request that was refused or could not go on."""
    error: str = ""
    """The error that ended or refused the request."""
    prompt_length: int = 0
    """Number of ids of the prompt."""
    shared_length: int = 0
    """Number of ids of the prompt whose cache came from an earlier prompt with the same beginning."""


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A further piece of a text while it is generated."""

    text: str
    """The text that the new ids complete; empty while a character or a possible stop string is incomplete."""
    ids: tuple[int, ...]
    """The new ids."""
    texts: tuple[str, ...]
    """The text that each new id completes. `text` joins these texts; in the last piece, it also has the text that was
    held back as a possible stop string."""
    log_probs: tuple[float, ...]
    """Log-probability of each new id."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...]
    """For each new id, the `alternatives` likeliest ids at its position, with their log-probabilities."""
    result: TextResult | None = None
    """The result of the whole text, in the last piece; None in the other pieces."""


class TextEngine:
    """Engine that continues many texts and chats together; each text is the same as by `LLM.generate` or `LLM.chat`.

    `LLM.engine` returns a `TextEngine`. `run` takes a list or an iterator of requests; `stream` takes one request at
    any time, in asynchronous code. A text does not depend on other requests. See `generation.Engine` for slots, caches
    and the sharing of prompts.
    """

    def __init__(self, llm: "LLM", engine: generation.RequestEngine, draft: "LLM | None" = None):
        """Join a model's tokenizer and chat template with an engine over the model.

        Args:
            llm: The model with its tokenizer.
            engine: The engine over `llm.model`.
            draft: The engine's draft with its tokenizer, which must give prompts the same ids as the model's tokenizer;
                None: the engine has no draft, or the draft has no tokenizer.
        """
        self.llm, self.engine, self._draft = llm, engine, draft

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches, which do not grow."""
        return self.engine.cache_bytes

    def encode(
        self, request: TextRequest, position: int = 0, prompt_ids: Sequence[int] | None = None
    ) -> generation.Request:
        """Return the request as the engine takes it: with the ids of its prompt, and without its stop strings.

        Raises a `ValueError` for everything that `run` and `stream` refuse: a prompt that is empty, too long or of
        another type, a chat without a template, a grammar that cannot be read, and settings out of range. Raises an
        `ImportError` for a grammar without the package `llguidance`.

        Args:
            request: The request.
            position: The `example` of a request that states none.
            prompt_ids: The ids of the request's prompt if they are known already; None: the prompt is encoded.
        """
        prompt, allowed = self._encode_prompt(request, prompt_ids), request.allowed
        StopStrings(request.stop)
        encoded = generation.Request(
            prompt,
            self._count_new_tokens(request, len(prompt)),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            allowed=self._grammars.compile(allowed) if isinstance(allowed, Grammar) else allowed,
            end_of_text=self.llm.end_ids,
            seed=request.seed,
            example=position if request.example is None else request.example,
            alternatives=request.alternatives,
        )
        self.engine.check(encoded)
        return encoded

    def run(self, requests: Iterable[TextRequest | str]) -> Iterator[TextResult]:
        """Yield the text of each request when it ends; its `number` is the request's position in `requests`.

        Requests are taken from the iterable shortly before they can begin. Requests that are taken together begin in
        the order of their `max_new_tokens`, the largest first, as in `generation.Engine.run`. A string is continued
        with the default settings. A request that is refused has a result whose `finish_reason` is `"error"`.
        """
        text_requests = (TextRequest(request) if isinstance(request, str) else request for request in requests)
        remaining = enumerate(text_requests)
        rows: dict[int, tuple[int, _TextRow]] = {}
        longest = lambda item: item[1].max_new_tokens or self.engine.capacity
        while True:
            for position, request in self.engine.take_requests(remaining, longest):
                try:
                    row = self._make_row(request, position)
                except ValueError as error:
                    yield TextResult(position, "", (), (), "error", str(error))
                else:
                    rows[self.engine.submit(row.request)] = position, row
            if not rows:
                return
            for result in self.engine.step():
                if result.finish and result.number in rows:
                    position, row = rows.pop(result.number)
                    yield row.finish(result, position)

    def stream(
        self,
        request: TextRequest,
        *,
        prompt_ids: Sequence[int] | None = None,
        decoder: data.Tokenizer | None = None,
    ) -> AsyncGenerator[TextPiece, None]:
        """Return an asynchronous iterator over the pieces of a text; the last piece has the `result`.

        Raises the errors of `encode` at this call, before anything is generated. No piece splits a character or holds
        the beginning of a stop string. Closing the iterator (`aclose`) cancels the request.

        Args:
            request: The request.
            prompt_ids: The ids of the request's prompt if they are known already; None: the prompt is encoded.
            decoder: A tokenizer that decodes the new ids, for example a tokenizer that keeps special tokens in the
                text; None: the model's tokenizer.
        """
        return self._stream(self._make_row(request, 0, prompt_ids, decoder))

    async def _stream(self, row: "_TextRow") -> AsyncGenerator[TextPiece, None]:
        results = self.engine.stream(row.request)
        count = 0
        try:
            async for result in results:
                new = slice(count, len(result.ids))
                count = len(result.ids)
                ended = row.finish(result, result.number) if result.finish else None
                texts = tuple(row.pieces[new])
                text = "".join(texts) + row.ending  # `finish` sets the ending.
                ids, log_probs = tuple(result.ids[new]), tuple(result.log_probabilities[new])
                yield TextPiece(text, ids, texts, log_probs, tuple(result.alternatives[new]), result=ended)
        finally:
            await results.aclose()

    def _make_row(
        self,
        request: TextRequest,
        position: int,
        prompt_ids: Sequence[int] | None = None,
        decoder: data.Tokenizer | None = None,
    ) -> "_TextRow":
        """Check and encode a request; return it with the assembler of its text."""
        encoded = self.encode(request, position, prompt_ids)
        has_messages = not isinstance(request.prompt, str) and isinstance(request.prompt[0], Mapping)
        # Answers to messages, and the texts of a model with an encoder, do not continue the text of the prompt.
        is_answer = has_messages and not request.continue_final_message
        is_continued = not is_answer and self.llm.model.start is None
        continued = encoded.prompt if is_continued else ()
        stream = data.TextStream(decoder or self.llm.tokenizer, continued)
        return _TextRow(encoded, TextAssembler(stream, self.llm.end_ids, StopStrings(request.stop)))

    def _encode_prompt(self, request: TextRequest, prompt_ids: Sequence[int] | None) -> list[int]:
        """Return the ids of a request's prompt."""
        prompt: Any = request.prompt
        ids: list[int]
        if prompt_ids is not None:
            ids = list(prompt_ids)
        elif isinstance(prompt, str):
            ids = self.llm.tokens(prompt)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise ValueError(
                f"TextRequest(prompt): a prompt is a text, a list of messages or a list of ids, but this one is a "
                f"{type(prompt).__name__}; give one of them."
            )
        elif any(isinstance(message, Mapping) for message in prompt):
            is_continued = request.continue_final_message
            ids = self.llm.chat_tokens(prompt, request.template_options, continue_final_message=is_continued)
        else:
            ids = list(prompt)
        if not len(ids):
            raise ValueError(
                "TextRequest(prompt): the prompt is empty, and the tokenizer adds no beginning of text, so there is no "
                "token after which to continue; give at least one character."
            )
        if isinstance(prompt, str) and self._draft is not None:
            check_draft_ids(self.llm, self._draft, [prompt])
        return ids

    def _count_new_tokens(self, request: TextRequest, prompt_length: int) -> int:
        """Return the maximum number of tokens to generate."""
        if request.max_new_tokens is not None:
            return request.max_new_tokens
        used = prompt_length if self.llm.model.start is None else 1
        return max(self.engine.capacity - used, 1)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        """The compiler of grammars, which takes a moment to read the vocabulary."""
        return GrammarCompiler(self.llm.tokenizer, self.llm.model.vocab, self.llm.end_ids)


class _TextRow:
    """A request with the pieces of its text."""

    def __init__(self, request: generation.Request, assembler: TextAssembler):
        self.request = dataclasses.replace(request, ends=self._push)
        self.pieces: list[str] = []
        """The text that each id completes."""
        self.ending = ""
        """The end of the text, which was held back because it might have begun a stop string."""
        self._assembler = assembler

    def _push(self, ids: list[int]) -> bool:
        """Read the new ids; return whether the text has ended."""
        for token in ids[len(self.pieces) :]:
            self.pieces.append(self._assembler.push(token))
        return self._assembler.is_complete

    def finish(self, result: generation.Result, number: int) -> TextResult:
        """Return the whole text of a request that has ended."""
        self.ending = self._assembler.finish()
        reason = _REASONS[result.finish]
        if reason == "length" and self._assembler.is_complete:
            reason = "stop"
        return TextResult(
            number,
            "".join(self.pieces) + self.ending,
            tuple(result.ids),
            tuple(result.log_probabilities),
            reason,
            result.error,
            result.prompt_length,
            result.shared_length,
        )


_REASONS: Mapping[str, FinishReason] = {
    "end": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "error": "error",
}
"""The `finish_reason` of a `TextResult`, by the `finish` of a `generation.Result`."""
