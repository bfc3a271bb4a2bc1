"""Chat templates of published models, which render conversations as text, and the tokenizer settings they use."""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._failures import foreign_call, load_extra
from .._files import is_there, JsonObject, JsonValue, read_json, read_utf8
from ._documents import digest


if TYPE_CHECKING:
    from ._template_sandbox import Piece


class ChatTemplate:
    """Chat template of a published tokenizer, run in Jinja's sandbox, with access to its arguments only.

    `folder` contains the template as `chat_template.jinja` or in `tokenizer_config.json`, with the special tokens that
    the template may use by name. As in transformers 5, null tokens and null fields of a message are undefined in the
    template. `now` returns the date for templates that write it; without `now` they have no date.

    A template is untrusted code: one rendering takes at most 2^20 steps and a second of processor time, and creates
    values of at most 2^22 characters; all three limits grow with a long conversation.

    `fingerprint` is a text that changes when the template or its tokens change.

    **Raises:** `ValueError` if there is no template or it cannot be parsed; `ImportError` if `jinja2` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, now: Callable[[], datetime.datetime] | None = None):
        call = f"ChatTemplate({str(folder)!r})"
        settings = read_tokenizer_config(Path(folder))
        file, source = _find_template(Path(folder), settings)
        if source is None:
            raise ValueError(
                f"{call}: the folder has no chat_template.jinja, and its tokenizer_config.json no chat_template; give "
                "the prompt as plain text."
            )
        load_extra("jinja2", extra="train", call=call)
        from ._template_sandbox import BoundedEnvironment

        self._description = f"{call}: the template in {file.name}"
        environment = BoundedEnvironment(now)
        with foreign_call(
            lambda reason: f"{self._description} cannot be read ({reason}); fetch it again, or correct it."
        ):
            self._compiled = environment.compile_template(source)
        self._tokens = special_tokens(settings)
        self.fingerprint = digest([source, repr(sorted(self._tokens.items()))])

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **options: object
    ) -> str:
        """Return the conversation as one text.

        Each message has a `role` (`system`, `user`, `assistant`) and a `content`. With `add_generation_prompt`, the
        text ends with the header of the assistant's next message. `options` are further variables of the template
        (`enable_thinking=False`). The text names special tokens; `FileTokenizer.encode_prompt` encodes the names as the
        tokens. Raises a `ValueError` if the template refuses the conversation, or exceeds a limit.
        """
        pieces = self._render_pieces(messages, add_generation_prompt=add_generation_prompt, **options)
        return "".join(piece.text for piece in pieces)

    def render_by_message(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> tuple[str, list[tuple[int, int] | None]]:
        """Return the conversation as one text, and where each message's text starts and stops in it, headers included.

        The text is that of `render(messages, add_generation_prompt=False, **options)`. A message's text is what the
        template's loops over the messages write in the iteration of this message. It is None for a message for which
        no iteration writes text, and for all messages of a template that has no loop over the messages themselves.
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
        with foreign_call(lambda reason: f"{self._description} refuses messages of {roles} ({reason}); {fix}."):
            conversation = {"messages": without_nulls, "add_generation_prompt": add_generation_prompt}
            return self._compiled(variables | conversation | options)


def read_special_tokens(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the named special tokens of a published tokenizer, such as `{"bos_token": "<s>"}`."""
    return special_tokens(read_tokenizer_config(Path(folder)))


def has_chat_template(folder: str | os.PathLike[str]) -> bool:
    """Return whether a published tokenizer has a chat template."""
    return _find_template(Path(folder), read_tokenizer_config(Path(folder)))[1] is not None


def _find_template(folder: Path, settings: JsonObject) -> tuple[Path, str | None]:
    """Return the template's file and text (None without a template); of several, the template named default."""
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
                    f"{file}: each template of the list chat_template must have a name and a template, but one is "
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
    """Return the named special tokens (name -> text), as in transformers: `bos_token` and others, and the model's.

    Null tokens are excluded: they are undefined in a template, which writes nothing for them. Settings that are not
    text, such as `add_bos_token`, are not tokens.
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
