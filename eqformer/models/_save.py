"""Saving of models in the published format, for transformers and other programs that read such folders."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Never

import jax
import numpy as np
from jaxtyping import Array, Shaped

from .._files import is_there, JsonObject, parse_json, read_bytes, read_json_list
from ..nn import LoRA, modules, named_modules, QuantizedLinear, Transformer
from . import _published_model as published_model
from ._config_types import PublishedConfig
from ._family import Family, ModelConfig, TEXT
from ._folder import CONFIG, Folder, GENERATION_CONFIG, new_folder, write_folder
from ._hub import COMPANION_FILES, MODULES
from ._published_arrays import names_as_stored, plain_shapes, PublishedArrays
from ._weight_rules import flatten_model, NOTHING_STORED, ResolvedRule, StoredShapes


_END = "eos_token_id"
_TOKENS = "bos_token_id", _END, "pad_token_id"
_WEIGHTS = ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf"
_NOTHING: Mapping[str, Never] = MappingProxyType({})


def save(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    whole: bool = False,
    config: ModelConfig | None = None,
    attributes: Mapping[str, object] = _NOTHING,
    files: Mapping[str, str | bytes] = _NOTHING,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a folder that transformers loads; the folder is written atomically.

    A model without its head (`nn.without_head`) is written as a base model, as text encoders are published.
    transformers loads classifiers only of families for which it has such classes (see `docs/embeddings.md`); eqformer
    loads classifiers of all families.

    Args:
        model: The model.
        path: The folder, which must not exist yet.
        like: The published folder that the model came from. Its configuration, tokenizer, chat template and sampling
            settings are copied; the folder need not have weights any more. The text model of a multimodal model is
            written as a model of its own.
        whole: Whether to write the whole folder `like` again: this model's arrays replace the folder's, and all other
            arrays, the configuration and all other files are copied. Codes and scales that the model still has are
            copied from the folder. Of its subfolders, only those are copied that `modules.json` names, such as the
            pooling and the dense layers of a text encoder.
        config: The config from which the model was built, if it did not come from a folder.
        attributes: Attributes that are added to the configuration (`pad_token_id`). If the config states another
            `eos_token_id` (Qwen4-Exp), `generation_config.json` has the added one, and `config.json` the config's.
        files: Files that are added to the folder, by name.
        shard_bytes: The size above which weights are written as several files.

    Raises:
        ValueError: Raised before anything is written, if `path` exists; the model has `LoRA`s; the model is not of this
            config; the published format cannot express a field of the config, or the pooling of the classifier; an
            attribute would change the config; with `whole`, the folder lacks arrays of the model; or the model holds
            codes that the folder does not have.
    """
    target, call = Path(path), f"save(model, {str(path)!r})"
    if target.exists():
        raise ValueError(f"{call}: this path exists already; give the path of a new folder.")
    if modules(model, LoRA):
        raise ValueError(f"{call}: the model has LoRAs; merge them with nn.merge_lora, or save them with save_adapter.")
    if like is not None and Path(like).is_file():
        raise ValueError(
            f"{call}: like={str(like)!r} is one file, not a folder; give config=read_config({str(like)!r}) instead."
        )
    family, config = published_model.format_of(call, like, config, model)
    published: published_model.PublishedModel | None = None
    if like is None:
        if whole:
            raise ValueError(f"{call}: whole=True writes the folder that the model came from again; give it as like=.")
        configuration = _configuration(family, config) | _classifier_attributes(call, family, model)
        if model.predictor is not None and family.predictor is not None:
            configuration |= family.predictor.attributes
    else:
        has_predictor = model.predictor is not None
        published = dataclasses.replace(published_model.describe_model(Path(like)), predictor=has_predictor)
        configuration = published.attributes if whole else _text_configuration(published)
        if published.classifier is None:
            configuration |= _classifier_attributes(call, family, model)
        files = _copied_files(Path(like), whole) | dict(files)
    if attributes and TEXT not in configuration:
        attributes, files = _check_attributes(call, family, configuration, attributes, files)
    plain = plain_shapes(model)
    if published_model.lacks_head(plain, config):
        configuration = configuration | {"architectures": [_base_architecture(family.architecture)]}
    else:
        published_model.check_shapes(call, plain, config)
    if whole and published is not None:
        arrays = _arrays_of_whole_folder(Folder(str(like), caller="save"), published, plain, model, call)
    elif quantized := [name for name, _ in named_modules(model, QuantizedLinear)]:
        raise ValueError(
            f"{call}: the model holds codes of 8 or 4 bits ({quantized[0]}); nn.dequantize it or, if it was loaded "
            "with weights='quantized', write its folder again with like= and whole=True."
        )
    else:
        stored = NOTHING_STORED if published is None else _stored_shapes(published, Path(str(like)))
        rules = family.rules(config, model, stored)
        arrays = itertools.chain(
            published_arrays(rules, model), _copied_arrays(family, config, model), family.constants(config).items()
        )
        dtype = str(flatten_model(model)[rules[0].paths[0]].dtype)
        configuration = configuration | {"torch_dtype": dtype}  # Every release of transformers reads this older name.
    module_folders = _module_folders(Path(like)) if whole and like is not None else []
    with new_folder(target) as part:
        for folder in module_folders:
            shutil.copytree(folder, part / folder.name)
        write_folder(part, arrays, configuration | dict(attributes), shard_bytes)
        for name, content in files.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _configuration(family: Family, config: ModelConfig) -> JsonObject:
    """Return the configuration of a text model outside of any multimodal model."""
    return {"architectures": [family.architecture], "model_type": family.model_type} | family.write(config)


def _classifier_attributes(call: str, family: Family, model: Transformer) -> JsonObject:
    """Return the attributes of a model's classifier; none for a model without one."""
    if model.classifier is None or family.classifier is None:
        return {}
    return family.classifier.write(call, family.architecture, model)


def _check_attributes(
    call: str,
    family: Family,
    configuration: JsonObject,
    attributes: Mapping[str, object],
    files: Mapping[str, str | bytes],
) -> tuple[Mapping[str, object], Mapping[str, str | bytes]]:
    """Return the attributes to add to a configuration, and the files; refuse attributes that change the config.

    An `eos_token_id` that would change the config is added to `generation_config.json` instead, where it only says
    which id ends a generated text.
    """
    before = vars(family.read(PublishedConfig(configuration, call)))

    def changes(added: Mapping[str, object]) -> list[str]:
        after = vars(family.read(PublishedConfig({**configuration, **added}, call)))
        return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]

    if _END in attributes and changes({_END: attributes[_END]}):
        generation = dict(parse_json(files.get(GENERATION_CONFIG, "{}"))) | {_END: attributes[_END]}
        files = {**files, GENERATION_CONFIG: json.dumps(generation, indent=2)}
        attributes = {name: value for name, value in attributes.items() if name != _END}
    if changed := changes(attributes):
        raise ValueError(
            f"{call}: the attributes {dict(attributes)} would change the config of the saved model ({changed[0]}); "
            "leave them out, or save a model of the changed config."
        )
    return attributes, files


def _base_architecture(architecture: str) -> str:
    """Return the name of a family's class of base models in transformers, given its class of models with a head."""
    return f"{re.sub('For[A-Z].*|LMHeadModel', '', architecture)}Model"


def _text_configuration(published: published_model.PublishedModel) -> JsonObject:
    """Return the configuration of a folder's text model as a model of its own."""
    attributes = published.attributes
    if published.multimodal is None:
        return {
            name: value
            for name, value in attributes.items()
            if name not in (*published_model.DTYPE_KEYS, *published_model.QUANTIZATION_KEYS)
        }
    merged = attributes | {name: value for name, value in attributes.get(TEXT, {}).items() if value is not None}
    tokens = {name: merged[name] for name in _TOKENS if name in merged}
    return _configuration(published.family, published.config) | tokens


def _copied_files(path: Path, whole: bool) -> dict[str, bytes]:
    """Return the files that are copied from a folder: its companions or, with `whole`, all but weights and config."""
    names = {file.name for file in path.iterdir() if file.is_file()} - {CONFIG}
    copied = {name for name in names if not name.endswith(_WEIGHTS)} if whole else names & {*COMPANION_FILES}
    return {name: read_bytes(path / name) for name in sorted(copied)}


def _module_folders(path: Path) -> list[Path]:
    """Return the folders in `path` that sentence-transformers' `modules.json` lists."""
    if not is_there(file := path / MODULES):
        return []
    listed = [module.get("path") for module in read_json_list(file)]
    return sorted(folder for folder in path.iterdir() if folder.name in listed and folder.is_dir())


def _stored_shapes(published: published_model.PublishedModel, path: Path) -> StoredShapes:
    """Return the shapes of a folder's arrays; none for a folder without weights, such as a run's copy of a folder."""
    if not published_model.has_weights(path):
        return NOTHING_STORED
    return PublishedArrays(Folder(str(path), caller="save"), published).shapes


def _arrays_of_whole_folder(
    folder: Folder, published: published_model.PublishedModel, plain: Transformer, model: Transformer, call: str
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yield each array of a folder by name: arrays of the model from the model, all other arrays from the folder.

    Codes and scales are read from the folder, after they are compared with the model's.

    Args:
        folder: The folder that the model came from.
        published: The description of the folder.
        plain: The model's `plain_shapes`.
        model: The model.
        call: The call that errors name.
    """
    arrays = PublishedArrays(folder, published)
    rules = published.family.rules(published.config, plain, arrays.shapes, published.multimodal)
    own_names = {name for rule in rules for name in rule.published_names()}
    if missing := own_names - arrays.names:
        raise ValueError(
            f"{call}: whole=True writes {folder.path} again, which does not hold all of the model ({min(missing)}); "
            "give the whole folder as like=."
        )
    unchanged = names_as_stored(arrays, rules, model, call)
    rules = [rule for rule in rules if rule.published_names()[0] not in unchanged]
    replaced = {arrays.stored_name(name) for name in own_names - unchanged}
    tied = published.family.tied_leaves(model).items()
    tied_leaf = {arrays.stored_name(name): path for name, path in tied if name in arrays.names - own_names}
    leaves = flatten_model(model)
    copied = published.family.copied_leaves(published.config, model).keys()
    other_names = sorted(folder.names - replaced - tied_leaf.keys() - copied)
    return itertools.chain(
        ((arrays.stored_name(name), array) for name, array in published_arrays(rules, model)),
        ((name, np.asarray(leaves[path])) for name, path in tied_leaf.items()),
        _copied_arrays(published.family, published.config, model),
        ((name, folder.read_any(name)) for name in other_names),
    )


def _copied_arrays(
    family: Family, config: ModelConfig, model: Transformer
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yield the arrays that are published twice for a model with a predictor, by their second name."""
    leaves = flatten_model(model)
    return ((name, np.asarray(leaves[path])) for name, path in family.copied_leaves(config, model).items())


def published_arrays(
    rules: Sequence[ResolvedRule], model: Transformer
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yield each published array of a model, with its published name."""
    leaves = flatten_model(model)
    for rule in rules:
        for piece in rule.pieces():
            index = (*piece.index, piece.rows) if rule.shards else piece.index
            yield piece.name, rule.to_published([_slice(leaves[path], index) for path in rule.paths])


def _slice(leaf: Array | Shaped[np.ndarray, "..."], index: tuple[int | slice, ...]) -> Shaped[np.ndarray, "..."]:
    """Return a part of an array; an array on an accelerator or on several devices is sliced there before it is
    copied."""
    if isinstance(leaf, jax.Array) and (len(leaf.devices()) > 1 or next(iter(leaf.devices())).platform != "cpu"):
        return np.asarray(leaf[index] if index else leaf)
    return np.asarray(np.asarray(leaf)[index])
