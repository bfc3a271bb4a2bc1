"""Calls of tools in an answer: the formats that published chat templates teach, their parser, and their grammars."""

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from .. import data
from .._files import JsonObject, JsonValue, parse_json
from ..text import Grammar


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # Hermes and Qwen: one JSON object in each pair of tags.
_LIST = "[TOOL_CALLS]"  # Mistral: a list of JSON objects, or in later versions a name, [ARGS] and an object.
_PYTHON = "<|python_tag|>"  # Llama 3: before a JSON object; smaller models write the object without it.
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
    """Parser that reads an answer piece by piece, and divides it into plain text and calls of tools.

    Text that may begin a call is held back. Text that looks like a call is plain text if its JSON is broken or if it
    names no known tool. Without tools, all text is plain text.
    """

    def __init__(self, names: Collection[str]):
        """Begin an answer that may call the tools of these names."""
        self._names = frozenset(names)
        self._pending = ""
        self._is_call = False
        self._has_text = False

    def split(self, piece: str, finish_reason: str | None) -> tuple[str, list[ToolCall], str | None]:
        """Return the plain text of the next piece, the calls of tools, and the finish reason.

        All calls are returned with the last piece. The finish reason is None before the last piece; for an answer with
        calls, it is `tool_calls`.
        """
        content = self.push(piece)
        if finish_reason is None:
            return content, [], None
        ending, calls = self.finish()
        return content + ending, calls, "tool_calls" if calls else finish_reason

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that certainly belongs to no call."""
        if not self._names:
            return piece
        self._pending += piece
        # Smaller models write the JSON object of a call without a marker, so an answer that begins with { may be a
        # call. Such an answer is held back whole, since strings in the object may contain a marker.
        may_begin_object = not self._has_text and self._pending.lstrip()[:1] in ("{", "")
        if self._is_call or may_begin_object:
            return ""
        starts = [start for marker in _MARKERS if (start := self._pending.find(marker)) >= 0]
        if starts:
            self._is_call = True
            return self._release(min(starts))
        return self._release(len(self._pending) - _marker_length(self._pending))

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the text that was held back and belongs to no call, and the calls."""
        known = [(start, call) for start, call in _parse_calls(self._pending) if call.name in self._names]
        first_start = min((start for start, _ in known), default=len(self._pending))
        return self._release(first_start), [call for _, call in known]

    def _release(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._has_text = self._has_text or bool(text.strip())
        return text


def _marker_length(text: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a marker."""
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
    # The search continues after each call, because strings in the call's arguments may contain a marker.
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
    """Yield the call that a JSON value describes, if it describes a call."""
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
# Templates write arguments by `tojson`. With flexible whitespace, a small model might write spaces without an end.
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
        """Return the grammar of a call of one of the tools, for the part of the answer after its lead.

        Raises a `ValueError` for a tool whose name or parameters the grammar cannot express.

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
        return Grammar("lark", "\n".join([start, *calls]))


def find_call_format(
    template: data.ChatTemplate, messages: Sequence[JsonObject], options: JsonObject, ends: Iterable[str]
) -> ToolCallFormat | None:
    """Return the format in which a chat template writes an answer that calls a tool.

    To find the format, the template renders a call of a made-up tool as the answer to the messages. Returns None if the
    template refuses this call, or if the server cannot parse calls of the format.

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
    start, stop = spans[1]
    answer = text[start:stop]
    for end in filter(None, ends):
        answer = answer.partition(end)[0]
    answer = answer.rstrip()
    arguments, name_start = _PROBE_ARGUMENTS.search(answer), answer.find(_PROBE.name)
    if arguments is None or not 0 <= name_start < arguments.start():
        return None
    # The call begins at the first marker, or else at the name.
    markers = [position for marker in (*_MARKERS, "{") if 0 <= (position := answer.find(marker)) < name_start]
    call_start = min(markers, default=name_start)
    if _parse_calls(answer[call_start:]) != [(0, _PROBE)]:
        return None
    return ToolCallFormat(
        lead=answer[:call_start],
        before_name=answer[call_start:name_start],
        before_arguments=answer[name_start + len(_PROBE.name) : arguments.start()],
        after_arguments=answer[arguments.end() :],
    )


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
    """Return the Lark expression for a text: markers become token ids, and `_PROBE_ID` becomes a pattern of ids."""
    names = sorted(filter(None, [*marker_ids, _PROBE_ID]), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text)
    ids = {name: f"<[{number}]>" for name, number in marker_ids.items()} | {_PROBE_ID: "/[a-zA-Z0-9]{9}/"}
    return " ".join(ids.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)


def _arguments_schema(function: JsonObject) -> str:
    """Return the JSON schema of a tool's arguments as a text; raise a `ValueError` for a tool that cannot be called."""
    name, parameters = function["name"], function.get("parameters")
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        message = "use only letters, digits, _, - and . in its name"
        raise ValueError(f"tools: tool_choice cannot force a call of {name[:80]!r}; {message}")
    if parameters is None:
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f"tools: the parameters of {name[:80]} must be a JSON schema of the type object; correct them")
    return json.dumps({"type": "object"} | parameters | {"x-guidance": _SEPARATORS})
