"""Published models: read a folder into a model, on one device or straight onto a mesh, and write one."""

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from ..nn import Transformer
from ._config import Config
from ._families import build, FAMILIES, Numbers
from ._folder import Folder, write_folder
from ._weights import Published, Weight


def read_numbers(path: str | Path) -> Numbers:
    """The numbers of the model published in a folder."""
    folder = Folder(path)
    return _numbers(folder)[1]


def load(
    path: str | Path,
    *,
    shardings: Callable[[Any], Any] | None = None,
    dtype: str | None = None,
    core: Callable[..., Array] | None = None,
    remat: str = "none",
    unroll: int = 1,
) -> Transformer:
    """The model published in a folder, with every array where `shardings` says, by default on the first device.

    `shardings` makes of the model's shapes a tree of shardings (`lambda shapes: shardings(plan.parameter_specs(shapes),
    plan.mesh)`); each device's part is then read by itself. Parameters have the published dtype, or `dtype`; the model
    computes in it. Raises a `ValueError` that lists what is left over: arrays of the folder that no rule reads, leaves
    that no array fills, attributes of `config.json` that the family does not know.
    """
    folder = Folder(path)
    published, numbers = _numbers(folder)
    rules = _rules(folder, published, numbers)
    shapes = eqx.filter_eval_shape(lambda: build(numbers, core=core, remat=remat, unroll=unroll, key=jax.random.key(0)))
    _check_names(folder, published, rules, shapes)
    kept = dtype or folder.dtype(next(rules[0].places(rules[0].leaves(shapes)[0]))[1])
    wanted = jax.tree.map(lambda leaf: _as(leaf, kept), shapes, is_leaf=_is_shape)
    places = jax.tree.map(lambda _: _first_device(), shapes) if shardings is None else shardings(wanted)
    sharding_of = dict(zip(map(id, jax.tree.leaves(shapes)), jax.tree.leaves(places), strict=True))
    arrays: dict[int, Array] = {}
    for rule in rules:
        leaves = rule.leaves(shapes)
        for number, leaf in enumerate(leaves):
            read = _reader(folder, rule, leaves, number, kept)
            arrays[id(leaf)] = jax.make_array_from_callback(leaf.shape, sharding_of[id(leaf)], read)
    rest = _not_published(numbers, shapes, arrays, sharding_of)
    model = jax.tree.map(lambda leaf: (arrays | rest)[id(leaf)] if _is_shape(leaf) else leaf, shapes, is_leaf=_is_shape)
    return dataclasses.replace(model, compute_dtype=kept)


def save(model: Transformer, numbers: Numbers, path: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
    """Write the model as a folder that transformers loads; it appears whole or not at all, and replaces nothing.

    `numbers` are the model's: what it was built from, or `read_numbers` of where it came from.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"save({str(path)!r}): something is there already; give a new folder.")
    published = _published_of(numbers)
    shapes = eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))
    if _named_shapes(eqx.filter(model, eqx.is_array)) != _named_shapes(eqx.filter(shapes, _is_shape)):
        raise ValueError(
            f"save(model, {numbers}): the model is not one of these numbers; give those it was built from."
        )
    rules = published.weights(numbers)
    dtype = str(rules[0].leaves(model)[0].dtype)
    config = {"architectures": [published.architecture], "model_type": published.model_type}
    config |= {"torch_dtype": dtype} | published.write(numbers)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    part.mkdir()
    try:
        write_folder(part, _published_arrays(rules, model), config, shard_bytes)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _numbers(folder: Folder) -> tuple[Published, Numbers]:
    source = str(folder.path / "config.json")
    config = Config(folder.config(), source)
    kind = config.take("model_type")
    known = {family.published.model_type: family.published for family in FAMILIES.values() if family.published}
    if kind not in known:
        raise ValueError(f"{source}: model_type={kind!r} is not known; the families are {', '.join(sorted(known))}.")
    numbers = known[kind].read(config)
    config.finish()
    return known[kind], numbers


def _rules(folder: Folder, published: Published, numbers: Numbers) -> list[Weight]:
    """The family's, without a prefix that the folder's names lack: of a model saved without its head's class."""
    rules, prefix = published.weights(numbers), published.prefix
    if any(name.startswith(prefix) for name in folder.names):
        return rules
    return [dataclasses.replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def _published_of(numbers: Numbers) -> Published:
    for family in FAMILIES.values():
        if isinstance(numbers, family.numbers) and family.published is not None:
            return family.published
    raise ValueError(f"save(numbers={type(numbers).__name__}(...)): this family is published in no common format.")


def _check_names(folder: Folder, published: Published, rules: list[Weight], shapes: Transformer) -> None:
    filled, wanted = set[int](), set[str]()
    for rule in rules:
        leaves = rule.leaves(shapes)
        filled.update(map(id, leaves))
        wanted.update(name for _, name in rule.places(leaves[0]))
    named = jax.tree_util.tree_leaves_with_path(shapes)
    empty = [jax.tree_util.keystr(path) for path, leaf in named if id(leaf) not in filled and _is_float(leaf)]
    missing, spare = wanted - folder.names, folder.names - wanted
    spare = {name for name in spare if not name.endswith(published.ignored) and not name.startswith(published.unused)}
    if missing or spare or empty:
        parts = (("not in the folder", missing), ("in no rule", spare), ("filled by no array", set(empty)))
        told = "; ".join(f"{what}: {', '.join(sorted(names)[:8])} ({len(names)})" for what, names in parts if names)
        raise ValueError(f"load({str(folder.path)!r}): {told}.")


def _reader(folder: Folder, rule: Weight, leaves: tuple, number: int, dtype: str) -> Callable[[Any], np.ndarray]:
    leaf = leaves[number]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [part.indices(size) for part, size in zip(index, leaf.shape, strict=True)]
        result = np.empty([stop - start for start, stop, _ in bounds], jnp.dtype(dtype))
        for place, name in rule.places(leaf):
            if all(start <= at < stop for at, (start, stop, _) in zip(place, bounds)):
                try:
                    own = rule.to_own(folder.read(name), leaves, number)
                except ValueError as error:
                    raise ValueError(f"load({str(folder.path)!r}): {name}: {error}.") from None
                result[tuple(at - start for at, (start, _, _) in zip(place, bounds))] = own[index[rule.outer :]]
        return result

    return read


def _published_arrays(rules: list[Weight], model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    for rule in rules:
        leaves = rule.leaves(model)
        for place, name in rule.places(leaves[0]):
            yield name, rule.to_published([np.asarray(leaf[place] if place else leaf) for leaf in leaves])


def _not_published(
    numbers: Numbers, shapes: Transformer, arrays: dict[int, Array], sharding_of: dict[int, Any]
) -> dict[int, Array]:
    """The arrays that are no parameters: layers' numbers."""
    made = eqx.filter_jit(lambda: eqx.filter(build(numbers, key=jax.random.key(0)), _is_integer))()
    left = [leaf for leaf in jax.tree.leaves(shapes) if id(leaf) not in arrays]
    found = zip(left, jax.tree.leaves(made), strict=True)
    return {id(leaf): jax.device_put(array, sharding_of[id(leaf)]) for leaf, array in found}


def _named_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def _as(leaf: Any, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, dtype) if _is_float(leaf) else leaf


def _first_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_float(leaf: Any) -> bool:
    return _is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_integer(leaf: Any) -> bool:
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer)
