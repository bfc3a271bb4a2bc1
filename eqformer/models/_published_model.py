"""Published models: the family of a folder or GGUF file, and the name of each array in the family's table."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from .._files import JsonObject, read_json
from ..nn import Transformer, without_head
from ._config_types import private_names, PublishedConfig
from ._family import Classifier, classifier_of, Family, ModelConfig, MultimodalModel, names_classifier, TEXT
from ._folder import CONFIG, FLOATS, Folder, INDEX, MODELOPT, SINGLE
from ._gguf_encoders import has_classifier
from ._gguf_file import GGUF
from ._gguf_models import configuration_of, model_type_of, table_names_of
from ._registry import FAMILIES, family_of, shapes as model_shapes
from ._weight_rules import flatten_model
from .formats import Format, read_format


# Words that wrappers (`torch.compile`, FSDP, activation checkpointing) insert into the names of wrapped modules, and
# the word that data parallelism puts before all names.
_WRAPPERS, _DATA_PARALLEL = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"), "module"
QUANTIZATION_KEYS, DTYPE_KEYS = ("quantization_config", "compression_config"), ("dtype", "torch_dtype")


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A published model before any array is read: its family, its config, its format, and the names of its arrays."""

    family: Family
    config: ModelConfig
    multimodal: MultimodalModel | None
    """The multimodal model that contains this text model; None for a text model of its own."""
    attributes: JsonObject
    """The attributes of `config.json`."""
    format: Format | None = None
    """The format of quantized arrays."""
    table_name_of: Mapping[str, str | None] | None = None
    """For GGUF files: the name that the family's table gives to each array. None: the file is a published folder."""
    predictor: bool = False
    """Whether a predictor, the module for multi-token prediction, is read too."""
    notes: tuple[str, ...] = ()
    """Warnings about the configuration, a line each."""
    classifier: Classifier | None = None
    """The model's classifier of texts or tokens; None: the model is a language model or a base model."""

    @property
    def dtype(self) -> str:
        """The JAX name of the dtype of decoded arrays, from the configuration; bfloat16 if it states no dtype."""
        holders = (self.attributes, self.attributes.get(TEXT) or {})
        dtypes = [holder.get(name) for holder in holders for name in DTYPE_KEYS]
        return next((str(dtype) for dtype in dtypes if dtype in FLOATS.values()), "bfloat16")

    def table_names(self, names: Collection[str]) -> dict[str, str | None]:
        """Return the name that the family's table gives to each array of a folder; None for an array left unread.

        The folder's names may have the prefixes of wrappers (`torch.compile`, data parallelism), and may lack the base
        model's prefix, as in folders that were saved without a head. If the head is tied to the embedding table and
        only the head is stored, the head is read as the table.
        """
        if self.table_name_of is not None:
            return {name: self.table_name_of[name] for name in names}
        table_names = {name: self._text_name(_unwrap_name(name)) for name in names}
        if self.lacks_prefix(names):
            table_names = {
                name: table_name and self._add_prefix(table_name) for name, table_name in table_names.items()
            }
        table, head = self.family.table_name, self.family.head_name
        if getattr(self.config, "tied", False) and table not in table_names.values():
            table_names = {
                name: table if table_name == head else table_name for name, table_name in table_names.items()
            }
        return {
            name: table_name if table_name and self._is_read(table_name) else None
            for name, table_name in table_names.items()
        }

    def lacks_prefix(self, names: Collection[str]) -> bool:
        """Return whether a folder's names lack the base model's prefix, as in folders of a base model without a
        head."""
        prefix = self.family.base_prefix
        text_names = [self._text_name(_unwrap_name(name)) for name in names]
        return bool(prefix) and not any(name is not None and name.startswith(prefix) for name in text_names)

    def notes_on(self, names: Collection[str]) -> tuple[str, ...]:
        """Return warnings about the names of a folder's arrays, a line each."""
        if self.table_name_of is not None:
            return ()
        wrapped = [name for name in names if _unwrap_name(name) != name]
        notes = (
            [f"prefixes of wrappers are left out of {len(wrapped)} names, such as {min(wrapped)}"] if wrapped else []
        )
        if self.lacks_prefix(names) and not self.family.is_bare:
            notes.append(f"the names are a base model's; {self.family.base_prefix} is put before them")
        return tuple(notes)

    def _text_name(self, name: str) -> str | None:
        return name if self.multimodal is None else self.multimodal.table_name(name)

    def _add_prefix(self, name: str) -> str:
        return name if self._is_outside_base(name) else self.family.base_prefix + name

    def _is_outside_base(self, name: str) -> bool:
        """Return whether an array is outside the base model, by its name in a folder that lacks the base's prefix."""
        predictor = self.family.predictor
        words = {f"{rule.name.partition('.')[0]}." for rule in self.family.weights}
        predictor_prefix = () if predictor is None else (predictor.prefix_of(self.config),)
        return name.startswith((*words, *self.family.ignored_prefixes, *predictor_prefix))

    def _is_read(self, name: str) -> bool:
        """Return whether the model has a leaf for an array of this name in the family's table."""
        table = self.family.classifier
        if table is not None and self.classifier is not None and table.reads(name, self.classifier):
            return True
        predictor = self.family.predictor
        if predictor is not None and name.startswith(predictor.prefix_of(self.config)):
            return self.predictor
        return not self.family.is_unread(name, self.config)


def _unwrap_name(name: str) -> str:
    """Return an array's name without the words that wrappers of torch put into it."""
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    while words[0] == _DATA_PARALLEL and len(words) > 1:
        words = words[1:]
    return ".".join(words)


def describe_model(path: Path, source: Folder | GGUF | None = None) -> PublishedModel:
    """Describe the model of a folder from its `config.json`, or of a GGUF file from its header.

    `source` is the opened folder or file, for callers that have opened it. Raises a `ValueError` for a model of no
    known family.
    """
    if isinstance(source, GGUF) or (source is None and path.is_file()):
        return _describe_file(path, GGUF(path) if source is None else source)
    config_file, attributes = str(path / CONFIG), read_json(path / CONFIG)
    model_attributes = {name: value for name, value in attributes.items() if name not in QUANTIZATION_KEYS}
    published = PublishedConfig(model_attributes, config_file)
    family, multimodal = _find_family(published)
    quantization = [attributes.get(name) for name in QUANTIZATION_KEYS]
    if multimodal is not None:
        text = multimodal.text_attributes(published)
        quantization += [text.pop(name, None) for name in QUANTIZATION_KEYS]
        published = PublishedConfig(text, f"{config_file}: {TEXT}")
    config = family.read(published)
    published.finish()
    private = ", ".join(name for name in private_names(attributes) if not published.has_read(name))
    notes = (f"{config_file}: private attributes are passed over: {private}.",) if private else ()
    form = _read_format(quantization, config_file) or _read_modelopt(path)
    classifier = _read_classifier(family, attributes, config_file)
    model = PublishedModel(family, config, multimodal, attributes, form, notes=notes, classifier=classifier)
    if (family.as_stored is None and not getattr(config, "tied", False)) or not has_weights(path):
        return model
    folder = Folder(path) if source is None else source
    if family.as_stored is not None:
        names = [name for name in model.table_names(folder.names).values() if name is not None]
        return dataclasses.replace(model, config=family.as_stored(config, names))
    return _untie_different_head(model, folder)


def _read_classifier(family: Family, attributes: JsonObject, config_file: str) -> Classifier | None:
    """Return the classifier that a configuration states; None for a language model or a base model."""
    architecture = _read_architecture(attributes)
    if not names_classifier(architecture):
        return None
    if family.classifier is None:
        raise ValueError(f"{config_file}: architectures=[{architecture!r}]: the family has no classifiers.")
    return family.classifier.read(str(architecture), PublishedConfig(attributes, config_file))


def _read_architecture(attributes: JsonObject) -> object:
    """Return the first of a configuration's `architectures`; None if it states none."""
    architectures = attributes.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None


def _describe_file(path: Path, file: GGUF) -> PublishedModel:
    attributes = configuration_of(file)
    published = PublishedConfig(attributes, str(path))
    family, _ = _find_family(published)
    config = family.read(published)
    published.finish()
    classifier = _read_classifier(family, attributes, str(path))
    return PublishedModel(family, config, None, attributes, table_name_of=table_names_of(file), classifier=classifier)


def is_encoder(path: str | Path) -> bool:
    """Return whether the model of a published folder, or of a GGUF file, is an encoder for masked tokens.

    Only the `model_type` in the folder's `config.json`, or the architecture in the file's header, decides.
    """
    file = Path(path) / CONFIG
    if Path(path).is_file():
        model_type = model_type_of(GGUF(Path(path)))
    else:
        model_type = read_json(file).get("model_type") if file.exists() else None
    families = [family for family in FAMILIES.values() if family.is_encoder]
    return any(model_type in (family.model_type, *family.aliases) for family in families)


def is_classifier(path: str | Path) -> bool:
    """Return whether a published folder, or a GGUF file, is of a classifier of texts or tokens.

    A folder's `architectures` alone decide, or the names of a file's arrays.
    """
    if Path(path).is_file():
        return has_classifier(GGUF(Path(path)))
    file = Path(path) / CONFIG
    return file.exists() and names_classifier(_read_architecture(read_json(file)))


def read_classifier(path: str | Path) -> Classifier:
    """Return the sizes of the classifier of a published folder or a GGUF file; raise a `ValueError` for another
    model."""
    classifier = describe_model(Path(path)).classifier
    if classifier is None:
        raise ValueError(
            f"read_classifier({str(path)!r}): the folder's config.json names no model ForSequenceClassification or "
            "ForTokenClassification; give the folder of a classifier."
        )
    return classifier


def read_label_attributes(path: str | Path) -> JsonObject:
    """Return the attributes of a published classifier: the content of `config.json`, or the same attributes of a GGUF
    file."""
    return describe_model(Path(path)).attributes


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors of weights; a run's copy of a published folder has none."""
    return any((folder / name).exists() for name in (SINGLE, INDEX))


def _untie_different_head(model: PublishedModel, folder: Folder) -> PublishedModel:
    """Untie the model if `config.json` ties the head to the embedding table, but the folder stores a different head.

    Transformers also reads both arrays, and warns.
    """
    stored_name = {table_name: name for name, table_name in model.table_names(folder.names).items() if table_name}
    table_name, head_name = (stored_name.get(name) for name in (model.family.table_name, model.family.head_name))
    if table_name is None or head_name is None:
        return model
    if {folder.dtype_in_file(name) for name in (table_name, head_name)} - FLOATS.keys():
        return model
    table, head = folder.read(table_name), folder.read(head_name)
    # Arrays are compared row by row, to need little memory.
    if table.shape == head.shape and all(map(np.array_equal, table, head)):
        return model
    try:
        config = dataclasses.replace(model.config, tied=False)  # type: ignore[call-arg]
    except ValueError:
        return model  # The family supports no other head than the table.
    note = (
        f"{folder.call}: config.json ties the head to the table, but {head_name} differs from {table_name}; both are "
        "read, as transformers does, and the model is not tied."
    )
    return dataclasses.replace(model, config=config, notes=(*model.notes, note))


def _read_format(values: Sequence[object], source: str) -> Format | None:
    """Return the format that the values of the quantization keys state; refuse values that differ."""
    stated = [value for value in values if value]
    if not stated:
        return None
    if not isinstance(stated[0], dict) or any(value != stated[0] for value in stated):
        raise ValueError(f"{source}: {QUANTIZATION_KEYS[0]}={stated}: it must be one object.")
    return read_format(PublishedConfig(stated[0], f"{source}: {QUANTIZATION_KEYS[0]}", "this format"))


def _read_modelopt(path: Path) -> Format | None:
    """Return the format that ModelOpt's file states, in folders whose `config.json` states none."""
    file = path / MODELOPT
    if not file.exists():
        return None
    quantization = PublishedConfig(read_json(file), str(file)).nested("quantization")
    if quantization.get("quant_algo") is None:  # The file states the format of key-value caches only.
        return None
    stated = quantization | {"quant_method": "modelopt"}
    return read_format(PublishedConfig(stated, f"{file}: quantization", "this format"))


def _find_family(published: PublishedConfig) -> tuple[Family, MultimodalModel | None]:
    """Return the family that a configuration names, and the multimodal model whose text model is of that family."""
    model_type = published.text("model_type")
    families = [family for family in FAMILIES.values() if family.model_type]
    known = {str(name): family for family in families for name in (family.model_type, *family.aliases)}
    if model_type in known:
        return known[model_type], None
    text_models = {
        (multimodal.model_type, multimodal.text_type or str(family.model_type)): (family, multimodal)
        for family in FAMILIES.values()
        for multimodal in family.multimodal
    }
    candidates = {text_type: pair for (name, text_type), pair in text_models.items() if name == model_type}
    if not candidates:
        names = sorted({name for name, _ in text_models})
        published.refuse(
            f"model_type={model_type!r} is not known; the families are {', '.join(sorted(known))}, and the multimodal "
            f"models whose text model can be read are {', '.join(names)}."
        )
    text_config = published.nested(TEXT)
    if not text_config and not any(multimodal.defaults for _, multimodal in candidates.values()):
        alone = " or ".join(repr(text_type) for text_type in sorted(candidates) if text_type in known)
        published.refuse(
            f"model_type={model_type!r}: a model of text and images or sound has the attributes of its text model in "
            f"{TEXT}, but there is no {TEXT}; move the attributes there, or take the text model's model_type, {alone}."
        )
    text_type = text_config.get("model_type") or (next(iter(candidates)) if len(candidates) == 1 else None)
    if not isinstance(text_type, str) or text_type not in candidates:
        published.refuse(
            f"{TEXT}: model_type={text_type!r} is not known; the text models of {model_type!r} are "
            f"{', '.join(sorted(candidates))}."
        )
    return candidates[text_type]


def format_of(
    call: str, like: str | Path | None, config: ModelConfig | None, model: Transformer
) -> tuple[Family, ModelConfig]:
    """Return the family and the config of a model that came from a folder, or was built from a config.

    In a folder without weights, `config.json` may wrongly tie the head; then the model decides whether its head is
    tied.
    """
    if like is not None and config is None:
        published = describe_model(Path(like))
        if getattr(published.config, "tied", False) and model.head is not None and not has_weights(Path(like)):
            return published.family, dataclasses.replace(published.config, tied=False)  # type: ignore[call-arg]
        return published.family, published.config
    if config is not None and like is None:
        family = family_of(call, config)
        if family.model_type is None:
            raise ValueError(f"{call}: the family of {type(config).__name__} has no common published format.")
        return family, config
    raise ValueError(
        f"{call}: give either like=, the folder that the model came from, or the config= it was built from."
    )


def lacks_head(model: Transformer, config: ModelConfig) -> bool:
    """Return whether a model is a base model of this config: it lacks the head that models of the config have."""
    if model.head is not None or model.classifier is not None:
        return False
    expected = model_shapes(config)
    base = without_head(expected)
    return _shapes(model) == _shapes(base) != _shapes(expected)


def check_shapes(call: str, model: Transformer, config: ModelConfig) -> None:
    """Raise a `ValueError` that names arrays of other shapes than a model of this config has."""
    expected_model = model_shapes(config, predictor=model.predictor is not None, classifier=classifier_of(model))
    shapes, expected_shapes = _shapes(model), _shapes(expected_model)
    names = sorted(shapes.keys() | expected_shapes.keys())
    if differing := [name for name in names if shapes.get(name) != expected_shapes.get(name)]:
        changes = "; ".join(f"{name}: {shapes.get(name)}, not {expected_shapes.get(name)}" for name in differing[:4])
        raise ValueError(f"{call}: the model is not one of {config} ({changes}); give the config it was built from.")


def _shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flatten_model(model).items()}
