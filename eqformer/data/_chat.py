"""Conversations as text, by the chat template that a model was published with."""

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._extra import load_extra
from .._read import is_there, read_utf8
from ._settings import CONFIG, settings_of, special_tokens


class ChatTemplate:
    """The chat template of a published tokenizer, run in Jinja's sandbox, with access to its arguments only.

    `folder` holds it as `chat_template.jinja` or in `tokenizer_config.json`, with the special tokens that the template
    may use by name. As in transformers 5, null tokens and null fields of a message are undefined in the template. `now`
    gives the date to templates that write it; without `now` they have no date. **Raises:** `ValueError` if there is no
    template or it cannot be parsed; `ImportError` if `jinja2` is absent.
    """

    def __init__(self, folder: str | os.PathLike[str], *, now: Callable[[], datetime.datetime] | None = None):
        call = f"ChatTemplate({str(folder)!r})"
        settings = settings_of(Path(folder))
        source = _source(Path(folder), settings)
        if source is None:
            raise ValueError(
                f"{call}: the folder has no chat_template.jinja, and its tokenizer_config.json no chat_template; give "
                "the prompt as plain text."
            )
        sandbox = load_extra("jinja2.sandbox", extra="train", call=call)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation(call)]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        if now is not None:
            environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2's own exceptions cannot be named where jinja2 is not imported
            raise ValueError(f"{call}: the template cannot be read ({error}); fetch it again.") from error
        self._names = special_tokens(settings)
        self._call = call

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **options: Any) -> str:
        """The conversation as one text; with `answer`, it ends with the header of the assistant's next message.

        Each message has a `role` (`system`, `user`, `assistant`) and a `content`. `options` are the template's own
        (`enable_thinking=False`). Special tokens stand in the text by name; `FileTokenizer.encode_prompt` encodes them
        as themselves. Raises a `ValueError` if the template refuses the conversation.
        """
        said = [{name: value for name, value in message.items() if value is not None} for message in messages]
        given = {"messages": said, "add_generation_prompt": answer}
        try:
            return self._template.render({**self._names, "tools": None, "documents": None, **given, **options})
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"{self._call}: the template refuses messages of {roles} ({error}).") from error


def has_chat_template(folder: str | os.PathLike[str]) -> bool:
    """Whether a published tokenizer comes with a chat template."""
    return _source(Path(folder), settings_of(Path(folder))) is not None


def _source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's text, or None; of several named templates the one called default."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        return read_utf8(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder / CONFIG)
    if not isinstance(template, str | None):
        raise ValueError(
            f"{folder / CONFIG}: chat_template must be a text, or a list of texts with names, but is "
            f"{type(template).__name__}."
        )
    return template


def _default_template(templates: list[Any], file: Path) -> Any:
    """Return the template that is called default in a list of `{"name": ..., "template": ...}`, or None."""
    for entry in templates:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "template" not in entry:
            raise ValueError(
                f"{file}: each template of the list chat_template must have a name and a template, but one is "
                f"{str(entry)[:100]!r}."
            )
    return next((entry["template"] for entry in templates if entry["name"] == "default"), None)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _generation(call: str) -> Any:
    """The Jinja tag `{% generation %}`, which marks text to train on: here it renders its content and nothing else."""
    ext = load_extra("jinja2.ext", extra="train", call=call)
    nodes = load_extra("jinja2.nodes", extra="train", call=call)

    class Generation(ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
