"""Responses of the OpenAI protocol as JSON objects, and the calls of tools that an answer makes."""

import base64
import dataclasses
import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from .. import data
from .._files import JsonObject, JsonValue, parse_json
from ..interpretability import LayerExperts
from ..text import Grammar, NO_FORCING, TextPiece, TextResult


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a text, with its log-probability and the likely tokens in its place."""

    id: int
    text: str
    """The text that the token completes; empty for all tokens of a character but its last."""
    log_prob: float | None
    """None for the first token of a prompt, which nothing precedes."""
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
        """The reason for the end; None before it."""
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
    """Return a function from an id to its text, which decodes each id once.

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
            token_text: A function from an id to its text, as `token_texts` returns it.
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
            finish_reason: The reason for the end of the text; None before it.
            tokens: The tokens with their log-probabilities; None: they are not reported.
            offset: Characters of the text before these tokens.
        """
        log_probs = None if tokens is None else self._completion_log_probs(tokens, offset)
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": log_probs}

    def chat_choice(
        self, index: int, message: JsonObject, finish_reason: str | None, tokens: Sequence[Token] | None, *, delta: bool
    ) -> JsonObject:
        """Return a choice of `/v1/chat/completions`.

        Args:
            index: The number of the choice.
            message: The message, or what a part of a stream adds to it.
            finish_reason: The reason for the end of the message; None before it.
            tokens: The tokens with their log-probabilities; None: they are not reported.
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
        """Return the name of a token: its text, or its number for a part of a character, which has no text."""
        return self._token_text(token) or f"token_id:{token}"


def chat_message(content: str, calls: "Sequence[ToolCall]", *, delta: bool = False) -> JsonObject:
    """Return a message of the assistant; with `delta`, the part of a message that an event of a stream adds."""
    message: JsonObject = {} if delta else {"role": "assistant"}
    if content or not (calls or delta):
        message["content"] = content
    elif not delta:
        message["content"] = None
    if calls:
        message["tool_calls"] = [_call_object(call, number, delta) for number, call in enumerate(calls)]
    return message


def _call_object(call: "ToolCall", number: int, delta: bool) -> JsonObject:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    values = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return {"index": number} | values if delta else values


def usage(prompt_tokens: int, results: Iterable[TextResult | None]) -> JsonObject:
    """Return the numbers of tokens of a response."""
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


# Calls of tools, in the formats that published chat templates teach.

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # Hermes and Qwen: one JSON object in each pair of tags.
_LIST = "[TOOL_CALLS]"  # Mistral: a list of JSON objects, or in later versions a name, [ARGS] and an object.
_PYTHON = "<|python_tag|>"  # Llama 3: before a JSON object, or left out by smaller models.
_MARKERS = (_OPEN, _LIST, _PYTHON)
_ANY_MARKER = "|".join(map(re.escape, _MARKERS))
_CALL_START = re.compile(
    rf"(?:{_ANY_MARKER})\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{))?", re.DOTALL
)
_CALL_END = re.compile(rf"\s*(?:{re.escape(_CLOSE)}|{_ANY_MARKER}|\Z)")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a model has written."""

    name: str
    arguments: JsonValue
    """The arguments as a JSON object."""


class ToolCallParser:
    """Parser of an answer in pieces, which divides it into plain text and calls of tools.

    Text that may begin a call is held back. Text that looks like a call, but has broken JSON or the name of no tool, is
    plain text.
    """

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._pending = ""
        self._is_call = False
        self._has_text = False

    def push(self, piece: str) -> str:
        """Return the text that is certain to belong to no call."""
        self._pending += piece
        # Smaller models answer with the JSON object alone, whose texts may name a marker.
        if self._is_call or (not self._has_text and self._pending.lstrip()[:1] in ("{", "")):
            return ""
        starts = [start for marker in _MARKERS if (start := self._pending.find(marker)) >= 0]
        if starts:
            self._is_call = True
            return self._release(min(starts))
        return self._release(len(self._pending) - _marker_length(self._pending))

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the text that was held back and belongs to no call, and the calls."""
        known = [(start, call) for start, call in _parse_calls(self._pending) if call.name in self._names]
        return self._release(known[0][0] if known else len(self._pending)), [call for _, call in known]

    def _release(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._has_text = self._has_text or bool(text.strip())
        return text


def _marker_length(text: str) -> int:
    """Return the length of the longest end of a text that is the beginning of a marker."""
    lengths = range(1, min(len(text) + 1, max(map(len, _MARKERS))))
    return max((n for n in lengths if any(marker.startswith(text[-n:]) for marker in _MARKERS)), default=0)


def _parse_calls(text: str) -> list[tuple[int, ToolCall]]:
    """Return the calls of a text, each with the position of its beginning; none for text that cannot be parsed."""
    if text.lstrip().startswith("{"):
        try:
            if calls := [*_calls_of(parse_json(text.strip(), unique=False))]:
                return [(0, call) for call in calls]
        except ValueError:
            pass
    calls, position = [], 0
    # The search goes on behind each call, because the texts in its arguments may name a marker.
    while match := _CALL_START.search(text, position):
        position = match.end()
        value, stop = _decode_json(text, position)
        if value is None or not _CALL_END.match(text, stop):
            continue
        position = stop
        if match["name"]:
            value = {"name": match["name"], "arguments": value}
        for item in value if isinstance(value, list) else [value]:
            calls += [(match.start(), call) for call in _calls_of(item)]
    return calls


def _decode_json(text: str, start: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at a position, and where it stops; None for text that is not JSON."""
    try:
        _, stop = json.JSONDecoder().raw_decode(text, start)
        return parse_json(text[start:stop], unique=False), stop
    except (ValueError, RecursionError):
        return None, start


def _calls_of(value: JsonValue) -> Iterator[ToolCall]:
    """Yield the call that a JSON value describes; nothing if it describes none."""
    match value:
        case {"name": str() as name, "arguments": dict() as arguments}:
            yield ToolCall(name, arguments)
        case {"name": str() as name, "parameters": dict() as arguments}:
            yield ToolCall(name, arguments)


# The format in which a chat template writes calls, as a grammar that forces an answer to be a call.

_PROBE = ToolCall("probed_function", {"probed_argument": "probed value"})
_PROBE_ARGUMENTS = re.compile(r'\{\s*"probed_argument"\s*:\s*"probed value"\s*\}')
_PROBE_ID = "a1B2c3D4e"  # Mistral's templates refuse ids other than nine letters and digits.
_PROBE_MESSAGE: JsonObject = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": dataclasses.asdict(_PROBE)}],
}
# Templates write arguments by `tojson`. A small model might never end a text with free space.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclasses.dataclass(frozen=True)
class ToolCallFormat:
    """The texts that a chat template writes around the name and the arguments of a call."""

    lead: str
    """The text of the answer before the call, such as empty reasoning."""
    before_name: str
    before_arguments: str
    after_arguments: str

    def grammar(self, tools: Iterable[JsonObject], marker_ids: Mapping[str, int]) -> Grammar:
        """Return the grammar of an answer without its lead, which is a call of one of the tools.

        Raises a `ValueError` for a tool whose name or whose parameters no call can have.

        Args:
            tools: The tools that may be called.
            marker_ids: The ids of markers that are one token (`find_marker_ids`).
        """
        write = functools.partial(_write_literal, marker_ids=marker_ids)
        functions = [tool["function"] for tool in tools]
        calls = [
            f"call_{number}: {write(function['name'] + self.before_arguments)} %json {_arguments_schema(function)}"
            for number, function in enumerate(functions)
        ]
        names = " | ".join(f"call_{number}" for number in range(len(calls)))
        start = f"start: {write(self.before_name)} ({names}) {write(self.after_arguments)}"
        return Grammar("lark", "\n".join([NO_FORCING, start, *calls]))


def find_call_format(
    template: data.ChatTemplate, messages: Sequence[JsonObject], options: JsonObject, ends: Iterable[str]
) -> ToolCallFormat | None:
    """Return the format in which a chat template writes the answer's call of a tool.

    The template renders a call of a made-up tool as the answer to the messages. Returns None if the template refuses
    that, or if the server does not read calls of the format.

    Args:
        template: The chat template.
        messages: The conversation.
        options: The variables of the template.
        ends: The names of the tokens that end a text.
    """
    try:
        text, replies = data.find_replies(template, [*messages, _PROBE_MESSAGE], **options)
    except ValueError:
        return None
    if (spans := replies[-1]) is None:
        return None
    answer = text[slice(*spans[1])]
    for end in filter(None, ends):
        answer = answer.partition(end)[0]
    answer = answer.rstrip()
    arguments, name = _PROBE_ARGUMENTS.search(answer), answer.find(_PROBE.name)
    if arguments is None or not 0 <= name < arguments.start():
        return None
    starts = [start for marker in (*_MARKERS, "{") if 0 <= (start := answer.find(marker)) < name]
    start = min(starts, default=name)
    if _parse_calls(answer[start:]) != [(0, _PROBE)]:
        return None
    before_arguments = answer[name + len(_PROBE.name) : arguments.start()]
    return ToolCallFormat(answer[:start], answer[start:name], before_arguments, answer[arguments.end() :])


def find_marker_ids(tokenizer: data.PromptTokenizer) -> dict[str, int]:
    """Return the ids of special tokens, and of markers of calls that are one token, by their names."""
    special_ids: Sequence[int] = getattr(tokenizer, "special_ids", ())
    marker_ids = {tokenizer.decode_prompt([number]): number for number in special_ids}
    for marker in (*_MARKERS, _CLOSE, "[CALL_ID]", "[ARGS]"):
        ids = tokenizer.encode_prompt(marker, add_special_tokens=False).tolist()
        if len(ids) == 1:
            marker_ids[marker] = ids[0]
    return marker_ids


def _write_literal(text: str, marker_ids: Mapping[str, int]) -> str:
    """Return a text in the language of Lark: markers by their ids, and an id of a call as any id."""
    names = sorted(filter(None, [*marker_ids, _PROBE_ID]), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text)
    ids = {name: f"<[{number}]>" for name, number in marker_ids.items()} | {_PROBE_ID: "/[a-zA-Z0-9]{9}/"}
    return " ".join(ids.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)


def _arguments_schema(function: JsonObject) -> str:
    """Return the JSON schema of a tool's arguments as a text; raise a `ValueError` for a tool that cannot be called."""
    name, parameters = function["name"], function.get("parameters")
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError(f"tools: {name[:80]!r} cannot be called by force; use letters, digits, _, - and . in its name")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f"tools: the parameters of {name[:80]} must be a JSON schema of the type object; correct them")
    return json.dumps({"type": "object"} | parameters | {"x-guidance": _SEPARATORS})
