"""The settings of a published tokenizer, as far as a chat template uses them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


CONFIG, OLDER_NAMES = "tokenizer_config.json", "special_tokens_map.json"


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings in `tokenizer_config.json` and, in older folders, in `special_tokens_map.json`.

    Raises a `ValueError` if a file is not JSON.
    """
    found = _object(folder / CONFIG)
    # Newer versions of transformers write `added_tokens_decoder`, and then read this file only.
    return found if "added_tokens_decoder" in found else found | _object(folder / OLDER_NAMES)


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


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file}: it is no JSON that can be read ({error}).") from None
    return found if isinstance(found, dict) else {}
