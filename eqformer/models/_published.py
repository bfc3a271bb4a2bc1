"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax

from ..nn import has_shape, path_name, Transformer
from ._config import PublishedConfig
from ._families import build, FAMILIES, family_of
from ._family import Family, ModelConfig
from ._folder import CONFIG, Folder, read_json
from ._weights import Weight


def config_of(path: Path) -> tuple[Family, ModelConfig]:
    """The family that a folder's `config.json` names, and what it says in our words."""
    source = str(path / CONFIG)
    published = PublishedConfig(read_json(path / CONFIG), source)
    kind = published.take("model_type")
    known = {family.model_type: family for family in FAMILIES.values() if family.model_type}
    if kind not in known:
        raise ValueError(f"{source}: model_type={kind!r} is not known; the families are {', '.join(sorted(known))}.")
    config = known[kind].read(published)
    published.finish()
    return known[kind], config


def rules_of(folder: Folder, family: Family, config: ModelConfig, model: Transformer) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = family.rules(config, model), family.prefix
    if any(name.startswith(prefix) for name in folder.names):
        return rules
    return [dataclasses.replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def format_of(call: str, like: str | Path | None, config: ModelConfig | None) -> tuple[Family, ModelConfig]:
    """The family and the config of a model that came from a folder, or was built from a config."""
    if like is not None and config is None:
        return config_of(Path(like))
    if config is not None and like is None:
        family = family_of(call, config)
        if family.model_type is None:
            raise ValueError(f"{call}: {type(config).__name__} is a family that is published in no common format.")
        return family, config
    raise ValueError(f"{call}: give either the folder that the model is like=, or the config= it was built from.")


def check_shapes(call: str, model: Transformer, config: ModelConfig) -> None:
    """Raise a `ValueError` that names arrays where a model is not one of this config."""
    wanted = eqx.filter_eval_shape(lambda: build(config, key=jax.random.key(0)))
    own, its = _shapes(model), _shapes(wanted)
    if differing := [name for name in sorted(own.keys() | its.keys()) if own.get(name) != its.get(name)]:
        changes = "; ".join(f"{name}: {own.get(name)}, not {its.get(name)}" for name in differing[:4])
        raise ValueError(f"{call}: the model is not one of {config} ({changes}); give the one it was built from.")


def _shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {path_name(path): leaf.shape for path, leaf in leaves if has_shape(leaf)}
