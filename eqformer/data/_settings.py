"""The settings beside a published tokenizer, as far as a chat template finds them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


CONFIG, OLDER_NAMES = "tokenizer_config.json", "special_tokens_map.json"


def settings_of(folder: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says, with what older folders say apart; raises a `ValueError` for no JSON."""
    found = _object(folder / CONFIG)
    # Later versions of transformers list all added tokens, and look nowhere else.
    return found if "added_tokens_decoder" in found else found | _object(folder / OLDER_NAMES)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have a name of their own, as in transformers: `bos_token`, and what a model adds.

    What is null has no name: a template finds it undefined and writes nothing for it. A setting such as
    `add_bos_token`, which is no text, is no token.
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
