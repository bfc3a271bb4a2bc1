"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from ..nn import has_shape, path_name, Transformer
from ._config import Config
from ._families import build, FAMILIES, family_of, Numbers
from ._folder import CONFIG, Folder, read_json
from ._weights import Published, Weight


def numbers_of(path: Path) -> tuple[Published, Numbers]:
    """The family that a folder's `config.json` names, and its numbers there."""
    source = str(path / CONFIG)
    config = Config(read_json(path / CONFIG), source)
    kind = config.take("model_type")
    known = {family.published.model_type: family.published for family in FAMILIES.values() if family.published}
    if kind not in known:
        raise ValueError(f"{source}: model_type={kind!r} is not known; the families are {', '.join(sorted(known))}.")
    numbers = known[kind].read(config)
    config.finish()
    return known[kind], numbers


def rules_of(folder: Folder, published: Published, numbers: Numbers) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = published.weights(numbers), published.prefix
    if any(name.startswith(prefix) for name in folder.names):
        return rules
    return [dataclasses.replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def format_of(call: str, like: str | Path | None, numbers: Numbers | None) -> tuple[Published, Numbers]:
    """The format and the numbers of a model that came from a folder, or was built from numbers."""
    if like is not None and numbers is None:
        return numbers_of(Path(like))
    if numbers is not None and like is None:
        published = family_of(call, numbers).published
        if published is None:
            raise ValueError(f"{call}: {type(numbers).__name__} is a family that is published in no common format.")
        return published, numbers
    raise ValueError(f"{call}: give either the folder that the model is like=, or the numbers= it was built from.")


def check_shapes(call: str, model: Transformer, numbers: Numbers) -> None:
    """Raise a `ValueError` that names arrays where a model is not one of these numbers."""
    wanted = eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))
    own, its = _shapes(model), _shapes(wanted)
    if differing := [name for name in sorted(own.keys() | its.keys()) if own.get(name) != its.get(name)]:
        changes = "; ".join(f"{name}: {own.get(name)}, not {its.get(name)}" for name in differing[:4])
        raise ValueError(f"{call}: the model is not one of {numbers} ({changes}); give those it was built from.")


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {path_name(path): leaf.shape for path, leaf in leaves if has_shape(leaf)}
