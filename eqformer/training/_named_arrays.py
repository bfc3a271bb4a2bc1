"""The arrays of a state by name, as a checkpoint holds them."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._shapes import ArrayOrShape


def is_array(leaf: object) -> TypeGuard[ArrayOrShape]:
    """Whether a leaf is an array or the shape of one."""
    return isinstance(leaf, ArrayOrShape)


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their paths; raises a `ValueError` for a random key, which checkpoints cannot hold."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, is_array))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves)
    for name, leaf in named.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"Checkpointer: leaf {name} is a random key; put `run_metadata(key=...)` in the metadata.")
    return named


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
