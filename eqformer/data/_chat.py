"""Conversations as text, by the chat template that a model was published with."""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._extra import load_extra
from .._failures import foreign_call
from .._read import is_there, read_utf8
from ._settings import CONFIG, settings_of, special_tokens


class ChatTemplate:
    """The chat template of a published tokenizer, run in Jinja's sandbox, with access to its arguments only.

    `folder` holds it as `chat_template.jinja` or in `tokenizer_config.json`, with the special tokens that the template
    may use by name. As in transformers 5, null tokens and null fields of a message are undefined in the template. `now`
    gives the date to templates that write it; without `now` they have no date. A template is the code of a stranger:
    one rendering takes at most 2^20 steps and a second of processor time, and makes values of at most 2^22 characters,
    all three more for a long conversation. **Raises:** `ValueError` if there is no template or it cannot be parsed;
    `ImportError` if `jinja2` is absent.
    """

    def __init__(self, folder: str | os.PathLike[str], *, now: Callable[[], datetime.datetime] | None = None):
        call = f"ChatTemplate({str(folder)!r})"
        settings = settings_of(Path(folder))
        file, source = _source(Path(folder), settings)
        if source is None:
            raise ValueError(
                f"{call}: the folder has no chat_template.jinja, and its tokenizer_config.json no chat_template; give "
                "the prompt as plain text."
            )
        load_extra("jinja2", extra="train", call=call)
        from ._sandbox import BoundedEnvironment

        self._template = f"{call}: the template in {file.name}"
        environment = BoundedEnvironment(now)
        with foreign_call(lambda reason: f"{self._template} cannot be read ({reason}); fetch it again."):
            self._render = environment.parsed(source)
        self._tokens = special_tokens(settings)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **options: Any) -> str:
        """Return the conversation as one text; with `answer`, it ends with the header of the assistant's next message.

        Each message has a `role` (`system`, `user`, `assistant`) and a `content`. `options` are the template's own
        (`enable_thinking=False`). Special tokens stand in the text by name; `FileTokenizer.encode_prompt` encodes them
        as themselves. Raises a `ValueError` if the template refuses the conversation, or exceeds a limit.
        """
        present = [{name: value for name, value in message.items() if value is not None} for message in messages]
        variables = {**self._tokens, "tools": None, "documents": None}
        roles = ", ".join(str(message.get("role")) for message in messages[:20])
        with foreign_call(lambda reason: f"{self._template} refuses messages of {roles} ({reason})."):
            return self._render(variables | {"messages": present, "add_generation_prompt": answer} | options)


def has_chat_template(folder: str | os.PathLike[str]) -> bool:
    """Whether a published tokenizer comes with a chat template."""
    return _source(Path(folder), settings_of(Path(folder)))[1] is not None


def _source(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, str | None]:
    """Return the template's file and text, or None; of several named templates the one called default."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        return file, read_utf8(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder / CONFIG)
    if not isinstance(template, str | None):
        raise ValueError(
            f"{folder / CONFIG}: chat_template must be a text, or a list of texts with names, but is "
            f"{type(template).__name__}."
        )
    return folder / CONFIG, template


def _default_template(templates: list[Any], file: Path) -> Any:
    """Return the template that is called default in a list of `{"name": ..., "template": ...}`, or None."""
    for entry in templates:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "template" not in entry:
            raise ValueError(
                f"{file}: each template of the list chat_template must have a name and a template, but one is "
                f"{str(entry)[:100]!r}."
            )
    return next((entry["template"] for entry in templates if entry["name"] == "default"), None)
