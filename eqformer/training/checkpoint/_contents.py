"""Contents of a checkpoint: the arrays of a state by name, and the metadata from which a run resumes exactly."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ... import nn
from ..._files import JsonObject
from ..._shapes import ArrayOrShape


def named_arrays(tree: PyTree) -> dict[str, ArrayOrShape]:
    """Return the arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, nn.has_shape))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(arrays) == len(leaves)
    return arrays


def to_stored(leaf: ArrayOrShape) -> ArrayOrShape:
    """Convert an array, or its shape, to the form that a checkpoint stores: random keys become their numbers."""
    if not _is_key(leaf):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def stored_shape(like: ArrayOrShape) -> jax.ShapeDtypeStruct:
    """Return the stored shape of an array like this one, with the sharding into which it is read."""
    sharding = None if isinstance(like, np.ndarray) else like.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = to_stored(like)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def from_stored(leaf: jax.Array, like: ArrayOrShape) -> jax.Array:
    """Convert a stored array back to an array like `like`; this inverts `to_stored`."""
    if not _is_key(like):
        return leaf
    implementations: list[str] = []
    # A traced key has an implementation; a key's shape has none.
    jax.eval_shape(lambda key: implementations.append(str(jax.random.key_impl(key))), like)
    return jax.random.wrap_key_data(leaf, impl=implementations[0])


def _is_key(leaf: ArrayOrShape) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_faults(saved: Mapping[str, list], wanted: Mapping[str, ArrayOrShape]) -> list[str]:
    """Return a sentence for each difference between saved leaves (name -> `[dtype, shape]`) and the wanted arrays."""
    faults = [f"leaf {name} is in the checkpoint and not in the model" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            faults.append(f"leaf {name} is in the model and not in the checkpoint")
            continue
        (dtype, shape), (model_dtype, model_shape) = saved[name], (str(leaf.dtype), list(leaf.shape))
        if (dtype, shape) != (model_dtype, model_shape):
            faults.append(
                f"leaf {name} is {dtype}{shape} in the checkpoint and {model_dtype}{model_shape} in the model"
            )
    return faults


# Metadata of a run.

_PACKAGES = ("eqformer", "jax", "equinox", "optax", "orbax-checkpoint")


def run_metadata(
    *, recipe: Mapping[str, object], step: int, data: Mapping[str, object], key: Key[Array, ""], **more: object
) -> JsonObject:
    """Return the metadata of a run as JSON: its recipe, the step, the position in the data and the random key."""
    raw = np.asarray(jax.random.key_data(key)).tolist()
    random_key = {"implementation": str(jax.random.key_impl(key)), "data": raw}
    return {"recipe": dict(recipe), "step": step, "data": dict(data), "random_key": random_key, **more}


def saved_key(metadata: JsonObject) -> Key[Array, ""]:
    """Return the random key that `run_metadata` wrote."""
    saved = metadata["random_key"]
    return jax.random.wrap_key_data(jnp.asarray(saved["data"], jnp.uint32), impl=saved["implementation"])


def metadata_to_json(metadata: Mapping[str, object]) -> str:
    """Write metadata and the installed versions as JSON; a `ValueError` names a value that JSON cannot hold."""
    _check_json("metadata", dict(metadata))
    return json.dumps(dict(metadata) | {"versions": versions()}, allow_nan=False)


def _check_json(path: str, value: object) -> None:
    match value:
        case dict():
            for name, member in value.items():
                _check_json(f"{path}[{name!r}]", member)
        case list() | tuple():
            for index, element in enumerate(value):
                _check_json(f"{path}[{index}]", element)
        case float() if not math.isfinite(value):
            raise ValueError(
                f"Checkpointer.save(metadata): {path} is {value}, but JSON has only finite numbers; save None or text."
            )
        case str() | int() | float() | None:
            return
        case _:
            raise ValueError(
                f"Checkpointer.save(metadata): {path} has the type {type(value).__name__}, which JSON does not have; "
                "save a Python number (`float(x)`, `x.tolist()`), or text."
            )


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the installed versions of packages, by default of those on which a run's numbers depend."""

    def find_version(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: find_version(package) for package in packages}
