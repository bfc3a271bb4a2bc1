"""Saves models in the published format, for transformers and other programs that read such folders."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..nn import LoRA, modules, Transformer
from ._family import ModelConfig
from ._folder import CONFIG, new_folder, read_json, write_folder
from ._published import check_shapes, format_of
from ._weights import Weight


# What a published folder holds beside its configuration and weights.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_DTYPES = "torch_dtype", "dtype"  # the older name is read by all
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def save(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    config: ModelConfig | None = None,
    attributes: Mapping[str, Any] = _NOTHING,
    files: Mapping[str, str | bytes] = _NOTHING,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers loads; the folder is written atomically.

    Args:
        model: The model.
        path: The folder, which must not exist yet.
        like: The published folder that the model came from: its configuration, tokenizer, chat template and sampling
            settings are copied.
        config: For a model that was built here, the config that it was built from.
        attributes: What is added to the configuration (`eos_token_id`).
        files: Files that are added to the folder, by name.
        shard_bytes: The size above which weights are written as several files.

    Raises a `ValueError` before anything is written: if `path` exists, if the model has `LoRA`s or is not of this
    config, and if the format cannot express a field of its config.
    """
    target, call = Path(path), f"save(model, {str(path)!r})"
    if target.exists():
        raise ValueError(f"{call}: something is there already; give a new folder.")
    if modules(model, LoRA):
        raise ValueError(f"{call}: the model has LoRAs; nn.merge_lora it, or save_adapter.")
    family, config = format_of(call, like, config)
    if like is None:
        said = {"architectures": [family.architecture], "model_type": family.model_type} | family.write(config)
    else:
        said = {name: value for name, value in read_json(Path(like) / CONFIG).items() if name not in _DTYPES}
        files = _companions(Path(like)) | dict(files)
    check_shapes(call, model, config)
    rules = family.rules(config, model)
    said |= {_DTYPES[0]: str(rules[0].leaves(model)[0].dtype), **attributes}
    with new_folder(target) as part:
        write_folder(part, published_arrays(rules, model), said, shard_bytes)
        for name, content in files.items():
            (part / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _companions(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in COMPANIONS if (path / name).exists()}


def published_arrays(rules: list[Weight], model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """Each array that is published of a model, by its name there."""
    for rule in rules:
        leaves = rule.leaves(model)
        for place, name in rule.places(leaves[0]):
            yield name, rule.to_published([np.asarray(leaf[place] if place else leaf) for leaf in leaves])
