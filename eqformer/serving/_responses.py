"""Responses of the OpenAI protocol as JSON objects."""

import base64
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float

from .. import data
from .._files import JsonObject, JsonValue
from ..interpretability import LayerExperts
from ..text import TextPiece, TextResult
from ._protocol import ChatRequest, TextOptions
from ._tool_calls import ToolCall, ToolCallParser


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a text, with its log-probability and the likeliest tokens at its position."""

    id: int
    text: str
    """The text that is complete with this token. If several tokens encode a character, only the last one has a text."""
    log_prob: float | None
    """None for the first token of a prompt, because no token precedes it."""
    alternatives: Sequence[tuple[int, float]] = ()
    """The likeliest ids, with their log-probabilities."""


@dataclasses.dataclass
class ResponseText:
    """A text of a response while it grows."""

    text: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    result: TextResult | None = None
    """The result of the text; None until the text ends."""

    def add(self, piece: TextPiece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += tokens_of(piece)
        self.result = piece.result

    @property
    def finish_reason(self) -> str | None:
        """The reason why the text ended; None while it grows."""
        return None if self.result is None else self.result.finish_reason

    @property
    def mean_log_prob(self) -> float:
        """The mean log-probability of a token, by which the best of several texts are chosen."""
        log_probs = [token.log_prob or 0.0 for token in self.tokens]
        return sum(log_probs) / max(1, len(log_probs))


def tokens_of(piece: TextPiece) -> list[Token]:
    """Return the tokens of a piece."""
    return [Token(*fields) for fields in zip(piece.ids, piece.texts, piece.log_probs, piece.alternatives)]


def token_texts(tokenizer: data.PromptTokenizer) -> Callable[[int], str]:
    """Return a function that maps an id to its text, and decodes each id only once.

    The text is empty for a part of a character and for an id without a token.
    """
    # Some tokenizers drop the space at the beginning of a text, so each token is decoded after another token.
    context = tokenizer.encode_prompt("a", add_special_tokens=False).tolist()
    context_length = len(tokenizer.decode_prompt(context))

    @functools.cache
    def token_text(token: int) -> str:
        if token >= tokenizer.vocab:
            return ""
        text = tokenizer.decode_prompt([*context, token])[context_length:]
        return "" if "\ufffd" in text else text

    return token_text


class ResponseWriter:
    """Writer of the JSON objects of one request's response."""

    def __init__(self, kind: str, prefix: str, model: str, token_text: Callable[[int], str]):
        """Prepare the fields that all objects of a response share.

        Args:
            kind: The name of the object, such as `text_completion`.
            prefix: The beginning of the response's id.
            model: The name of the model.
            token_text: A function that maps an id to its text, as `token_texts` returns it.
        """
        self._shared = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._token_text = token_text

    def response(self, choices: list[JsonObject], usage: JsonObject | None, kind: str | None = None) -> JsonObject:
        """Return a response, or a part of a streamed response, with these choices."""
        values = self._shared | ({} if kind is None else {"object": kind}) | {"choices": choices}
        return values if usage is None else values | {"usage": usage}

    def completion_choice(
        self, index: int, text: str, finish_reason: str | None, tokens: Sequence[Token] | None, offset: int = 0
    ) -> JsonObject:
        """Return a choice of `/v1/completions`.

        Args:
            index: The number of the choice.
            text: The text.
            finish_reason: The reason why the text ended; None while it grows.
            tokens: The tokens with their log-probabilities; None: no log-probabilities are reported.
            offset: Number of characters of the text before these tokens.
        """
        log_probs = None if tokens is None else self._completion_log_probs(tokens, offset)
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": log_probs}

    def chat_choice(
        self, index: int, message: JsonObject, finish_reason: str | None, tokens: Sequence[Token] | None, *, delta: bool
    ) -> JsonObject:
        """Return a choice of `/v1/chat/completions`.

        Args:
            index: The number of the choice.
            message: The message, or in a stream the part that this event adds to it.
            finish_reason: The reason why the message ended; None while it grows.
            tokens: The tokens with their log-probabilities; None: no log-probabilities are reported.
            delta: Whether the message is a part of a stream.
        """
        log_probs = None if tokens is None else {"content": [self._chat_token(token) for token in tokens]}
        name = "delta" if delta else "message"
        return {"index": index, name: message, "finish_reason": finish_reason, "logprobs": log_probs}

    def _completion_log_probs(self, tokens: Sequence[Token], offset: int) -> JsonObject:
        """Return log-probabilities in the form of `/v1/completions`."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        alternatives = [
            # A sampled token that is not among the likeliest is listed, too.
            {self._show(likely): log_prob for likely, log_prob in token.alternatives}
            | {self._show(token.id): token.log_prob}
            for token in tokens
        ]
        return {
            "tokens": [self._show(token.id) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [None if token.log_prob is None else top for token, top in zip(tokens, alternatives)],
            "text_offset": offsets,
        }

    def _chat_token(self, token: Token) -> JsonObject:
        """Return log-probabilities in the form of `/v1/chat/completions`."""
        top = [self._token_object(likely, log_prob) for likely, log_prob in token.alternatives]
        return self._token_object(token.id, token.log_prob) | {"top_logprobs": top}

    def _token_object(self, token: int, log_prob: float | None) -> JsonObject:
        text = self._token_text(token)
        return {"token": self._show(token), "logprob": log_prob, "bytes": list(text.encode()) if text else None}

    def _show(self, token: int) -> str:
        """Return the name of a token: its text, or its number if it has no text, as for a part of a character."""
        return self._token_text(token) or f"token_id:{token}"


class CompletionEvents:
    """The events of a streamed completion."""

    def __init__(self, writer: ResponseWriter, options: TextOptions):
        self._writer, self._has_log_probs = writer, options.alternatives is not None

    def write(self, number: int, choice: ResponseText, piece: TextPiece) -> list[JsonObject]:
        """Return the events of a piece."""
        if not (piece.text or piece.result or self._has_log_probs):
            return []
        tokens = tokens_of(piece) if self._has_log_probs else None
        offset = len(choice.text) - len(piece.text)
        value = self._writer.completion_choice(number, piece.text, choice.finish_reason, tokens, offset)
        return [self._writer.response([value], None)]

    def end(self, counts: JsonObject | None = None) -> JsonObject:
        """Return an event after all texts, with the counts of tokens if they are given."""
        return self._writer.response([], counts)


class ChatEvents:
    """The events of a streamed chat."""

    def __init__(self, writer: ResponseWriter, body: ChatRequest):
        self._writer, self._has_log_probs = writer, body.options.alternatives is not None
        self._parsers = [ToolCallParser(body.tool_names) for _ in range(body.options.count)]
        self._has_begun = [False] * body.options.count

    def write(self, number: int, choice: ResponseText, piece: TextPiece) -> list[JsonObject]:
        """Return the events of a piece; the first event of a message names the message's role."""
        content, calls, finish_reason = self._parsers[number].split(piece.text, choice.finish_reason)
        message = chat_message(content, calls, delta=True)
        if not self._has_begun[number]:
            self._has_begun[number] = True
            message = {"role": "assistant", "content": ""} | message
        tokens = tokens_of(piece) if self._has_log_probs else None
        if not (message or tokens or finish_reason):
            return []
        return [self._event([self._writer.chat_choice(number, message, finish_reason, tokens, delta=True)])]

    def end(self, counts: JsonObject | None = None) -> JsonObject:
        """Return an event after all texts, with the counts of tokens if they are given."""
        return self._event([], counts)

    def _event(self, choices: list[JsonObject], counts: JsonObject | None = None) -> JsonObject:
        return self._writer.response(choices, counts, "chat.completion.chunk")


def chat_message(content: str, calls: Sequence[ToolCall], *, delta: bool = False) -> JsonObject:
    """Return a message of the assistant; with `delta`, the part of a message that an event of a stream adds."""
    message: JsonObject = {} if delta else {"role": "assistant"}
    if content or not (calls or delta):
        message["content"] = content
    elif not delta:
        message["content"] = None
    if calls:
        message["tool_calls"] = [_call_object(call, number, delta) for number, call in enumerate(calls)]
    return message


def _call_object(call: ToolCall, number: int, delta: bool) -> JsonObject:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    values = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return {"index": number} | values if delta else values


def usage(prompt_tokens: int, results: Iterable[TextResult | None]) -> JsonObject:
    """Return the token counts of a response: its prompts' tokens, and the tokens of its texts."""
    known = [result for result in results if result is not None]
    generated = sum(len(result.ids) for result in known)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(result.shared_length for result in known)},
    }


def experts_fields(number: int, chosen: LayerExperts) -> JsonObject:
    """Return the fields of an event with the experts that read each token of text `number` in one layer."""
    weights = np.round(chosen.weights.astype(np.float64), 4).tolist()
    values = {"index": number, "layer": chosen.layer, "experts": chosen.experts.tolist(), "weights": weights}
    return {"experts": values}


def event(value: JsonValue) -> bytes:
    """Return a JSON value as an event of a streamed response."""
    return b"data: " + dump(value) + b"\n\n"


def dump(value: JsonValue) -> bytes:
    """Return a value as JSON; log-probabilities of minus infinity are written as -9999."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="backslashreplace")  # Lone surrogates become JSON escapes.


def write_embeddings(
    model: str, vectors: Float[np.ndarray, "texts features"], tokens: int, *, as_base64: bool
) -> bytes:
    """Return the response to a request to `/v1/embeddings`, as JSON."""

    def write(number: int, vector: Float[np.ndarray, "features"]) -> bytes:
        numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        return dump({"object": "embedding", "index": number, "embedding": numbers})

    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    empty = dump({"object": "list", "model": model, "usage": counts, "data": []})
    # A dump holds the interpreter's lock; between the dumps of two vectors other threads run.
    return empty.removesuffix(b"]}") + b",".join(write(*item) for item in enumerate(vectors)) + b"]}"


def _finite(value: JsonValue) -> JsonValue:
    """Return a JSON value without infinities, which JSON cannot write."""
    match value:
        case float() if value == float("-inf"):
            return -9999.0
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list():
            return [_finite(item) for item in value]
    return value
