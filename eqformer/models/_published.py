"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from collections.abc import Set
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from ..nn import has_shape, path_name, Transformer
from ._config import PublishedConfig
from ._families import build, FAMILIES, family_of
from ._family import Family, ModelConfig
from ._folder import CONFIG, read_json
from ._towers import TEXT, Tower
from ._weights import Weight


@dataclasses.dataclass(frozen=True)
class Description:
    """What a folder's `config.json` says in our words."""

    family: Family
    config: ModelConfig
    tower: Tower | None
    """The whole of which the family is the text model; None where it stands alone."""
    said: dict[str, Any]
    """The attributes as they stand there."""

    def own_name(self, name: str) -> str | None:
        """What the family's table calls an array of the folder; None for one that is left unread."""
        if self.tower is not None:
            own = self.tower.own_name(name)
            return None if own is None or own.startswith(self.family.ignored_prefixes) else own
        return None if name.startswith(self.family.ignored_prefixes) else name


def described(path: Path) -> Description:
    """What the `config.json` of a folder says; raises a `ValueError` for what no family has."""
    source, said = str(path / CONFIG), read_json(path / CONFIG)
    published = PublishedConfig(said, source)
    family, tower = _named(published)
    if tower is not None:
        published = PublishedConfig(tower.attributes(published), f"{source}: {TEXT}")
    config = family.read(published)
    published.finish()
    return Description(family, config, tower, said)


def _named(published: PublishedConfig) -> tuple[Family, Tower | None]:
    """The family that a configuration names, and the whole of which it is the text model."""
    kind = published.take("model_type")
    known = {family.model_type: family for family in FAMILIES.values() if family.model_type}
    if kind in known:
        return known[kind], None
    towers = {
        (tower.model_type, tower.text_type or str(family.model_type)): (family, tower)
        for family in FAMILIES.values()
        for tower in family.towers
    }
    texts = {text: found for (whole, text), found in towers.items() if whole == kind}
    if not texts:
        wholes = sorted({whole for whole, _ in towers})
        published.refuse(
            f"model_type={kind!r} is not known; the families are {', '.join(sorted(known))}, and text models are read "
            f"of {', '.join(wholes)}."
        )
    text = published.nested(TEXT).get("model_type") or (next(iter(texts)) if len(texts) == 1 else None)
    if text not in texts:
        published.refuse(f"{TEXT}: model_type={text!r} is not known; of {kind!r} there are {', '.join(sorted(texts))}.")
    return texts[text]


def rules_of(names: Set[str], family: Family, config: ModelConfig, model: Transformer) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = family.rules(config, model), family.prefix
    if any(name.startswith(prefix) for name in names):
        return rules
    return [dataclasses.replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def format_of(call: str, like: str | Path | None, config: ModelConfig | None) -> tuple[Family, ModelConfig]:
    """The family and the config of a model that came from a folder, or was built from a config."""
    if like is not None and config is None:
        said = described(Path(like))
        return said.family, said.config
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
