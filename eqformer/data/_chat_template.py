"""Chat templates of published models: conversations as text, the replies in it, and settings of tokenizers."""

import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TYPE_CHECKING

from .._failures import foreign_call, load_extra
from .._files import is_there, JsonObject, JsonValue, read_json, read_utf8
from ._documents import digest


if TYPE_CHECKING:
    from ._template_sandbox import Piece


Message = Mapping[str, object]
Span = tuple[int, int]
_CONTINUATION_MARK = "EQFORMER_CONTINUES_HERE "
"""Mark that is written after a content to be continued; the mark's space shows whether a template trims spaces."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}


class ChatTemplate:
    """Chat template of a published tokenizer, run in Jinja's sandbox: a template reads only its arguments.

    `folder` contains the template as `chat_template.jinja` or in `tokenizer_config.json`, with the special tokens that
    the template may use by name. As in transformers 5, null tokens and null fields of a message are undefined in the
    template. `now` returns the date for templates that write the date; without `now`, templates have no date.

    A template is untrusted code. One rendering may take at most 2^20 steps and a second of processor time, and may
    create values of at most 2^22 characters. All three limits grow with the conversation.

    `fingerprint` is a text that changes when the template or its tokens change.

    **Raises:** `ValueError` if there is no template or it cannot be parsed; `ImportError` if `jinja2` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, now: Callable[[], datetime.datetime] | None = None):
        call = f"ChatTemplate({str(folder)!r})"
        settings = read_tokenizer_config(Path(folder))
        file, source = _find_template(Path(folder), settings)
        if source is None:
            raise ValueError(
                f"{call}: the folder has no chat_template.jinja, and its tokenizer_config.json has no chat_template; "
                "give the prompt as plain text."
            )
        load_extra("jinja2", extra="train", call=call)
        from ._template_sandbox import BoundedEnvironment

        self._file = file.name
        environment = BoundedEnvironment(now)
        with foreign_call(
            lambda reason: (
                f"{call}: the template in {file.name} cannot be read ({reason}); fetch it again, or correct it."
            )
        ):
            self._compiled = environment.compile_template(source)
        self._source, self._tokens = source, special_tokens(settings)
        self.fingerprint = digest([source, repr(sorted(self._tokens.items()))])

    def check_roles(self, messages: Sequence[Message], location: str) -> None:
        """Raise a `ValueError` for an unusual role that the template does not name.

        Many templates write any role into the text, or leave out a message with an unknown role, so that a typing error
        would go unnoticed. `location` begins the error.
        """
        for number, message in enumerate(messages):
            role = str(message.get("role"))
            is_named = f"'{role}'" in self._source or f'"{role}"' in self._source
            if role not in _ROLES and not is_named:
                name = _OTHER_NAMES.get(role.lower(), "one of them")
                raise ValueError(
                    f"{location}: message {number} has the role {role!r}, which the chat template does not name; roles "
                    f"are {', '.join(_ROLES)}: write {name}."
                )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: object,
    ) -> str:
        """Return the conversation as one text.

        Each message has a `role` (`system`, `user`, `assistant`) and a `content`. With `add_generation_prompt`, the
        text ends with the header of the assistant's next message. With `continue_final_message`, the text ends instead
        with the content of the final message, which is the beginning of an answer. `options` are further variables of
        the template (`enable_thinking=False`). The text contains the names of special tokens;
        `FileTokenizer.encode_prompt` encodes each name as its token. Raises a `ValueError` if the template refuses the
        conversation, exceeds a limit, or changes the content that is to be continued.
        """
        if continue_final_message:
            return self._render_unfinished(messages, **options)
        pieces = self._render_pieces(messages, add_generation_prompt=add_generation_prompt, **options)
        return "".join(piece.text for piece in pieces)

    def _render_unfinished(self, messages: Sequence[Mapping[str, object]], **options: object) -> str:
        """Return the conversation as a text that ends with the content of the final message.

        As in transformers, the content is rendered with a mark after it, and the text ends before the mark. The mark
        shows where the template writes the content, and whether it trims white space.
        """
        call = "ChatTemplate.render(continue_final_message=True)"
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise ValueError(
                f"{call}: the content of the final message is continued, but it is {content!r:.80}; let the "
                "conversation end with a message whose content is a text."
            )
        marked = [*messages[:-1], {**messages[-1], "content": content + _CONTINUATION_MARK}]
        pieces = self._render_pieces(marked, add_generation_prompt=False, **options)
        before, mark, after = "".join(piece.text for piece in pieces).rpartition(_CONTINUATION_MARK.strip())
        if not mark or content.strip() not in before:
            raise ValueError(
                f"{call}: the final message {content.strip()!r:.80} is continued, but the template in {self._file} "
                "writes that message in another way; leave out continue_final_message, or change the message."
            )
        return before if after.startswith(" ") else before.rstrip()

    def render_by_message(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> tuple[str, list[tuple[int, int] | None]]:
        """Return the conversation as one text, and where each message's text starts and stops in it, headers included.

        The text is the result of `render(messages, add_generation_prompt=False, **options)`. A message's text is the
        text that the template's loop over the messages writes in the iteration of this message. The start and stop are
        None for a message whose iteration writes no text, and for all messages of a template without such a loop.
        """
        spans: list[tuple[int, int] | None] = [None] * len(messages)
        pieces = self._render_pieces(messages, add_generation_prompt=False, **options)
        start = 0
        for text, message in pieces:
            stop = start + len(text)
            if message is not None and text:
                span = spans[message]
                spans[message] = (start if span is None else span[0], stop)
            start = stop
        return "".join(piece.text for piece in pieces), spans

    def _render_pieces(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool, **options: object
    ) -> "list[Piece]":
        without_nulls = [{name: value for name, value in message.items() if value is not None} for message in messages]
        variables = {**self._tokens, "tools": None, "documents": None}
        roles = ", ".join(str(message.get("role")) for message in messages[:20])
        fix = "change the messages, correct the template, or give a plain text instead of messages"
        call = f"ChatTemplate.render(messages): the template in {self._file}"  # The folder of a GGUF file is temporary.
        with foreign_call(lambda reason: f"{call} refuses messages of {roles} ({reason}); {fix}."):
            conversation = {"messages": without_nulls, "add_generation_prompt": add_generation_prompt}
            return self._compiled(variables | conversation | options)


# Replies are found in a rendered conversation.

# A text is compared with a generation prompt unit by unit. A unit is a name such as <think>, a word, or another single
# character, so that a reply that begins with "<" does not share the first character of "<think>".
_UNIT = re.compile(r"<[^<>\s]*>|\w+|.", re.DOTALL)


def find_replies(
    template: ChatTemplate, messages: Sequence[Message], **options: Any
) -> tuple[str, list[tuple[Span, Span] | None]]:
    """Return a rendered conversation, and two spans for each message of the assistant: the message and the reply.

    The first span covers the whole message, with its header. The second span begins after the generation prompt, at the
    first character that the model writes when it replies. A span is a start and a stop. All other messages have None,
    and so do messages of the assistant that the template leaves out.

    The conversation is rendered once, so the spans are right for templates that drop earlier reasoning, rewrite
    contents or join messages. If a template has no loop over the messages, its text of the first messages must be the
    beginning of its text of the whole conversation. Raises a `ValueError` if this rule is broken, or if the template
    refuses the conversation.
    """
    text, spans = template.render_by_message(messages, **options)
    is_traced = any(span is not None for span in spans)
    replies: list[tuple[Span, Span] | None] = [None] * len(messages)
    header = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not is_traced:
            spans[number] = _find_by_prefix(template, text, messages, number, options)
        elif _includes_results(messages, spans, number):
            spans[number] = _cut_results(template, text, messages, spans, number, options)
        if (span := spans[number]) is None:
            continue
        if not header or not text.startswith(header, span[0]):
            header = _find_header(template, text, messages[:number], span, options)
        starts_whole = text.startswith(header, span[0])
        shared = len(header) if starts_whole else _shared_length(header, text[slice(*span)])
        replies[number] = span, (span[0] + shared, span[1])
    return text, replies


def _includes_results(messages: Sequence[Message], spans: Sequence[Span | None], number: int) -> bool:
    """Return whether the span of a tool call may contain the tools' results, because these have no own spans."""
    following = number + 1
    return following < len(messages) and messages[following]["role"] == "tool" and spans[following] is None


def _cut_results(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    spans: Sequence[Span | None],
    number: int,
    options: Mapping[str, Any],
) -> Span | None:
    """Return the span of a tool call without the tools' results.

    The conversation is rendered again without the results, and the span ends where the two texts begin to differ. This
    is done twice, and the longer span counts. One rendering keeps the later messages, because templates drop reasoning
    before the user's last message. The other rendering ends at the call, because some templates refuse two replies in
    a row.
    """
    span = spans[number]
    if span is None:
        return None
    last_result = number
    while last_result + 1 < len(messages) and messages[last_result + 1]["role"] == "tool":
        last_result += 1
    start, stop = span
    shared, refusals = [], []
    for later in (messages[last_result + 1 :], ()):
        try:
            shorter, shorter_spans = template.render_by_message([*messages[: number + 1], *later], **options)
        except ValueError as error:
            refusals.append(error)
            continue
        if (shorter_span := shorter_spans[number]) is not None:
            shared.append(_shared_length(text[start:stop], shorter[slice(*shorter_span)]))
    if len(refusals) == 2:
        raise refusals[0]
    return (start, start + max(shared)) if shared else span


def _find_header(
    template: ChatTemplate, text: str, previous: Sequence[Message], span: Span, options: Mapping[str, Any]
) -> str:
    """Return the header that asks the model for its reply, which the template writes after the previous messages.

    Usually the message begins with this header. If the template drops earlier reasoning, the message may begin with a
    part of the header, without a name such as <think>. Some templates refuse previous messages that contain no
    question; then a made-up question comes before the header.
    """
    start, stop = span
    question = {"role": "user", "content": "?"}
    try:
        previous = previous or [question]
        prompt = template.render(previous, **options)
    except ValueError:
        if any(message["role"] == "user" for message in previous):
            raise
        previous = [*previous, question]
        prompt = template.render(previous, **options)
    if text.startswith(prompt) and start <= len(prompt) <= stop:
        return text[start : len(prompt)]
    without_header = template.render(previous, add_generation_prompt=False, **options)
    return prompt[_shared_length(prompt, without_header) :]


def _find_by_prefix(
    template: ChatTemplate, text: str, messages: Sequence[Message], number: int, options: Mapping[str, Any]
) -> Span:
    """Return the span of a message as the difference between a rendering without and a rendering with the message."""
    before = template.render(messages[:number], add_generation_prompt=False, **options) if number else ""
    through = template.render(messages[: number + 1], add_generation_prompt=False, **options)
    if not (text.startswith(through) and through.startswith(before)):
        raise ValueError(
            f"the chat template has no loop over the messages, and its text of {len(messages)} messages does not begin "
            f"with its text of the first {number + 1}, so the replies' places are unknown; train on all tokens "
            "(loss_on='all'), or write the template as a loop over `messages`."
        )
    return len(before), len(through)


def _shared_length(first: str, second: str) -> int:
    """Return the number of characters of the common beginning of two texts, in whole names and words."""
    length = 0
    for first_unit, second_unit in zip(_UNIT.finditer(first), _UNIT.finditer(second)):
        if first_unit[0] != second_unit[0]:
            break
        length = first_unit.end()
    return length


# Files of published tokenizers.


def read_special_tokens(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the named special tokens of a published tokenizer, such as `{"bos_token": "<s>"}`."""
    return special_tokens(read_tokenizer_config(Path(folder)))


def has_chat_template(folder: str | os.PathLike[str]) -> bool:
    """Return whether a published tokenizer has a chat template."""
    return _find_template(Path(folder), read_tokenizer_config(Path(folder)))[1] is not None


def _find_template(folder: Path, settings: JsonObject) -> tuple[Path, str | None]:
    """Return the template's file and text (None without a template); of several templates, the template named
    default."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        return file, read_utf8(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder / _CONFIG_FILE)
    if not isinstance(template, str | None):
        raise ValueError(
            f"{folder / _CONFIG_FILE}: chat_template must be a text, or a list of texts with names, but is "
            f"{type(template).__name__}."
        )
    return folder / _CONFIG_FILE, template


def _default_template(templates: list[JsonValue], file: Path) -> JsonValue:
    """Return the template named default in a list of `{"name": ..., "template": ...}`, or None."""
    for entry in templates:
        match entry:
            case {"name": str(), "template": _}:
                continue
            case _:
                raise ValueError(
                    f"{file}: each entry of the list chat_template must have a name and a template, but one entry is "
                    f"{str(entry)[:100]!r}."
                )
    return next((entry["template"] for entry in templates if entry["name"] == "default"), None)


_CONFIG_FILE, _OLDER_FILE = "tokenizer_config.json", "special_tokens_map.json"


def read_tokenizer_config(folder: Path) -> JsonObject:
    """Return the settings in `tokenizer_config.json` and, in older folders, in `special_tokens_map.json`.

    Raises a `ValueError` if a file is not a JSON object.
    """
    settings = _read_optional(folder / _CONFIG_FILE)
    # Newer versions of transformers write `added_tokens_decoder`, and then read only `tokenizer_config.json`.
    return settings if "added_tokens_decoder" in settings else settings | _read_optional(folder / _OLDER_FILE)


def special_tokens(settings: JsonObject) -> dict[str, str]:
    """Return the special tokens by name, as in transformers: `bos_token` and the like, and the model's own tokens.

    Null tokens are left out, so that a template writes nothing for them. Settings that are not text, such as
    `add_bos_token`, are no tokens.
    """
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    for setting in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(model_tokens := settings.get(setting), dict):
            named |= model_tokens
    return {name: text for name, value in named.items() if (text := _token_text(value)) is not None}


def _token_text(value: JsonValue) -> str | None:
    """Return the text of a token, which is a text or an object with its content; None for other settings."""
    match value:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _read_optional(file: Path) -> JsonObject:
    return read_json(file) if is_there(file) else {}
