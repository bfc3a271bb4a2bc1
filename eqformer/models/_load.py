"""Loads published models: a folder into a model, on one device or straight into the shards of a plan."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from .. import nn
from .._shapes import is_shape
from ..nn import float_dtype
from ..parallel import Plan, shardings
from ._attributes import Attribute, kinds_of
from ._config_types import ranges_in
from ._family import ModelConfig
from ._folder import Folder
from ._gguf_file import GGUF
from ._leaf_reader import Filled, read
from ._published_arrays import Arrays
from ._published_model import described, Description
from ._quantized_weights import kept_maps, with_kept
from ._registry import build, FAMILIES, predictor_of
from ._weight_rules import Weight


def read_config(path: str | Path) -> ModelConfig:
    """The config of the model published in a folder, or in one file of GGUF."""
    return described(Path(path)).config


def load(
    path: str | Path,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    dtype: DTypeLike | None = None,
    weights: str = "decoded",
    predictor: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Transformer:
    """The model published in a folder, or in one file of GGUF, on the first device, or sharded by a plan.

    Each array of the folder is memory-mapped, read once, and copied into the shards that this process's devices hold;
    only the shards of one leaf (one array of all layers, or arrays that are published as one) are in host memory at a
    time. The model computes in the dtype of its embedding table; `nn.with_execution` sets how it runs. Of a model of
    several kinds of data the text model is read. A warning lists the arrays that are left unread by rule: of its other
    parts, and of predictors of further tokens that are not asked for.

    Args:
        path: The folder, or the file.
        mesh: Alone it stands for `Plan(mesh, zero=3)`, which splits everything it can.
        plan: Where arrays lie.
        dtype: That of all leaves (names such as `bf16` too); None: each has its published one (one wide enough for all
            layers). Fields marked `nn.float32_at_least` are no narrower than that.
        weights: `"decoded"`: weights in fewer bits are, those of GGUF to float32 without a `dtype`, others to that of
            the configuration. `"kept"`: linear maps hold their codes and scales (`nn.QuantizedLinear`), with the same
            logits.
        predictor: Whether what predicts a further token is read too.
        progress: Is called with the bytes read so far, and in all.

    Raises a `ValueError` for a folder that is not what it says, and one that lists what is left over: arrays of the
    folder that no rule reads (but for a head that is stored beside its equal, the table to which it is tied), leaves
    that no array fills (but for a head's, which a base model lacks: a warning says that they are initialized by a fixed
    key), attributes of `config.json` that the family does not know. With `weights="kept"` also one that names what no
    map can hold as it is stored.
    """
    plan = _plan(path, mesh, plan)
    found = _to_read(path, dtype, weights, predictor)
    places = _places(plan, found.empty)
    sharding_of = dict(zip(map(id, jax.tree.leaves(found.empty)), jax.tree.leaves(places), strict=True))
    made: dict[int, Array] = {}
    total, done = sum(one.nbytes for one in found.filled), 0
    for one in found.filled:
        made |= zip(map(id, one.targets), read(found.arrays, one, [sharding_of[id(leaf)] for leaf in one.targets]))
        done += one.nbytes
        progress(done, total)
    made |= _initialized(found, predictor, sharding_of)
    made |= _numbers_of_layers(found.empty, sharding_of)
    model = eqx.combine(jax.tree.map(lambda leaf: made[id(leaf)], found.empty), found.rest)
    return dataclasses.replace(model, compute_dtype=found.compute_dtype)


def load_shapes(path: str | Path, *, dtype: DTypeLike | None = None, weights: str = "decoded") -> nn.Transformer:
    """The shapes of what `load` gives, of any size: no array of the folder is read.

    Raises what `load` raises.
    """
    found = _to_read(path, dtype, weights, predictor=False)
    dtypes = {id(leaf): its for one in found.filled for leaf, its in zip(one.targets, one.dtypes, strict=True)}
    dtypes |= {leaf: its for leaf, (_, its) in found.absent.items()}
    narrow = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(id(leaf), leaf.dtype))
    model = eqx.combine(jax.tree.map(narrow, found.empty), found.rest)
    return dataclasses.replace(model, compute_dtype=found.compute_dtype)


class _ToRead(NamedTuple):
    """A model whose arrays are still to be read."""

    arrays: Arrays
    empty: PyTree
    """Its shapes, with None for all else."""
    rest: PyTree
    """All else."""
    filled: list[Filled]
    absent: dict[int, tuple[int, str]]
    """A head's leaves that the folder lacks, by their ids: the place among the leaves that `build` makes, and dtype."""
    config: ModelConfig
    compute_dtype: str


def _to_read(path: str | Path, dtype: DTypeLike | None, weights: str, predictor: bool) -> _ToRead:
    source = GGUF(Path(path)) if Path(path).is_file() else Folder(path)
    dtype = None if dtype is None else float_dtype(dtype, f"{source.call}: dtype={dtype!r}")
    said = described(source.path, source if isinstance(source, GGUF) else None)
    if predictor:
        predictor_of(f"{source.call}: predictor=True", said.family)
        said = dataclasses.replace(said, predictor=True)
    arrays = Arrays(source, said)
    _check_sizes(arrays, said.config)
    shapes = eqx.filter_eval_shape(lambda: build(said.config, predictor=predictor, key=jax.random.key(0)))
    rules = said.family.rules(said.config, shapes, arrays.shapes, said.tower)
    absent = [rule for rule in rules if _is_absent_head(arrays, said, rule, shapes)]
    rules = [rule for rule in rules if rule not in absent]
    _check_names(arrays, said, rules, absent, shapes)
    notes = () if isinstance(source, GGUF) else source.notes
    names = tuple(f"{source.call}: {note}." for note in said.notes_on(source.names))
    for note in (*notes, *said.notes, *names, _note_on(absent, arrays, shapes), arrays.unread):
        if note:
            warnings.warn(note, stacklevel=3)
    dtypes = _dtypes(arrays, rules, shapes, dtype)
    kept = _kept(arrays, rules, shapes, weights)
    empty, rest = eqx.partition(with_kept(shapes, kept), is_shape)
    filled = [Filled.of(arrays, rule, its, shapes, kept) for rule, its in zip(rules, dtypes, strict=True)]
    of_head = {id(leaf) for rule in absent for leaf in rule.leaves(shapes)}
    leaves = enumerate(jax.tree.leaves(eqx.filter(shapes, is_shape)))
    places = {id(leaf): (place, dtypes[0]) for place, leaf in leaves if id(leaf) in of_head}
    return _ToRead(arrays, empty, rest, filled, places, said.config, dtypes[0])


def _is_absent_head(arrays: Arrays, said: Description, rule: Weight, shapes: nn.Transformer) -> bool:
    """Whether a rule is of what stands between the base model and the logits, and the folder has none of its arrays."""
    names = {name for _, name in rule.places(rule.leaves(shapes)[0])}
    return said.family.is_of_head(rule, shapes) and not names & arrays.names


def _note_on(absent: list[Weight], arrays: Arrays, shapes: nn.Transformer) -> str:
    if not absent:
        return ""
    names = ", ".join(rule.name for rule in absent)
    return (
        f"{arrays.call}: the folder has no {names}, as of a base model, so that these arrays of the head are "
        "initialized by a fixed key: the logits mean nothing before they are trained."
    )


def _initialized(found: _ToRead, predictor: bool, sharding_of: dict[int, Sharding]) -> dict[int, Array]:
    """Return the leaves of a head that the folder lacks, as `build` makes them by a fixed key."""
    if not found.absent:
        return {}
    places = found.absent

    def initial() -> dict[int, Array]:
        made = jax.tree.leaves(
            eqx.filter(build(found.config, predictor=predictor, key=jax.random.key(0)), eqx.is_array)
        )
        return {number: made[place].astype(dtype) for number, (place, dtype) in places.items()}

    return jax.jit(initial, out_shardings={number: sharding_of[number] for number in places})()


_LITTLE = {"entries": 2**24, "layers": 512}  # a model of so many is traced at once, whatever the folder holds


def _check_sizes(arrays: Arrays, config: ModelConfig) -> None:
    """Raise a `ValueError` for sizes far beyond those of the folder's arrays, before a model of them is traced."""
    numbers = {name: math.prod(shape) for name, shape in arrays.shapes.items()}
    largest = max(numbers, key=lambda name: numbers[name], default="")
    limits = {
        "entries": (numbers.get(largest, 0), f"its largest array, {largest}, has {numbers.get(largest, 0)} numbers"),
        "layers": (len(numbers), f"it has {len(numbers)} arrays"),
    }
    entries = [
        entry for family in FAMILIES.values() if isinstance(config, family.config) for entry in family.attributes
    ]
    attributes = {entry.name: entry.published for entry in entries if isinstance(entry, Attribute)}
    for name, kind in kinds_of(type(config)).items():
        value = getattr(config, name, None)
        if isinstance(value, ModelConfig):
            _check_sizes(arrays, value)
        if not isinstance(value, int):
            continue
        for counts in {bounds.counts for bounds in ranges_in(kind)} & limits.keys():
            limit, why = limits[counts]
            if value > max(limit, _LITTLE[counts]):
                published = attributes.get(name, name)
                attribute = published if isinstance(published, str) else published[0]
                raise ValueError(
                    f"{arrays.call}: the configuration says {attribute}={value}, and the folder holds no such model: "
                    f"{why}; take the config.json that was published with the arrays."
                )


def _plan(path: str | Path, mesh: Mesh | None, plan: Plan | None) -> Plan | None:
    if mesh is None or plan is None:
        return plan if mesh is None else Plan(mesh, zero=3)
    if plan.mesh != mesh:
        raise ValueError(f"load({str(path)!r}, mesh, plan): the plan is for another mesh, {plan.mesh}; give the plan.")
    return plan


def _kept(arrays: Arrays, rules: list[Weight], shapes: nn.Transformer, weights: str) -> dict[int, nn.QuantizedLinear]:
    if weights not in ("decoded", "kept"):
        raise ValueError(f"{arrays.call}: weights={weights!r}: they are 'decoded' or 'kept'.")
    return kept_maps(arrays, rules, shapes) if weights == "kept" else {}


def _places(plan: Plan | None, shapes: PyTree) -> PyTree:
    if plan is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: first, shapes)
    return shardings(plan.parameter_specs(shapes), plan.mesh)


def _check_names(
    arrays: Arrays, said: Description, rules: list[Weight], absent: list[Weight], shapes: nn.Transformer
) -> None:
    """Raise a `ValueError` for arrays that no rule reads, and for leaves that no array fills."""
    filled, wanted = {id(leaf) for rule in absent for leaf in rule.leaves(shapes)}, set[str]()
    for rule in rules:
        leaves = rule.leaves(shapes)
        filled.update(map(id, leaves))
        wanted.update(name for _, name in rule.places(leaves[0]))
    named = jax.tree_util.tree_leaves_with_path(shapes)
    empty = [jax.tree_util.keystr(path) for path, leaf in named if id(leaf) not in filled and _is_float(leaf)]
    missing, spare = wanted - arrays.names, arrays.names - wanted
    spare = {name for name in spare if not name.endswith(said.family.ignored_suffixes)}
    head = said.family.head_name
    copies = said.family.copies(said.config, shapes) | ({head: shapes.embedding.weight} if shapes.head is None else {})
    copies = {name: leaf for name, leaf in copies.items() if name in spare}
    spare -= copies.keys()
    if codes := arrays.unexplained((wanted & arrays.names) | (spare if missing else set())):
        raise ValueError(
            f"{arrays.call}: {codes} holds codes, and config.json has no quantization_config that says how they are "
            "meant; take the config.json that was published with them."
        )
    if missing or spare or empty:
        parts = (("not in the folder", missing), ("in no rule", spare), ("filled by no array", set(empty)))
        faults = "; ".join(f"{what}: {', '.join(sorted(names)[:8])} ({len(names)})" for what, names in parts if names)
        raise ValueError(f"{arrays.call}: {faults}.")
    for copy, leaf in copies.items():
        own = next(rule for rule in rules if rule.leaves(shapes)[0] is leaf)
        _check_copy(arrays, copy, next(own.places(leaf))[1], head)


def _check_copy(arrays: Arrays, copy: str, name: str, head: str) -> None:
    table, its = np.asarray(arrays.read(name)), np.asarray(arrays.read(copy))
    if table.shape == its.shape and all(map(np.array_equal, table, its)):  # row by row, in little memory
        return
    if copy == head:
        raise ValueError(
            f"{arrays.call}: the configuration ties the head to the table, and {head} is another array than {name}; "
            "with tie_word_embeddings=false it would be read."
        )
    raise ValueError(
        f"{arrays.call}: a predictor shares the model's table and head, and {copy} is another array than {name}; leave "
        "out predictor=True, and the model is read without it."
    )


def _dtypes(arrays: Arrays, rules: list[Weight], shapes: nn.Transformer, dtype: str | None) -> list[str]:
    """The dtype of what each rule fills: the one asked for or else its own, float32 at least where a field says so."""
    flags = zip(jax.tree.leaves(shapes), jax.tree.leaves(nn.float32_flags(shapes)), strict=True)
    wide = {id(leaf) for leaf, is_wide in flags if is_wide}
    found = [dtype or _dtype(arrays, rule, shapes) for rule in rules]
    is_wide = [any(id(leaf) in wide for leaf in rule.leaves(shapes)) for rule in rules]
    return [str(nn.at_least_float32(jnp.dtype(its))) if one else its for its, one in zip(found, is_wide)]


def _dtype(arrays: Arrays, rule: Weight, shapes: nn.Transformer) -> str:
    """The dtype in which no array that the rule reads loses anything."""
    return str(nn.lossless_dtype(*{arrays.dtype(name) for _, name in rule.places(rule.leaves(shapes)[0])}))


def _numbers_of_layers(shapes: nn.Transformer, sharding_of: dict[int, Sharding]) -> dict[int, Array]:
    """The arrays that are no parameters: layers' numbers."""
    leaves = [stack.numbers for stack in nn.modules(shapes, nn.Stack)]
    return {id(leaf): jax.device_put(np.arange(leaf.size, dtype=leaf.dtype), sharding_of[id(leaf)]) for leaf in leaves}


def _is_float(leaf: object) -> bool:
    return is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
