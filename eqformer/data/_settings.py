"""The settings of a published tokenizer, as far as a chat template uses them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._read import is_there, read_json


CONFIG, OLDER_NAMES = "tokenizer_config.json", "special_tokens_map.json"


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings in `tokenizer_config.json` and, in older folders, in `special_tokens_map.json`.

    Raises a `ValueError` if a file is no JSON object.
    """
    settings = _read_if_there(folder / CONFIG)
    # Newer versions of transformers write `added_tokens_decoder`, and then read this file only.
    return settings if "added_tokens_decoder" in settings else settings | _read_if_there(folder / OLDER_NAMES)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (name -> text), as in transformers: `bos_token` and the like, and a model's own.

    Null tokens are left out: they are undefined in a template, which writes nothing for them. Settings that are not
    text, such as `add_bos_token`, are not tokens.
    """
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    for of_model in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(its := settings.get(of_model), dict):
            named |= its
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if is_there(file) else {}
