"""Saves models in the published format, for transformers and other programs that read such folders."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from .._read import read_bytes
from ..nn import LoRA, modules, named_modules, QuantizedLinear, Transformer
from ._family import Family, ModelConfig
from ._folder import CONFIG, Folder, new_folder, write_folder
from ._multimodal import TEXT
from ._published_arrays import Arrays
from ._published_model import check_shapes, described, Description, DTYPES, format_of, has_weights, QUANTIZATION_KEYS
from ._quantized_weights import names_as_stored, plain_shapes
from ._weight_rules import NOTHING_STORED, Stored, Weight


# What a published folder holds beside its configuration and weights.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
_WEIGHTS = ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def save(
    model: Transformer,
    path: str | Path,
    *,
    like: str | Path | None = None,
    whole: bool = False,
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
            settings are copied; its weights may be gone. Of a model of several kinds of data, the text model is written
            by itself.
        whole: Write the folder `like` again with this model's arrays in the place of its own, and all else as it is
            there: other parts of the model, the configuration, every other file. Codes and scales that the model has
            kept stay as they are stored.
        config: For a model that was built here, the config that it was built from.
        attributes: What is added to the configuration (`eos_token_id`).
        files: Files that are added to the folder, by name.
        shard_bytes: The size above which weights are written as several files.

    Raises a `ValueError` before anything is written: if `path` exists, if the model has `LoRA`s or is not of this
    config, if the format cannot express a field of its config, if it is to be `whole` and the folder is not, and if it
    holds codes that the folder does not.
    """
    target, call = Path(path), f"save(model, {str(path)!r})"
    if target.exists():
        raise ValueError(f"{call}: something is there already; give a new folder.")
    if modules(model, LoRA):
        raise ValueError(f"{call}: the model has LoRAs; nn.merge_lora it, or save_adapter.")
    if like is not None and Path(like).is_file():
        raise ValueError(f"{call}: like={str(like)!r} is one file, not a folder; give config=read_config of it.")
    family, config = format_of(call, like, config, model)
    if like is None:
        if whole:
            raise ValueError(f"{call}: whole=True writes the folder that the model came from again; give it as like=.")
        said = _alone(family, config)
        if model.predictor is not None and family.predictor is not None:
            said |= family.predictor.attributes
    else:
        source = described(Path(like))
        said = source.said if whole else _by_itself(source)
        files = _files(Path(like), whole) | dict(files)
    plain = plain_shapes(model)
    check_shapes(call, plain, config)
    if whole:
        arrays = _of_whole(Folder(str(like), caller="save"), plain, model, call)
    elif held := [name for name, _ in named_modules(model, QuantizedLinear)]:
        raise ValueError(
            f"{call}: the model holds codes of 8 or 4 bits ({held[0]}); nn.dequantize it or, where it was loaded with "
            "weights='kept', write its folder again with like= and whole=True."
        )
    else:
        rules = family.rules(config, model, NOTHING_STORED if like is None else _stored(model, Path(like)))
        arrays = itertools.chain(published_arrays(rules, model), _copies(family, config, model))
        said = said | {"torch_dtype": str(rules[0].leaves(model)[0].dtype)}  # the older name is read by all
    with new_folder(target) as part:
        write_folder(part, arrays, said | dict(attributes), shard_bytes)
        for name, content in files.items():
            (part / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _alone(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The configuration of a model by itself."""
    return {"architectures": [family.architecture], "model_type": family.model_type} | family.write(config)


def _by_itself(source: Description) -> dict[str, Any]:
    """The configuration of a folder's model by itself."""
    if source.tower is None:
        return {name: value for name, value in source.said.items() if name not in (*DTYPES, *QUANTIZATION_KEYS)}
    both = source.said | {name: its for name, its in source.said.get(TEXT, {}).items() if its is not None}
    return _alone(source.family, source.config) | {name: both[name] for name in _TOKENS if name in both}


def _files(path: Path, whole: bool) -> dict[str, bytes]:
    """What is copied of a folder: its companions, or all that is no array and not written anew."""
    names = {file.name for file in path.iterdir() if file.is_file()} - {CONFIG}
    kept = {name for name in names if not name.endswith(_WEIGHTS)} if whole else names & {*COMPANIONS}
    return {name: read_bytes(path / name) for name in sorted(kept)}


def _stored(model: Transformer, path: Path) -> Stored:
    """The shapes of a folder's arrays; none where its weights are gone, as of a run's copy of what it began from."""
    if not has_weights(path):
        return NOTHING_STORED
    return Arrays(Folder(str(path), caller="save"), _read_for(model, path)).shapes


def _of_whole(folder: Folder, plain: Transformer, model: Transformer, call: str) -> Iterator[tuple[str, np.ndarray]]:
    """Each array of a folder, those that are the model's from it; codes and scales, once compared, from the folder.

    `plain` are the model's `plain_shapes`.
    """
    source = _read_for(model, folder.path)
    arrays = Arrays(folder, source)
    rules = source.family.rules(source.config, plain, arrays.shapes, source.tower)
    own = {name for rule in rules for _, name in rule.places(rule.leaves(plain)[0])}
    if missing := own - arrays.names:
        raise ValueError(
            f"{call}: whole=True writes {folder.path} again, which does not hold all of the model ({min(missing)}); "
            "give the whole folder as like=."
        )
    stays = names_as_stored(arrays, rules, plain, model, call)
    rules = [rule for rule in rules if next(rule.places(rule.leaves(plain)[0]))[1] not in stays]
    its = {arrays.stored_name(name) for name in own - stays}
    own_head = source.family.head_name
    head = arrays.stored_name(own_head) if model.head is None and own_head in arrays.names else None
    again = source.family.copies(source.config, model).keys()
    others = ((name, folder.stored(name)) for name in sorted(folder.names - its - {head} - again))
    mine = ((arrays.stored_name(name), array) for name, array in published_arrays(rules, model))
    tied = [] if head is None else [(head, np.asarray(model.embedding.weight))]
    copies = _copies(source.family, source.config, model)
    return itertools.chain(mine, tied, copies, others)


def _read_for(model: Transformer, like: str | Path) -> Description:
    """What the folder says that a model came from, with its predictor if the model has one."""
    return dataclasses.replace(described(Path(like)), predictor=model.predictor is not None)


def _copies(family: Family, config: ModelConfig, model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, np.asarray(leaf)) for name, leaf in family.copies(config, model).items())


def published_arrays(rules: list[Weight], model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """Each array that is published of a model, by its name there."""
    for rule in rules:
        leaves = rule.leaves(model)
        for place, name in rule.places(leaves[0]):
            yield name, rule.to_published([_part(leaf, place) for leaf in leaves])


def _part(leaf: Array | np.ndarray, place: tuple[int, ...]) -> np.ndarray:
    """A part of an array: cut where it lies, by a program, unless that is this process's own memory."""
    if isinstance(leaf, jax.Array) and (len(leaf.devices()) > 1 or next(iter(leaf.devices())).platform != "cpu"):
        return np.asarray(leaf[place] if place else leaf)
    return np.asarray(np.asarray(leaf)[place])
