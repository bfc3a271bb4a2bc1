"""The arrays of a state by name, as a checkpoint holds them."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ..._shapes import ArrayOrShape


def is_array(leaf: object) -> TypeGuard[ArrayOrShape]:
    """Whether a leaf is an array or the shape of one."""
    return isinstance(leaf, ArrayOrShape)


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, is_array))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves)
    return named


def written(leaf: ArrayOrShape) -> ArrayOrShape:
    """What is written of an array, or its shape: the array, or the numbers of random keys."""
    if not _is_key(leaf):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def to_read(like: ArrayOrShape) -> jax.ShapeDtypeStruct:
    """The shape of what was written of an array like this one, with the place where it is read to."""
    known = None if isinstance(like, np.ndarray) else like.sharding
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if known is None else known
    shape = written(like)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def as_it_was(leaf: jax.Array, like: ArrayOrShape) -> jax.Array:
    """What was written of an array like this one, as it was."""
    if not _is_key(like):
        return leaf
    kinds: list[str] = []
    jax.eval_shape(lambda key: kinds.append(str(jax.random.key_impl(key))), like)  # which shapes do not tell
    return jax.random.wrap_key_data(leaf, impl=kinds[0])


def _is_key(leaf: ArrayOrShape) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_faults(saved: Mapping[str, list], wanted: Mapping[str, Any]) -> list[str]:
    """Where the saved leaves (name -> `[dtype, shape]`) differ from the wanted arrays, one sentence for each leaf."""
    faults = [f"leaf {name} is in the checkpoint and not in the model" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            faults.append(f"leaf {name} is in the model and not in the checkpoint")
            continue
        (dtype, shape), mine = saved[name], (str(leaf.dtype), list(leaf.shape))
        if (dtype, shape) != mine:
            faults.append(f"leaf {name} is {dtype}{shape} in the checkpoint and {mine[0]}{mine[1]} in the model")
    return faults


_PACKAGES = ("eqformer", "jax", "equinox", "optax", "orbax-checkpoint")


def run_metadata(
    *, recipe: Mapping[str, Any], step: int, data: Mapping[str, Any], key: Key[Array, ""], **more: Any
) -> dict[str, Any]:
    """The metadata of a run: its recipe, the step, the position in the data and the random key, all JSON."""
    raw = np.asarray(jax.random.key_data(key)).tolist()
    random_key = {"implementation": str(jax.random.key_impl(key)), "data": raw}
    return {"recipe": dict(recipe), "step": step, "data": dict(data), "random_key": random_key, **more}


def saved_key(metadata: Mapping[str, Any]) -> Key[Array, ""]:
    """The random key that `run_metadata` wrote."""
    saved = metadata["random_key"]
    return jax.random.wrap_key_data(jnp.asarray(saved["data"], jnp.uint32), impl=saved["implementation"])


def as_json(metadata: Mapping[str, Any]) -> str:
    """Metadata and the installed versions as JSON; a `ValueError` names what JSON has no word for."""
    _check("metadata", dict(metadata))
    return json.dumps(dict(metadata) | {"versions": versions()}, allow_nan=False)


def _check(path: str, value: object) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _check(f"{path}[{name!r}]", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check(f"{path}[{number}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"Checkpointer.save(metadata): {path} is {value}, which is no number of JSON; save None or text."
        )
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"Checkpointer.save(metadata): {path} is of {type(value).__name__}, which JSON does not have; save a "
            "number of Python's (`float(x)`, `x.tolist()`), or text."
        )


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """The installed versions of packages, by default of those on which a run's numbers depend."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: of(package) for package in packages}
