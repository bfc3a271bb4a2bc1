"""Loading of published models: from a folder into a model, on one device or directly into the shards of a plan.

A model is flattened once into `{path: leaf}`. Each rule of its family fills some of these leaves, and one loop reads,
converts and places the leaves of one rule after another.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from .. import nn
from ..nn import float_dtype
from ..parallel import Plan, shardings
from ._attributes import Attribute, field_types
from ._config_types import ranges_in
from ._family import ModelConfig
from ._folder import Folder
from ._gguf_file import GGUF
from ._hub import local_path
from ._leaf_reader import group_leaves, LeafGroup, read_leaves
from ._published_arrays import find_quantized_maps, PublishedArrays, with_quantized_maps
from ._published_model import describe_model, PublishedModel
from ._registry import build, FAMILIES, predictor_of, shapes as model_shapes
from ._weight_rules import flatten_model, ResolvedRule, unflatten_model


def read_config(path: str | Path) -> ModelConfig:
    """Return the config of the model published in a folder, or in one file of GGUF."""
    return describe_model(local_path(path)).config


def load(
    path: str | Path,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    weights: str = "decoded",
    head: bool = True,
    predictor: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Transformer:
    """Load the model published in a folder, or in one file of GGUF, to the first device, or sharded by a plan.

    Each array of the folder is memory-mapped, read once, and copied into the shards that this process's devices hold.
    Host memory holds the shards of only one leaf at a time, or of a few leaves that are published as one array; a leaf
    has the weights of all layers. The model computes in the dtype of its embedding table; `nn.with_execution` sets how
    the model runs. If the folder holds a multimodal model, only its text model is read. A warning lists the arrays that
    are left unread on purpose: arrays of other parts, and arrays of a predictor unless `predictor` is True.

    Args:
        path: The folder, the file, or the name of a model of the hub (see `local_path`).
        mesh: The mesh, if no `plan` is passed. The plan is then `Plan(mesh, zero=3)`, which shards every array that
            can be sharded.
        plan: The plan that places the arrays.
        dtype: The dtype of all leaves, also a short name such as `bf16`; None: each leaf has its published dtype, or
            one that is wide enough for all layers. Fields marked `nn.float32_field` have at least float32.
        weights: `"decoded"`: quantized weights are decoded to `dtype`, which by default is float32 for GGUF and the
            dtype of the configuration otherwise. `"quantized"`: linear maps hold codes and scales
            (`nn.QuantizedLinear`), with the same logits.
        head: Whether the head is read. Without a head, `encode` returns the hidden vectors of the base model, which
            text encoders pool, and logits are computed with the embedding table.
        predictor: Whether a predictor, the module for multi-token prediction, is read too.
        progress: A function that is called with the number of bytes read so far and the number of all bytes.

    Raises:
        ValueError: If the arrays do not agree with their headers or with the configuration. The error lists arrays of
            the folder that no rule reads, leaves that no array fills, and attributes of `config.json` that the family
            does not know. Two deviations are no errors: a tied head may be stored as a second array that equals the
            embedding table, and a base model may lack a head, which is then initialized by a fixed key, with a warning.
            With `weights="quantized"`, the error names an array that no linear map can hold as it is stored.
    """
    plan = _choose_plan(path, mesh, plan)
    source = _open_model(path, dtype, weights, predictor, head)
    sharding_of = _shardings(plan, source.shapes)
    total, done = sum(group.nbytes for group in source.groups), 0
    leaves: dict[str, Array] = {}
    for group in source.groups:
        leaves |= read_leaves(source.arrays, group, sharding_of)
        done += group.nbytes
        progress(done, total)
    leaves |= _layer_numbers(source.shapes, sharding_of)
    known = {*leaves, *source.left_out}
    unread = [path for path in flatten_model(source.shapes) if path not in known]
    leaves |= _initialize_leaves(source, unread, predictor, sharding_of)
    model = _assemble_model(source, leaves)
    return dataclasses.replace(model, compute_dtype=source.compute_dtype)


def load_shapes(
    path: str | Path, *, dtype: jax.typing.DTypeLike | None = None, weights: str = "decoded", head: bool = True
) -> nn.Transformer:
    """Return the shapes and dtypes of the model that `load` returns, without reading an array of the folder.

    Raises the errors of `load`.
    """
    source = _open_model(path, dtype, weights, predictor=False, head=head)
    leaves = flatten_model(source.shapes)
    leaves |= {
        name: jax.ShapeDtypeStruct(leaves[name].shape, jnp.dtype(source.compute_dtype)) for name in source.absent
    }
    for group in source.groups:
        leaves |= group.leaves
    return dataclasses.replace(_assemble_model(source, leaves), compute_dtype=source.compute_dtype)


class _ModelSource(NamedTuple):
    """A published model whose arrays are still to be read."""

    arrays: PublishedArrays
    shapes: nn.Transformer
    """The model with shapes instead of arrays."""
    groups: list[LeafGroup]
    """The leaves that each rule fills."""
    absent: list[str]
    """The paths of a head's leaves that the folder lacks."""
    left_out: list[str]
    """The paths of a head's leaves that are not to be read."""
    published: PublishedModel
    compute_dtype: str


def _assemble_model(source: _ModelSource, leaves: Mapping[str, Array | jax.ShapeDtypeStruct]) -> nn.Transformer:
    """Return the model with these leaves; without its head if the head is not to be read."""
    if not source.left_out:
        return unflatten_model(source.shapes, leaves)
    shapes = flatten_model(source.shapes)
    return nn.without_head(
        unflatten_model(source.shapes, {**{path: shapes[path] for path in source.left_out}, **leaves})
    )


def _open_model(
    path: str | Path, dtype: jax.typing.DTypeLike | None, weights: str, predictor: bool, head: bool
) -> _ModelSource:
    """Compare a folder with its configuration and with the family's rules, and find the leaves that each rule fills.

    A warning lists the arrays that are left unread.
    """
    path = local_path(path)
    source = GGUF(path) if path.is_file() else Folder(path)
    leaf_dtype = None if dtype is None else float_dtype(dtype, f"{source.call}: dtype={dtype!r}")
    published = describe_model(source.path, source)
    if predictor:
        predictor_of(f"{source.call}: predictor=True", published.family)
        published = dataclasses.replace(published, predictor=True)
    arrays = PublishedArrays(source, published)
    _check_sizes(arrays, published.config)
    shapes = _build_shapes(published, source.call)
    all_rules = published.family.rules(published.config, shapes, arrays.shapes, published.multimodal)
    left_out = [rule for rule in all_rules if not head and published.family.is_of_head(rule)]
    absent = [rule for rule in all_rules if head and _is_absent_head(arrays, published, rule)]
    rules = [rule for rule in all_rules if rule not in absent + left_out]
    _check_names(arrays, published, rules, absent + left_out, shapes)
    name_notes = [f"{source.call}: {note}." for note in published.notes_on(source.names)]
    # Folders of base models usually lack a prefix, a head and further parts. So callers that load a model without its
    # head get no warnings about these.
    notes_on_parts = (*name_notes, _note_on_head(absent, arrays), arrays.unread) if head else ()
    for note in (*source.notes, *published.notes, *notes_on_parts):
        if note:
            warnings.warn(note, stacklevel=3)
    dtypes = _dtypes(arrays, rules, shapes, leaf_dtype)
    if weights not in ("decoded", "quantized"):
        raise ValueError(f"{arrays.call}: weights={weights!r}: weights must be 'decoded' or 'quantized'.")
    quantized = find_quantized_maps(arrays, rules, shapes) if weights == "quantized" else {}
    groups = [group_leaves(rule, rule_dtype, quantized) for rule, rule_dtype in zip(rules, dtypes, strict=True)]
    absent_leaves = [path for rule in absent for path in rule.paths]
    left_out_leaves = [path for rule in left_out for path in rule.paths]
    shapes = with_quantized_maps(shapes, quantized)
    compute_dtype = dtypes[0]  # The first rule is for the embedding table.
    return _ModelSource(arrays, shapes, groups, absent_leaves, left_out_leaves, published, compute_dtype)


def _is_absent_head(arrays: PublishedArrays, published: PublishedModel, rule: ResolvedRule) -> bool:
    """Return whether a rule is for the head, or for a layer between base model and head, that the folder lacks."""
    return published.family.is_of_head(rule) and arrays.names.isdisjoint(rule.published_names())


def _note_on_head(absent: Sequence[ResolvedRule], arrays: PublishedArrays) -> str:
    """Return the warning about arrays of the head that the folder lacks; empty if all are present."""
    if not absent:
        return ""
    names = ", ".join(rule.name for rule in absent)
    return (
        f"{arrays.call}: the folder has no {names}, like the folder of a base model, so these arrays of the head are "
        "initialized by a fixed key: the logits mean nothing before the head is trained."
    )


def _initialize_leaves(
    source: _ModelSource, paths: Sequence[str], predictor: bool, sharding_of: Mapping[str, Sharding]
) -> dict[str, Array]:
    """Return leaves that no array of the folder fills, as `build` initializes them with a fixed key.

    These are a head that the folder lacks, and constants, such as the numbers of the heads of an `nn.ALiBi`.
    """
    if not paths:
        return {}

    def initial() -> dict[str, Array]:
        published, key = source.published, jax.random.key(0)
        model = build(published.config, predictor=predictor, classifier=published.classifier, key=key)
        leaves = flatten_model(model)
        dtypes = {path: source.compute_dtype if nn.is_trainable(leaves[path]) else leaves[path].dtype for path in paths}
        return {path: leaves[path].astype(dtype) for path, dtype in dtypes.items()}

    return jax.jit(initial, out_shardings={path: sharding_of[path] for path in paths})()


def _layer_numbers(shapes: nn.Transformer, sharding_of: Mapping[str, Sharding]) -> dict[str, Array]:
    """Return the indices of each stack's layers, leaves that are no parameters."""
    stacks = nn.named_modules(shapes, nn.Stack)
    leaves = {f"{path}.numbers": stack.numbers for path, stack in stacks}
    return {
        path: jax.device_put(np.arange(leaf.size, dtype=leaf.dtype), sharding_of[path]) for path, leaf in leaves.items()
    }


def _build_shapes(published: PublishedModel, call: str) -> nn.Transformer:
    """Return the shapes of a published model.

    Raises a `ValueError` that names the attributes of `config.json` if no model has such a config.
    """
    config = published.config
    try:
        return model_shapes(config, predictor=published.predictor, classifier=published.classifier)
    except ValueError as error:
        fields: dict[str, str] = {}
        for name, value in re.findall(r"\b(\w+)=(\d[\d.e-]*)", str(error)):
            if hasattr(config, name):
                fields.setdefault(name, value)
        # If a number differs from the config's field of this name, the error is about another part of the model.
        is_of_config = all(value == str(getattr(config, name)) for name, value in fields.items())
        attributes = {_attribute_of(config, name): value for name, value in fields.items() if is_of_config}
        stated = [f"{name}={value}" for name, value in attributes.items() if name not in fields]
        note = f"config.json states {', '.join(stated)}: " if stated and published.table_name_of is None else ""
        raise ValueError(f"{call}: {note}{error}") from error


# Models up to these sizes are traced quickly, so their sizes are not compared with the folder's arrays.
_ALWAYS_TRACED = {"entries": 2**24, "layers": 512}


def _check_sizes(arrays: PublishedArrays, config: ModelConfig) -> None:
    """Raise a `ValueError` for sizes far larger than the folder's arrays, before a model of such sizes is traced."""
    sizes = {name: math.prod(shape) for name, shape in arrays.shapes.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    limits = {
        "entries": (sizes.get(largest, 0), f"its largest array, {largest}, has {sizes.get(largest, 0)} numbers"),
        "layers": (len(sizes), f"it has {len(sizes)} arrays"),
    }
    for name, field_type in field_types(type(config)).items():
        value = getattr(config, name, None)
        if isinstance(value, ModelConfig):
            _check_sizes(arrays, value)
        if not isinstance(value, int):
            continue
        for counted in {bounds.counts for bounds in ranges_in(field_type)} & limits.keys():
            limit, why = limits[counted]
            if value > max(limit, _ALWAYS_TRACED[counted]):
                raise ValueError(
                    f"{arrays.call}: the configuration has {_attribute_of(config, name)}={value}, but the folder does "
                    f"not hold such a model: {why}; take the config.json that was published with the arrays."
                )


def _attribute_of(config: ModelConfig, field: str) -> str:
    """Return the attribute of `config.json` that a config's field is read from, or the field's own name."""
    for family in FAMILIES.values():
        for entry in family.attributes if isinstance(config, family.config) else ():
            if isinstance(entry, Attribute) and entry.name == field:
                return entry.published_names[0]
    return field


def _choose_plan(path: str | Path, mesh: Mesh | None, plan: Plan | None) -> Plan | None:
    if mesh is None or plan is None:
        return plan if mesh is None else Plan(mesh, zero=3)
    if plan.mesh != mesh:
        raise ValueError(
            f"load({str(path)!r}, mesh, plan): the plan is for another mesh, {plan.mesh}; give only the plan."
        )
    return plan


def _shardings(plan: Plan | None, shapes: nn.Transformer) -> dict[str, Sharding]:
    """Return each leaf's sharding by its path; without a plan, leaves are on the first device of this process."""
    leaves = flatten_model(shapes)
    if plan is None:
        return dict.fromkeys(leaves, SingleDeviceSharding(jax.local_devices()[0]))
    arrays = eqx.filter(shapes, nn.has_shape)
    placed = jax.tree.leaves(shardings(plan.parameter_specs(arrays), plan.mesh))
    return dict(zip(leaves, placed, strict=True))


def _check_names(
    arrays: PublishedArrays,
    published: PublishedModel,
    rules: Sequence[ResolvedRule],
    absent: Sequence[ResolvedRule],
    shapes: nn.Transformer,
) -> None:
    """Raise a `ValueError` for arrays that no rule reads, and for leaves that no array fills.

    Args:
        arrays: The folder's arrays.
        published: The published model.
        rules: The rules that read arrays of the folder.
        absent: The rules for the head, if the folder lacks a head or the head is not to be read.
        shapes: The model's shapes.
    """
    filled = {path for rule in (*rules, *absent) for path in rule.paths}
    expected = {name for rule in rules for name in rule.published_names()}
    unfilled = {path for path, leaf in flatten_model(shapes).items() if path not in filled and nn.is_trainable(leaf)}
    of_absent = {name for rule in absent for name in rule.published_names()}
    missing, unexpected = expected - arrays.names, arrays.names - expected - of_absent
    unexpected = {name for name in unexpected if not name.endswith(published.family.ignored_suffixes)}
    constants = published.family.constants(published.config)
    unexpected -= constants.keys()
    tied = published.family.tied_leaves(shapes)
    copies = published.family.copied_leaves(published.config, shapes) | tied
    copies = {name: path for name, path in copies.items() if name in unexpected}
    unexpected -= copies.keys()
    if codes := arrays.unexplained((expected & arrays.names) | (unexpected if missing else set())):
        raise ValueError(
            f"{arrays.call}: {codes} holds codes, but config.json has no quantization_config that states their format; "
            "take the config.json that was published with the arrays."
        )
    _refuse_mismatches(arrays, missing, unexpected, unfilled)
    for name in sorted(constants.keys() & arrays.names):
        _check_constant(arrays, name, constants[name])
    for name, path in copies.items():
        original = next(rule for rule in rules if rule.paths[0] == path)
        _check_copy(arrays, name, original.published_names()[0], is_tied=name in tied)


def _refuse_mismatches(
    arrays: PublishedArrays, missing: Collection[str], unexpected: Collection[str], unfilled: Collection[str]
) -> None:
    """Raise a `ValueError` that lists missing arrays, arrays that no rule reads, and leaves that no array fills."""
    parts = (
        ("not in the folder", missing),
        ("in the folder, but not in the model", unexpected),
        ("in the model, but filled by no array", unfilled),
    )
    faults = [f"{fault}: {', '.join(sorted(names)[:8])} ({len(names)})" for fault, names in parts if names]
    if faults:
        raise ValueError(f"{arrays.call}: {'; '.join(faults)}.")


def _check_copy(arrays: PublishedArrays, copy: str, name: str, *, is_tied: bool) -> None:
    """Raise a `ValueError` unless both copies of an array that is published twice are equal."""
    original, copied = np.asarray(arrays.read(name)), np.asarray(arrays.read(copy))
    # Arrays are compared row by row, to need little memory.
    if original.shape == copied.shape and all(map(np.array_equal, original, copied)):
        return
    if is_tied:
        raise ValueError(
            f"{arrays.call}: the configuration ties the head to the table, but {copy} differs from {name}; set "
            f"tie_word_embeddings=false to read {copy}."
        )
    raise ValueError(
        f"{arrays.call}: a predictor shares the model's table and head, but {copy} differs from {name}; load without "
        "predictor=True to read the model alone."
    )


def _check_constant(arrays: PublishedArrays, name: str, expected: Shaped[np.ndarray, "..."]) -> None:
    """Raise a `ValueError` unless an array of whole numbers has the values that follow from the configuration."""
    try:
        stored = arrays.read_ids(name, 2**63)
    except ValueError as error:
        raise ValueError(f"{arrays.call}: {arrays.stored_name(name)}: {error}.") from None
    if not np.array_equal(stored, expected):
        raise ValueError(
            f"{arrays.call}: {arrays.stored_name(name)} is {stored.tolist()}, but {expected.tolist()} follows from the "
            "configuration; take the config.json that was published with the arrays."
        )


def _dtypes(
    arrays: PublishedArrays, rules: Sequence[ResolvedRule], shapes: nn.Transformer, dtype: str | None
) -> list[str]:
    """Return the dtype of the leaves that each rule fills.

    Leaves have `dtype` or, if `dtype` is None, the narrowest dtype in which no array of the rule is rounded. Fields
    marked `nn.float32_field` have at least float32. Tables of whole numbers have int32.
    """
    flags = jax.tree_util.tree_leaves_with_path(nn.float32_flags(shapes))
    float32_paths = {nn.path_name(path) for path, is_float32 in flags if is_float32}
    dtypes = []
    for rule in rules:
        if rule.ids_below:
            dtypes.append("int32")
            continue
        rule_dtype = dtype or str(nn.lossless_dtype(*{arrays.dtype(name) for name in rule.published_names()}))
        is_float32 = not float32_paths.isdisjoint(rule.paths)
        dtypes.append(str(nn.at_least_float32(jnp.dtype(rule_dtype))) if is_float32 else rule_dtype)
    return dtypes
