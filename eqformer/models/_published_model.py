"""Which family a folder holds, and the rules of its arrays."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._read import read_json
from ..nn import has_shape, path_name, Transformer
from ._family import Family, ModelConfig
from ._folder import CONFIG, FLOATS, Folder, INDEX, SINGLE
from ._gguf_file import GGUF
from ._gguf_models import configuration_of, names_of
from ._multimodal import TEXT, Tower
from ._published_config import private_names, PublishedConfig
from ._registry import build, FAMILIES, family_of
from .formats import Format, read_format


# What wrappers put into the names of the modules that they hold (`torch.compile`, FSDP, checkpointing), and what data
# parallelism puts before all names.
_WRAPPERS, _PARALLEL = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"), "module"
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

    def own_names(self, names: Collection[str]) -> dict[str, str | None]:
        """Return what the family's table calls each array of a folder; None for one that is left unread.

        Names may have the prefixes of wrappers (`torch.compile`, data parallelism), and lack the base model's prefix,
        as in folders that were saved without a head. A head that stands alone, though it is tied, is the table.
        """
        if self.names is not None:
            return {name: self.names[name] for name in names}
        own = {name: self._text_name(_unwrapped(name)) for name in names}
        if self.lacks_prefix(names):
            add = lambda name: name if self._is_outside(name) else self.family.base_prefix + name
            own = {name: its and add(its) for name, its in own.items()}
        table, head = self.family.table_name, self.family.head_name
        if getattr(self.config, "tied", False) and table not in own.values():
            own = {name: table if its == head else its for name, its in own.items()}
        return {name: its if its and self._is_read(its) else None for name, its in own.items()}

    def lacks_prefix(self, names: Collection[str]) -> bool:
        """Return whether a folder's arrays are named as the base model's own, without the prefix of its class."""
        prefix, own = self.family.base_prefix, [self._text_name(_unwrapped(name)) for name in names]
        return bool(prefix) and not any(name is not None and name.startswith(prefix) for name in own)

    def notes_on(self, names: Collection[str]) -> tuple[str, ...]:
        """Return what to tell of the names of a folder's arrays, a line each."""
        if self.names is not None:
            return ()
        wrapped = [name for name in names if _unwrapped(name) != name]
        notes = (
            [f"prefixes of wrappers are left out of {len(wrapped)} names, such as {min(wrapped)}"] if wrapped else []
        )
        if self.lacks_prefix(names) and not self.family.is_bare:
            notes.append(f"the names are a base model's; {self.family.base_prefix} is put before them")
        return tuple(notes)

    def _text_name(self, name: str) -> str | None:
        return name if self.tower is None else self.tower.own_name(name)

    def _is_outside(self, name: str) -> bool:
        """Whether a name without the base model's prefix is that of an array outside the base model."""
        predictor = self.family.predictor
        words = {f"{rule.name.partition('.')[0]}." for rule in self.family.weights}
        others = () if predictor is None else (predictor.prefix_of(self.config),)
        return name.startswith((*words, *self.family.ignored_prefixes, *others))

    def _is_read(self, name: str) -> bool:
        predictor = self.family.predictor
        if predictor is not None and name.startswith(predictor.prefix_of(self.config)):
            return self.predictor
        return not self.family.is_unread(name, self.config)


def _unwrapped(name: str) -> str:
    """Return an array's name without what wrappers of torch put into it."""
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    while words[0] == _PARALLEL and len(words) > 1:
        words = words[1:]
    return ".".join(words)


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
    passed_over = ", ".join(private_names(said))
    notes = (f"{source}: private attributes are passed over: {passed_over}.",) if passed_over else ()
    description = Description(family, config, tower, said, _format(quantized, source), notes=notes)
    if (family.as_stored is None and not getattr(config, "tied", False)) or not has_weights(path):
        return description
    folder = Folder(path)
    if family.as_stored is not None:
        names = [own for own in description.own_names(folder.names).values() if own is not None]
        return dataclasses.replace(description, config=family.as_stored(config, names))
    return _untied(description, folder)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights that are read; a run's copy of a published folder has none."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def _untied(said: Description, folder: Folder) -> Description:
    """Give the config a head of its own where `config.json` ties it and the folder's head is not equal to the table.

    Transformers reads both too, and warns.
    """
    stored_of = {own: name for name, own in said.own_names(folder.names).items() if own is not None}
    table, head = (stored_of.get(name) for name in (said.family.table_name, said.family.head_name))
    if table is None or head is None or {folder.dtype_in_file(name) for name in (table, head)} - FLOATS.keys():
        return said
    one, other = folder.read(table), folder.read(head)
    if one.shape == other.shape and all(map(np.array_equal, one, other)):  # row by row, in little memory
        return said
    try:
        config = dataclasses.replace(said.config, tied=False)  # type: ignore[call-arg]
    except ValueError:
        return said  # the family has no other head than the table
    note = (
        f"{folder.call}: config.json ties the head to the table, and {head} is another array than {table}; both are "
        "read, as by transformers, and the model is not tied."
    )
    return dataclasses.replace(said, config=config, notes=(*said.notes, note))


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


def format_of(
    call: str, like: str | Path | None, config: ModelConfig | None, model: Transformer
) -> tuple[Family, ModelConfig]:
    """The family and the config of a model that came from a folder, or was built from a config.

    Without its weights a folder may say that a head is tied which is not: see `described`.
    """
    if like is not None and config is None:
        said = described(Path(like))
        if getattr(said.config, "tied", False) and model.head is not None and not has_weights(Path(like)):
            return said.family, dataclasses.replace(said.config, tied=False)  # type: ignore[call-arg]
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
