"""Models written as they are published, for transformers and whoever else reads such folders."""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..nn import Transformer
from ._families import build, Numbers
from ._folder import CONFIG, read_json, write_folder
from ._published import numbers_of, published_of
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
    numbers: Numbers | None = None,
    attributes: Mapping[str, Any] = _NOTHING,
    files: Mapping[str, str | bytes] = _NOTHING,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers loads; it appears whole or not at all, and replaces nothing.

    `like` is the published folder that the model came from: its configuration is kept as it is, and its tokenizer,
    chat template and settings for sampling are copied. A model that came from none has `numbers`, those it was built
    from. `attributes` join the configuration (`eos_token_id`), and `files` the folder, by name. Raises a `ValueError`
    before anything is written: where something is at `path`, and where the model is not one of these numbers.
    """
    target, call = Path(path), f"save(model, {str(path)!r})"
    if target.exists():
        raise ValueError(f"{call}: something is there already; give a new folder.")
    if (like is None) == (numbers is None):
        raise ValueError(f"{call}: give either the folder that the model is like=, or the numbers= it was built from.")
    if numbers is not None:
        published = published_of(numbers)
        config = {"architectures": [published.architecture], "model_type": published.model_type}
        config |= published.write(numbers)
    else:
        source = Path(like or "")
        published, numbers = numbers_of(source)
        config = {name: value for name, value in read_json(source / CONFIG).items() if name not in _DTYPES}
        files = {name: (source / name).read_bytes() for name in COMPANIONS if (source / name).exists()} | dict(files)
    _check_shapes(call, model, numbers)
    rules = published.weights(numbers)
    config |= {_DTYPES[0]: str(rules[0].leaves(model)[0].dtype), **attributes}
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    part.mkdir()
    try:
        write_folder(part, _arrays(rules, model), config, shard_bytes)
        for name, content in files.items():
            (part / name).write_bytes(content.encode() if isinstance(content, str) else content)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _companions(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in COMPANIONS if (path / name).exists()}


def _check_shapes(call: str, model: Transformer, numbers: Numbers) -> None:
    wanted = eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    own, its = _shapes(eqx.filter(model, eqx.is_array)), _shapes(eqx.filter(wanted, is_shape))
    if differing := [name for name in sorted(own.keys() | its.keys()) if own.get(name) != its.get(name)]:
        told = "; ".join(f"{name}: {own.get(name)}, not {its.get(name)}" for name in differing[:4])
        raise ValueError(f"{call}: the model is not one of {numbers} ({told}); give those it was built from.")


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def _arrays(rules: list[Weight], model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    for rule in rules:
        leaves = rule.leaves(model)
        for place, name in rule.places(leaves[0]):
            yield name, rule.to_published([np.asarray(leaf[place] if place else leaf) for leaf in leaves])
