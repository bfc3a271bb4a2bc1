"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from .._read import read_json
from ..nn import has_shape, path_name, Transformer
from ._config import private_names, PublishedConfig
from ._families import build, FAMILIES, family_of
from ._family import Family, ModelConfig
from ._folder import CONFIG, FLOATS, Folder, INDEX, SINGLE
from ._gguf import GGUF
from ._gguf_models import configuration_of, names_of
from ._towers import TEXT, Tower
from ._weights import Stored, Weight
from .formats import Format, read_format


QUANTIZATION_KEYS, DTYPES = ("quantization_config", "compression_config"), ("dtype", "torch_dtype")


@dataclasses.dataclass(frozen=True)
class Description:
    """What a folder's `config.json` says in our words."""

    family: Family
    config: ModelConfig
    tower: Tower | None
    """The whole of which the family is the text model; None where it stands alone."""
    said: dict[str, Any]
    """The attributes as they stand there."""
    format: Format | None = None
    """Of arrays that are stored in fewer bits."""
    names: Mapping[str, str] | None = None
    """What the family's table calls each array, of a file with names of its own."""
    predictor: bool = False
    """Whether what predicts a further token is read too."""
    notes: tuple[str, ...] = ()
    """What `load` tells of the configuration, a line each."""

    @property
    def dtype(self) -> str:
        """That of decoded arrays, as JAX calls it: the model's own, bfloat16 where nothing is said."""
        found = [holder.get(name) for holder in (self.said, self.said.get(TEXT) or {}) for name in DTYPES]
        return next((str(its) for its in found if its in FLOATS.values()), "bfloat16")

    def own_name(self, name: str) -> str | None:
        """What the family's table calls an array of the folder; None for one that is left unread."""
        if self.names is not None:
            return self.names[name]
        table = self.family.predictor
        if table is not None and name.startswith(table.prefix_of(self.config)):
            return name if self.predictor else None
        if self.tower is not None:
            own = self.tower.own_name(name)
            return None if own is None or self.family.is_unread(own, self.config) else own
        return None if self.family.is_unread(name, self.config) else name


def described(path: Path, file: GGUF | None = None) -> Description:
    """What the `config.json` of a folder says, or one `file`; raises a `ValueError` for what no family has."""
    if file is not None or path.is_file():
        file = GGUF(path) if file is None else file
        said = configuration_of(file)
        published = PublishedConfig(said, str(path))
        family, _ = _named(published)
        config = family.read(published)
        published.finish()
        return Description(family, config, None, said, names=names_of(file))
    source, said = str(path / CONFIG), read_json(path / CONFIG)
    published = PublishedConfig({name: its for name, its in said.items() if name not in QUANTIZATION_KEYS}, source)
    family, tower = _named(published)
    quantized = [said.get(name) for name in QUANTIZATION_KEYS]
    if tower is not None:
        text = tower.attributes(published)
        quantized += [text.pop(name, None) for name in QUANTIZATION_KEYS]
        published = PublishedConfig(text, f"{source}: {TEXT}")
    config = family.read(published)
    published.finish()
    if family.as_stored is not None and any((path / name).exists() for name in (SINGLE, INDEX)):
        config = family.as_stored(config, Folder(path).names)
    passed_over = ", ".join(private_names(said))
    notes = (f"{source}: private attributes are passed over: {passed_over}.",) if passed_over else ()
    return Description(family, config, tower, said, _format(quantized, source), notes=notes)


def _format(quantized: list[Any], source: str) -> Format | None:
    found = [its for its in quantized if its]
    if not found:
        return None
    if not isinstance(found[0], dict) or any(its != found[0] for its in found):
        raise ValueError(f"{source}: {QUANTIZATION_KEYS[0]}: it must be one object, and is {found}.")
    return read_format(PublishedConfig(found[0], f"{source}: {QUANTIZATION_KEYS[0]}", "this format"))


def _named(published: PublishedConfig) -> tuple[Family, Tower | None]:
    """The family that a configuration names, and the whole of which it is the text model."""
    kind = published.text("model_type")
    families = [family for family in FAMILIES.values() if family.model_type]
    known = {str(name): family for family in families for name in (family.model_type, *family.aliases)}
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
    if not isinstance(text, str) or text not in texts:
        published.refuse(f"{TEXT}: model_type={text!r} is not known; of {kind!r} there are {', '.join(sorted(texts))}.")
    return texts[text]


def rules_of(stored: Stored, said: Description, model: Transformer) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = said.family.rules(said.config, model, stored, said.tower), said.family.prefix
    if any(name.startswith(prefix) for name in stored):
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
    has_predictor = model.predictor is not None
    wanted = eqx.filter_eval_shape(lambda: build(config, predictor=has_predictor, key=jax.random.key(0)))
    own, its = _shapes(model), _shapes(wanted)
    if differing := [name for name in sorted(own.keys() | its.keys()) if own.get(name) != its.get(name)]:
        changes = "; ".join(f"{name}: {own.get(name)}, not {its.get(name)}" for name in differing[:4])
        raise ValueError(f"{call}: the model is not one of {config} ({changes}); give the one it was built from.")


def _shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {path_name(path): leaf.shape for path, leaf in leaves if has_shape(leaf)}
