"""`jax.shard_map` over trees that hold more than arrays."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree


def filter_shard_map(fn: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """Run `fn` once a device, each on its pieces of the arguments' arrays; all else in the arguments is passed whole.

    `in_specs` is a tuple with, for each argument, a tree of `PartitionSpec`s whose leaves each stand for a whole
    subtree; `out_specs` likewise for the result. Where an argument has no array, the spec may be anything. Every mesh
    axis is manual, and the types of values (which axes they differ over) are checked: a result declared the same on
    all devices of an axis must be provably so. Works eagerly, jitted and differentiated, on a layer or a whole loss.
    """

    def mapped(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise ValueError(
                f"filter_shard_map: the function was called with {len(args)} arguments, but in_specs has "
                f"{len(in_specs)} entries; give one entry an argument."
            )
        arrays, rest = eqx.partition(args, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        specs = [spec for spec, leaf in zip(_spread(in_specs, args), jax.tree.leaves(args)) if eqx.is_array(leaf)]
        result_rest: list[Any] = []

        def per_device(*leaves: Any) -> PyTree:
            result = fn(*eqx.combine(jax.tree.unflatten(structure, leaves), rest))
            result, others = eqx.partition(result, eqx.is_array)
            result_rest[:] = [others]
            return result

        run = jax.shard_map(per_device, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=True)
        return eqx.combine(run(*leaves), result_rest[0])

    return mapped


def _spread(specs: PyTree, args: tuple) -> list[PartitionSpec]:
    """One spec a leaf of the arguments, from a tree in which one may stand for a whole subtree."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
    leaves: list[Any] = []
    jax.tree.map(
        lambda spec, part: leaves.extend([PartitionSpec() if spec is None else spec] * len(jax.tree.leaves(part))),
        tuple(specs),
        args,
        is_leaf=is_spec,
    )
    return leaves
