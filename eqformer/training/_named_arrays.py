"""The arrays of a state by name, as a checkpoint holds them."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._shapes import ArrayOrShape


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
